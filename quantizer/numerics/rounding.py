"""Rounding of x / s to the codes of a format, in two functions: before and after clamping."""

from __future__ import annotations

from torch import Tensor

from quantizer.numerics.qtype import QType


def nearest(exact: Tensor, kind: QType, zero_point: Tensor | None) -> Tensor:
    """Round x / s to integer codes, in place. FP8 is rounded by a cast after clamping: a cast need not saturate."""
    if not kind.is_float:
        exact.round_()
        if zero_point is not None:
            exact.add_(zero_point)
    return exact


def as_stored(clamped: Tensor, kind: QType) -> Tensor:
    """Return clamped codes in float32, rounded to the format if it is FP8."""
    return clamped.to(kind.storage).float() if kind.is_float else clamped
