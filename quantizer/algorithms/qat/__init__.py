"""Quantization-aware training: a quantized proxy to train, its scales, and the schedule of a training."""

from __future__ import annotations

from quantizer.algorithms.qat.checkpoint import prepare_state_dict
from quantizer.algorithms.qat.distillation import Distillation
from quantizer.algorithms.qat.scales import ScaleKind, Scales, changed_scales, kinds_of, set_up_scales
from quantizer.algorithms.qat.session import Schedule, parameter_groups

__all__ = [
    "Distillation",
    "ScaleKind",
    "Scales",
    "Schedule",
    "changed_scales",
    "kinds_of",
    "parameter_groups",
    "prepare_state_dict",
    "set_up_scales",
]
