"""A scale as something to train: its logarithm, so that it stays positive and a step is a share of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["trained_scale"]


class _Divided(torch.autograd.Function):
    """What comes in, with its gradient multiplied by a factor."""

    @staticmethod
    def forward(change: Tensor, factor: float) -> Tensor:
        return change.view_as(change)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def trained_scale(start: Tensor, change: Tensor, values: int, qmax: int) -> Tensor:
    """start * exp(change), the gradient of ``change`` divided by sqrt(values * qmax).

    A scale's gradient is a sum over all values that it rounds, and would outrun theirs: hence the division (LSQ,
    arXiv:1902.08153, section 2.2). Scales are thousandths, and a step of Adam is as large for all parameters: hence the
    logarithm (arXiv:1903.08066, section 3.2). Before the first step the result is ``start``, bit for bit.

    Args:
        start: the scale [*] before training.
        change: the parameter [*], 0 at first.
        values: how many values share a scale: of a weight, or of one sample of an activation.
        qmax: the highest step of the format.
    """
    divided: Tensor = _Divided.apply(change, (values * qmax) ** -0.5)  # type: ignore[no-untyped-call]
    return start * divided.exp()
