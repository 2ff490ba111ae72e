"""The error that quantizing each group of sites makes, and the groups that fall back to float."""

from __future__ import annotations

from quantizer.common.old_paths import old_names
from quantizer.sensitivity.fallback import Evaluation
from quantizer.sensitivity.fallback import Fallback
from quantizer.sensitivity.fallback import by_name
from quantizer.sensitivity.fallback import by_rank
from quantizer.sensitivity.fallback import fallback_for_target
from quantizer.sensitivity.fallback import operands_of
from quantizer.sensitivity.fallback import per_cost
from quantizer.sensitivity.gradient import Loss
from quantizer.sensitivity.groups import groups_of
from quantizer.sensitivity.max_drop_search import Tell
from quantizer.sensitivity.max_drop_search import search
from quantizer.sensitivity.measurement import GroupSensitivity
from quantizer.sensitivity.measurement import Measurement
from quantizer.sensitivity.metric import Metric
from quantizer.sensitivity.metric import Score
from quantizer.sensitivity.score_cache import ScoreCache
from quantizer.sensitivity.score_cache import fingerprint

__all__ = [
    "Evaluation",
    "Fallback",
    "GroupSensitivity",
    "Loss",
    "Measurement",
    "Metric",
    "Score",
    "ScoreCache",
    "Tell",
    "by_name",
    "by_rank",
    "fallback_for_target",
    "fingerprint",
    "groups_of",
    "operands_of",
    "per_cost",
    "search",
]

__getattr__ = old_names(__name__, {"GroupError": "GroupSensitivity"})
