"""Operator patches for known libraries; importing this package registers them."""

from __future__ import annotations

from quantizer.patches.torch_modules import TORCH_PATCHES
from quantizer.patches.transformers_models import TRANSFORMERS_PATCHES

__all__ = ["TORCH_PATCHES", "TRANSFORMERS_PATCHES"]
