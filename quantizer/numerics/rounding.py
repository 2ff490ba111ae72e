"""Rounding x / s to the codes of a format, before and after they are clamped."""

from __future__ import annotations

from torch import Tensor

from quantizer.numerics.qtype import QType

__all__ = ["as_stored", "nearest"]


def nearest(exact: Tensor, kind: QType, zero_point: Tensor | None) -> Tensor:
    """Round x / s to codes, in place, before they are clamped. FP8 is clamped first: a cast need not saturate."""
    if not kind.is_float:
        exact.round_()
        if zero_point is not None:
            exact.add_(zero_point)
    return exact


def as_stored(clamped: Tensor, kind: QType) -> Tensor:
    """Return clamped codes as the format stores them, in float32."""
    return clamped.to(kind.storage).float() if kind.is_float else clamped
