"""A scale as something to train: its logarithm, so that it stays positive and a step is a share of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantizer.numerics.held_scale import held_scale

__all__ = ["GAIN", "as_held", "learned", "trained_scale"]

GAIN = 100.0
"""How many times as far a scale's logarithm moves as a weight does, with the same rate of an Adam.

Weights are trained further with rates of some hundred thousandths, at which no scale would get anywhere."""


class _Divided(torch.autograd.Function):
    """The identity, with its gradient multiplied by a factor."""

    @staticmethod
    def forward(change: Tensor, factor: float) -> Tensor:
        return change.view_as(change)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class _Held(torch.autograd.Function):
    """A scale as a float type holds it; the gradient is that of the scale itself (straight through)."""

    @staticmethod
    def forward(scale: Tensor, dtype: torch.dtype) -> Tensor:
        return held_scale(scale, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def as_held(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a scale [*] as ``dtype`` holds it on the target, with a gradient: training rounds as the file will."""
    held: Tensor = _Held.apply(scale, dtype)  # type: ignore[no-untyped-call]
    return held


def learned(start: Tensor, change: Tensor) -> Tensor:
    """start * exp(GAIN * change), all [*]."""
    return start * (GAIN * change).exp()


def trained_scale(start: Tensor, change: Tensor, values: int, qmax: int, *, moves: bool = True) -> Tensor:
    """``learned``, the gradient of ``change`` divided by GAIN^2 * sqrt(values * qmax).

    A scale's gradient is a sum over all values that it rounds, and would outrun theirs: hence the division (LSQ,
    arXiv:1902.08153, section 2.2). Scales are thousandths, and a step of Adam is as large for all parameters: hence the
    logarithm (arXiv:1903.08066, section 3.2) and its gain, which the division by GAIN^2 makes no step of plain gradient
    descent larger by. Before the first step the result is ``start``, bit for bit.

    Args:
        start: the scale [*] before training.
        change: the parameter [*], 0 at first.
        values: how many values share a scale: of a weight, or of one sample of an activation.
        qmax: the highest step of the format.
        moves: False: ``change`` counts no more, and its gradient is 0, which it still has: processes that train
            together wait for the gradient of every parameter.
    """
    factor = (values * qmax) ** -0.5 / GAIN**2 if moves else 0.0
    divided: Tensor = _Divided.apply(change, factor)  # type: ignore[no-untyped-call]
    return learned(start, divided if moves else divided - divided.detach())
