"""Rounding to quantized values, scales as targets store them, and the gradients of both.

Below its smallest normal number, a half float has fewer digits. A scale in that range is rounded up, so that no value
is clipped. It grows by at most the smallest number of the type. With that number as the scale, integer formats match
the type near 0, so nothing is lost that half floats would represent.

Trained scales are trained by their logarithm: a scale stays positive, and an optimizer's step is relative to it. See
``algorithms/qat/scales.py``. Legend as in ``torch_operators.py``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantizer.numerics.formats import QType, qtype
from quantizer.numerics.granularity import beside, in_blocks


def nearest(exact: Tensor, kind: QType, zero_point: Tensor | None) -> Tensor:
    """Round x / s to integers in place, unless the format is FP8, which a cast rounds after clamping."""
    if not kind.is_float:
        exact.round_()
        if zero_point is not None:
            exact.add_(zero_point)
    return exact


def as_stored(clamped: Tensor, kind: QType) -> Tensor:
    """Return clamped quantized values in float32; FP8 is rounded to the format."""
    return clamped.to(kind.storage).float() if kind.is_float else clamped


def held_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a scale [*] > 0 rounded to ``dtype``, in float32: to nearest, or up below its normal numbers."""
    # In float64, so that the only rounding is to the target's type.
    exact, info = scale.double(), torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    small = (exact / least).ceil().clamp(min=1) * least
    return torch.where(exact < info.smallest_normal, small, exact.to(dtype).double()).float()


def is_normal(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return True [*] where a scale [*] is at least the smallest normal number of ``dtype``."""
    return scale >= torch.finfo(dtype).smallest_normal


_PIECE = 2**18
"""Number of values whose gradients a CPU computes at a time. Memory of larger buffers is mapped and cleared at each
call, which takes longer than the arithmetic."""


@torch.library.custom_op("quantizer::inside", mutates_args=())
def _inside(
    x: Tensor,
    scale: Tensor,
    dtype: str,
    axis: int | None,
    block_size: int | None,
    zero_point: Tensor | None,
) -> Tensor:
    """Return a mask [*] in int8: 1 where x [*] is not clipped, 0 elsewhere.

    Comparing x with the edges of the range is half the work of dividing and rounding again. The comparisons write
    floats, because a CPU vectorizes these loops, but not those that write bool.
    """
    result, below = torch.empty_like(x, dtype=torch.float32), torch.empty_like(x, dtype=torch.float32)
    values = in_blocks(x.float(), axis, block_size)
    low, high = (beside(edge, x.dim(), axis, block_size) for edge in _edges(scale.float(), qtype(dtype), zero_point))
    torch.ge(values, low, out=in_blocks(result, axis, block_size))
    torch.le(values, high, out=in_blocks(below, axis, block_size))
    return result.mul_(below).to(torch.int8)


@_inside.register_fake
def _(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x, dtype=torch.int8)


def _edges(scale: Tensor, kind: QType, zero_point: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest unclipped x: FP8 is clamped before rounding, integers afterwards."""
    if kind.is_float:
        return kind.qmin * scale, kind.qmax * scale
    shift = torch.zeros_like(scale) if zero_point is None else zero_point.to(scale.dtype)
    first, last = kind.qmin - shift, kind.qmax - shift
    low, high = (first - 0.5) * scale, (last + 0.5) * scale
    # Ties round to even: halfway between the last integer and the next, x is clipped if the next one is even.
    infinity = torch.full_like(scale, torch.inf)
    return (
        low.where(first % 2 == 0, low.nextafter(infinity)),
        high.where(last % 2 == 0, high.nextafter(-infinity)),
    )


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the tensors for the gradient: x itself if its scale is trained, otherwise a mask of one byte per value."""
    x, scale, ctx.dtype, ctx.axis, ctx.block_size, zero_point = inputs
    ctx.learns = ctx.needs_input_grad[1]
    if ctx.learns:
        ctx.save_for_backward(x, scale, zero_point)
    elif ctx.needs_input_grad[0]:
        ctx.save_for_backward(_inside(x, scale, ctx.dtype, ctx.axis, ctx.block_size, zero_point))


def straight_through(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradient of x, 0 where x was clipped (Bengio et al. 2013, arXiv:1308.3432), and of a learned scale."""
    if ctx.learns:
        return _with_learned_scale(ctx, gradient)
    # With gradient checkpointing, saved tensors can be read only once.
    saved = ctx.saved_tensors
    return gradient * saved[0].to(gradient.dtype) if saved else None, None, None, None, None, None


def _with_learned_scale(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, scale, zero_point = ctx.saved_tensors
    passed, of_scale = _lsq_gradients(gradient, x, scale, ctx.dtype, ctx.axis, ctx.block_size, zero_point)
    return passed if ctx.needs_input_grad[0] else None, of_scale, None, None, None, None


@torch.library.custom_op("quantizer::lsq_gradients", mutates_args=())
def _lsq_gradients(
    gradient: Tensor,
    x: Tensor,
    scale: Tensor,
    dtype: str,
    axis: int | None,
    block_size: int | None,
    zero_point: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [*] and of its scale (LSQ, Esser et al. 2020, arXiv:1902.08153, equation 3).

    The gradient of the scale is q - x / s where x was not clipped and q where it was, with q less its zero point.
    """
    passed = torch.empty_like(gradient)
    zero = None if zero_point is None else beside(zero_point, x.dim(), axis, block_size)
    lsq = partial(_lsq_of, beside(scale, x.dim(), axis, block_size), qtype(dtype), axis, block_size, zero)
    if axis is None and x.numel() > _PIECE and x.device.type == "cpu":
        rows = max(1, _PIECE * len(x) // x.numel())
        pieces = zip(*(torch.split(whole, rows) for whole in (gradient, x, passed)), strict=True)
        summed = torch.stack([lsq(*piece) for piece in pieces]).sum()
    else:
        summed = lsq(gradient, x, passed)
    return passed, summed.reshape(scale.shape).to(scale.dtype)


def _lsq_of(
    scale: Tensor,
    kind: QType,
    axis: int | None,
    block_size: int | None,
    zero_point: Tensor | None,
    gradient: Tensor,
    x: Tensor,
    passed: Tensor,
) -> Tensor:
    """Write the gradient of x to ``passed``; return the scale's, broadcastable against ``in_blocks(x)``."""
    exact = in_blocks(x.float(), axis, block_size) / scale
    codes = nearest(exact.clone(), kind, zero_point)
    clamped = codes.clamp(kind.qmin, kind.qmax)
    inside = torch.eq(codes, clamped, out=codes)
    rounded = as_stored(clamped, kind)
    if zero_point is not None:
        rounded = rounded - zero_point
    # The mask cancels x / s where x was clipped; unclamped, an infinite x would make that 0 * inf = NaN.
    span = kind.qmax - kind.qmin + 1
    slope = rounded.addcmul_(exact.clamp_(-span, span), inside, value=-1)
    arriving = in_blocks(gradient.float(), axis, block_size)
    in_blocks(passed, axis, block_size).copy_(inside.mul_(arriving))
    return slope.mul_(arriving).sum_to_size(scale.shape)


@_lsq_gradients.register_fake
def _(gradient: Tensor, x: Tensor, scale: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gradient), torch.empty_like(scale)


GAIN = 100.0
"""Step of a scale's logarithm relative to that of a weight, at the same learning rate of Adam.

Fine-tuning uses learning rates around 1e-5, at which a scale would hardly change.
"""


class _ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(change: Tensor, factor: float) -> Tensor:
        return change.view_as(change)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class _RoundedScale(torch.autograd.Function):
    """A scale rounded to a float type, with a straight-through gradient."""

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
    rounded: Tensor = _RoundedScale.apply(scale, dtype)  # type: ignore[no-untyped-call]
    return rounded


def learned(start: Tensor, change: Tensor) -> Tensor:
    """Return start * exp(GAIN * change), all [*]."""
    return start * (GAIN * change).exp()


def trained_scale(start: Tensor, change: Tensor, values: int, qmax: int, *, moves: bool = True) -> Tensor:
    """Return ``learned(start, change)``, with the gradient of ``change`` divided by GAIN^2 * sqrt(values * qmax).

    The gradient of a scale is a sum over all values that share it, far larger than their gradients; hence the division
    (LSQ, arXiv:1902.08153, section 2.2). Scales are around 0.001, and Adam's steps have the same size for all
    parameters; hence the logarithm (arXiv:1903.08066, section 3.2) and its gain. The division by GAIN^2 cancels the
    gain for plain gradient descent. Before the first step the result is ``start``, bit for bit.
    """
    factor = (values * qmax) ** -0.5 / GAIN**2 if moves else 0.0
    divided: Tensor = _ScaledGradient.apply(change, factor)  # type: ignore[no-untyped-call]
    return learned(start, divided if moves else divided - divided.detach())
