"""Operator patches for known libraries: whoever rewrites source imports them, which registers them."""

from __future__ import annotations

from quantizer.patches.torch_modules import TORCH_PATCHES
from quantizer.patches.transformers_models import TRANSFORMERS_PATCHES

__all__ = ["TORCH_PATCHES", "TRANSFORMERS_PATCHES"]
