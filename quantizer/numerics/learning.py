"""A scale as something to train: kept positive, its gradient in step with that of the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["trained_scale"]


class _TrainedScale(torch.autograd.Function):
    @staticmethod
    def forward(scale: Tensor, factor: float) -> Tensor:
        return scale.clamp_min(torch.finfo(scale.dtype).smallest_normal)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def trained_scale(scale: Tensor, values: int, qmax: int) -> Tensor:
    """The scale [*] with its gradient divided by sqrt(values * qmax) (LSQ, arXiv:1902.08153, section 2.2).

    A scale's gradient is a sum over all values that it rounds, and would outrun theirs. A scale that a step made
    negative counts as the smallest positive number, and is still pulled back.

    Args:
        scale: a parameter.
        values: how many values share a scale: of a weight, or of one sample of an activation.
        qmax: the highest step of the format.
    """
    result: Tensor = _TrainedScale.apply(scale, (values * qmax) ** -0.5)  # type: ignore[no-untyped-call]
    return result
