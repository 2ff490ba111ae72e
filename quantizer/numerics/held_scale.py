"""Scales rounded to a float type of the target.

Below its smallest normal number a half float has fewer digits. A scale in that range is rounded up, so that no value is
clipped; it grows by at most the smallest number of the type. With that number as scale, integer formats have the same
numbers as the type itself near 0, so that nothing is lost that half floats would have kept.
"""

from __future__ import annotations

import torch
from torch import Tensor


def held_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a scale [*] > 0 rounded to ``dtype``, in float32: to nearest, below its normal numbers up."""
    # In float64, so that the only rounding is to the target's type.
    exact, info = scale.double(), torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    small = (exact / least).ceil().clamp(min=1) * least
    return torch.where(exact < info.smallest_normal, small, exact.to(dtype).double()).float()


def is_normal(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return True [*] where a scale [*] is at least the smallest normal number of ``dtype``."""
    return scale >= torch.finfo(dtype).smallest_normal
