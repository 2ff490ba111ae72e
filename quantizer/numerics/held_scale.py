"""A scale as a float type of the target holds it.

Below the smallest normal number a half float has fewer digits: such a scale is rounded up, so that no value that it is
to hold is clipped, and its steps are at most one unit of the type's last digit coarser. At the smallest number of all
they are the very numbers that the type itself has there, so nothing is lost that half floats would have kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["held_scale", "is_normal"]


def held_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a scale [*] > 0 as ``dtype`` holds it, as float32: to the nearest, below its normal numbers up."""
    # In float64, so that the one rounding is to the target's type.
    exact, info = scale.double(), torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    small = (exact / least).ceil().clamp(min=1) * least
    return torch.where(exact < info.smallest_normal, small, exact.to(dtype).double()).float()


def is_normal(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return where a scale [*] is a normal number of ``dtype``, with all of its digits."""
    return scale >= torch.finfo(dtype).smallest_normal
