"""Sensitivity: the error caused by quantizing each group of sites, and the groups that fall back to float."""

from __future__ import annotations

from quantizer.algorithms.fallback import (
    Evaluation,
    Fallback,
    Tell,
    by_name,
    by_rank,
    fallback_for_target,
    operands_of,
    per_cost,
    search,
)
from quantizer.algorithms.sensitivity.gradient import Loss
from quantizer.algorithms.sensitivity.groups import groups_of
from quantizer.algorithms.sensitivity.measurement import Measurement
from quantizer.algorithms.sensitivity.metric import Metric, Score, fingerprint
from quantizer.utils.records import GroupSensitivity

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
