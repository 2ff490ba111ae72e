"""The error that quantizing each group of sites makes, and the groups that fall back to float."""

from __future__ import annotations

from quantizer.common.records import GroupSensitivity
from quantizer.sensitivity.fallback import (
    Evaluation,
    Fallback,
    by_name,
    by_rank,
    fallback_for_target,
    operands_of,
    per_cost,
)
from quantizer.sensitivity.gradient import Loss
from quantizer.sensitivity.groups import groups_of
from quantizer.sensitivity.max_drop_search import Tell, search
from quantizer.sensitivity.measurement import Measurement
from quantizer.sensitivity.metric import Metric, Score, fingerprint

__all__ = [
    "Evaluation",
    "Fallback",
    "GroupSensitivity",
    "Loss",
    "Measurement",
    "Metric",
    "Score",
    "Tell",
    "by_name",
    "by_rank",
    "fallback_for_target",
    "groups_of",
    "operands_of",
    "per_cost",
    "search",
    "fingerprint",
]
