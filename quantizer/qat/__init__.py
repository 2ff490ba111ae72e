"""Training with rounded operands: what a trainable proxy is, and what of it is learned."""

from __future__ import annotations

from quantizer.qat.distillation import Distillation
from quantizer.qat.learned_scales import learn_scales
from quantizer.qat.learned_scales import learned_scales

__all__ = ["Distillation", "learn_scales", "learned_scales"]
