"""``quantizer::quantize``, ``dequantize`` and ``fake_quantize`` as torch operators.

Legend: x [*] any shape; s the scale and z the zero point (0 without one), of one shape, see ``granularity.py``; q [*]
the steps, in the storage type of their format; x' [*] the values that they stand for.

=======  =====================================================  =================
format   q                                                      x'
=======  =====================================================  =================
integer  clamp(round(x / s) + z, qmin, qmax)                    (q - z) * s
FP8      clamp(x / s, qmin, qmax), rounded to the format        q * s
=======  =====================================================  =================

x / s is a division in float32, whatever the type of x and s. Rounding is to the nearest step, ties to the even one; x'
is rounded once, to the type that is asked for. That is ONNX ``QuantizeLinear``, with ``saturate`` for FP8
(https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html). ``torch.fake_quantize_*`` multiplies by 1 / s instead, which
differs near ties by at most one step. NaN stays NaN in x' and in FP8; its integer step is undefined.

They are custom operators, because ``torch.fake_quantize_*`` has no kernel for symbolic shapes and cannot be exported
with dynamic axes. Loading a traced or exported program that holds them needs ``import quantizer`` first. They check
nothing: reading a scale would wait for the device at each call. ``quantizer.functional`` does, for user code.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantizer.numerics.granularity import beside
from quantizer.numerics.granularity import in_blocks
from quantizer.numerics.qtype import QType
from quantizer.numerics.qtype import qtype

__all__ = ["dequantize", "fake_quantize", "quantize"]

_PIECE = 2**18
"""How many values' gradients a CPU computes at a time: what is allocated for more is mapped and cleared afresh at each
call, which takes longer than the arithmetic."""


def _steps(
    x: Tensor, scale: Tensor, dtype: str, axis: int | None, block_size: int | None, zero_point: Tensor | None
) -> Tensor:
    """q [*] in float32, laid out as ``empty_like(x)`` is, which is what the fake kernels promise.

    Works in place on its own buffer, as all that follows it does: these passes are bound by memory.
    """
    kind = qtype(dtype)
    result = torch.empty_like(x, dtype=torch.float32)
    steps = in_blocks(result, axis, block_size)
    torch.div(in_blocks(x.float(), axis, block_size), beside(scale, x.dim(), axis, block_size), out=steps)
    _nearest(steps, kind, None if zero_point is None else beside(zero_point, x.dim(), axis, block_size))
    return _held(result.clamp_(kind.qmin, kind.qmax), kind)


def _nearest(exact: Tensor, kind: QType, zero_point: Tensor | None) -> Tensor:
    """x / s to the steps before they are clamped, in place. FP8 is clamped first: a cast need not saturate."""
    if not kind.is_float:
        exact.round_()
        if zero_point is not None:
            exact.add_(zero_point)
    return exact


def _held(clamped: Tensor, kind: QType) -> Tensor:
    """Clamped steps as the format holds them, in float32."""
    return clamped.to(kind.storage).float() if kind.is_float else clamped


def _to_values(
    steps: Tensor, scale: Tensor, axis: int | None, block_size: int | None, zero_point: Tensor | None
) -> Tensor:
    """q [*] in float32 to x' [*], in place."""
    blocks = in_blocks(steps, axis, block_size)
    if zero_point is not None:
        blocks.sub_(beside(zero_point, steps.dim(), axis, block_size))
    blocks.mul_(beside(scale, steps.dim(), axis, block_size))
    return steps


@torch.library.custom_op("quantizer::quantize", mutates_args=())
def quantize(
    x: Tensor,
    scale: Tensor,
    dtype: str = "int8",
    axis: int | None = None,
    block_size: int | None = None,
    zero_point: Tensor | None = None,
) -> Tensor:
    """x [*] to steps q [*] in the storage type of ``dtype``."""
    return _steps(x, scale, dtype, axis, block_size, zero_point).to(qtype(dtype).storage)


@torch.library.custom_op("quantizer::dequantize", mutates_args=())
def dequantize(
    q: Tensor,
    scale: Tensor,
    dtype: str = "int8",
    axis: int | None = None,
    block_size: int | None = None,
    zero_point: Tensor | None = None,
) -> Tensor:
    """Steps q [*] to x' [*] in the scale's type. ``dtype`` says how a file stores q: two formats share int8 here."""
    return _to_values(q.float(), scale, axis, block_size, zero_point).to(scale.dtype)


@torch.library.custom_op("quantizer::fake_quantize", mutates_args=())
def fake_quantize(
    x: Tensor,
    scale: Tensor,
    dtype: str = "int8",
    axis: int | None = None,
    block_size: int | None = None,
    zero_point: Tensor | None = None,
) -> Tensor:
    """x [*] rounded to what ``dtype`` can hold, x' [*] in x's own type: dequantize(quantize(x))."""
    steps = _steps(x, scale, dtype, axis, block_size, zero_point)
    return _to_values(steps, scale, axis, block_size, zero_point).to(x.dtype)


@quantize.register_fake
def _(x: Tensor, scale: Tensor, dtype: str = "int8", *granularity: Any) -> Tensor:
    return torch.empty_like(x, dtype=qtype(dtype).storage)


@dequantize.register_fake
def _(q: Tensor, scale: Tensor, *format_and_granularity: Any) -> Tensor:
    return torch.empty_like(q, dtype=scale.dtype)


@fake_quantize.register_fake
def _(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("quantizer::inside", mutates_args=())
def _inside(
    x: Tensor,
    scale: Tensor,
    dtype: str,
    axis: int | None,
    block_size: int | None,
    zero_point: Tensor | None,
) -> Tensor:
    """1 where x [*] is not clipped and 0 where it is, [*] in int8, a byte a value.

    x is compared with the edges of the range, which is half of the work of dividing and rounding it again. Compared
    into floats: on a CPU these loops run on vectors, and those that write bool do not.
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
    """The least and the largest x that clamp leaves alone: FP8 is clamped before it is rounded, an integer after."""
    if kind.is_float:
        return kind.qmin * scale, kind.qmax * scale
    shift = torch.zeros_like(scale) if zero_point is None else zero_point.to(scale.dtype)
    first, last = kind.qmin - shift, kind.qmax - shift
    low, high = (first - 0.5) * scale, (last + 0.5) * scale
    # Halfway between two steps rounds to the even one, which may be the one beyond.
    infinity = torch.full_like(scale, torch.inf)
    return (
        low.where(first % 2 == 0, low.nextafter(infinity)),
        high.where(last % 2 == 0, high.nextafter(-infinity)),
    )


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """A byte a value where only x is trained; x itself where its scale is."""
    x, scale, ctx.dtype, ctx.axis, ctx.block_size, zero_point = inputs
    ctx.learns = ctx.needs_input_grad[1]
    if ctx.learns:
        ctx.save_for_backward(x, scale, zero_point)
    elif ctx.needs_input_grad[0]:
        ctx.save_for_backward(_inside(x, scale, ctx.dtype, ctx.axis, ctx.block_size, zero_point))


def _straight_through(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Rounding passes the gradient on, clipping stops it (Bengio et al. 2013, arXiv:1308.3432)."""
    if ctx.learns:
        return _with_learned_scale(ctx, gradient)
    # Read once: gradient checkpointing gives saved tensors out a single time.
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
    """The gradients of x [*] and of its scale: q - x / s where nothing was clipped, and q where it was (LSQ, Esser et
    al. 2020, arXiv:1902.08153, equation 3; q without its zero point).
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
    """Writes the gradient of x to ``passed`` and returns that of the scale. Scale and zero point stand beside x."""
    exact = in_blocks(x.float(), axis, block_size) / scale
    nearest = _nearest(exact.clone(), kind, zero_point)
    clamped = nearest.clamp(kind.qmin, kind.qmax)
    inside = torch.eq(nearest, clamped, out=nearest)
    rounded = _held(clamped, kind)
    if zero_point is not None:
        rounded = rounded - zero_point
    # Of what is outside nothing is subtracted, and 0 times infinity is no number.
    span = kind.qmax - kind.qmin + 1
    slope = rounded.addcmul_(exact.clamp_(-span, span), inside, value=-1)
    arriving = in_blocks(gradient.float(), axis, block_size)
    in_blocks(passed, axis, block_size).copy_(inside.mul_(arriving))
    return slope.mul_(arriving).sum_to_size(scale.shape)


@_lsq_gradients.register_fake
def _(gradient: Tensor, x: Tensor, scale: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gradient), torch.empty_like(scale)


fake_quantize.register_autograd(_straight_through, setup_context=_keep_for_backward)
