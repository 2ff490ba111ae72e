"""Scales trained by their logarithm: a scale stays positive, and an optimizer's step is relative to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantizer.numerics.held_scale import held_scale

GAIN = 100.0
"""The step of a scale's logarithm, relative to the step of a weight, at the same learning rate of Adam.

Weights are fine-tuned at learning rates of some 1e-5, at which a scale would hardly change."""


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
    """A scale rounded to a float type; the gradient passes straight through."""

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
    """Return a scale [*] rounded to ``dtype`` as in the exported file, with a straight-through gradient."""
    held: Tensor = _Held.apply(scale, dtype)  # type: ignore[no-untyped-call]
    return held


def learned(start: Tensor, change: Tensor) -> Tensor:
    """Return start * exp(GAIN * change), all [*]."""
    return start * (GAIN * change).exp()


def trained_scale(start: Tensor, change: Tensor, values: int, qmax: int, *, moves: bool = True) -> Tensor:
    """Return ``learned(start, change)``, with the gradient of ``change`` divided by GAIN^2 * sqrt(values * qmax).

    A scale's gradient is a sum over all values that share the scale, and would be far larger than theirs: hence the
    division (LSQ, arXiv:1902.08153, section 2.2). Scales are thousandths, and Adam's steps have the same size for all
    parameters: hence the logarithm (arXiv:1903.08066, section 3.2) and its gain. The division by GAIN^2 cancels the
    gain for plain gradient descent. Before the first step the result is ``start``, bit for bit.

    Args:
        start: the scale [*] before training.
        change: the parameter [*], 0 at first.
        values: how many values share a scale: of a weight, or of one sample of an activation.
        qmax: the highest code of the format.
        moves: False: the result is ``start``, and the gradient of ``change`` is 0 rather than None, because
            distributed training waits for the gradient of every parameter.
    """
    factor = (values * qmax) ** -0.5 / GAIN**2 if moves else 0.0
    divided: Tensor = _Divided.apply(change, factor)  # type: ignore[no-untyped-call]
    return learned(start, divided if moves else divided - divided.detach())
