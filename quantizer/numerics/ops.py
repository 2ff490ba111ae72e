"""``quantizer::quantize``, ``dequantize`` and ``fake_quantize`` as torch operators.

Legend: x [*] any shape, s [] or [C] the scale, q = clamp(round(x / s), qmin, qmax), x' = q * s.

Rounding is to nearest, ties to even, of the quotient x / s, as ONNX ``QuantizeLinear`` defines it
(https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html). ``torch.fake_quantize_*`` multiplies by 1 / s instead, which
differs near ties by at most one step. Half and bfloat16 inputs are computed in float32 and rounded once, at the end.

They are custom operators, because ``torch.fake_quantize_*`` has no kernel for symbolic shapes and cannot be exported
with dynamic axes. Loading a traced or exported program that holds them needs ``import quantizer`` first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantizer.numerics.qtype import qtype

__all__ = ["dequantize", "fake_quantize", "quantize"]


def _shaped(scale: Tensor, ndim: int, axis: int | None) -> Tensor:
    """The scale [C] as [1, .., C, .., 1] beside a tensor of ``ndim`` axes; a scalar as it is."""
    if axis is None:
        return scale.float()
    shape = [1] * ndim
    shape[axis] = -1
    return scale.float().reshape(shape)


def _steps(x: Tensor, scale: Tensor, dtype: str, axis: int | None) -> Tensor:
    """round(x / s), clamped, in float32. Works in place on its own buffer: these passes are bound by memory."""
    kind = qtype(dtype)
    steps = torch.div(x.float(), _shaped(scale, x.dim(), axis))
    return steps.round_().clamp_(kind.qmin, kind.qmax)


@torch.library.custom_op("quantizer::quantize", mutates_args=())
def quantize(x: Tensor, scale: Tensor, dtype: str = "int8", axis: int | None = None) -> Tensor:
    """x [*] to steps q [*] in the storage type of ``dtype``."""
    return _steps(x, scale, dtype, axis).to(qtype(dtype).storage)


@quantize.register_fake
def _(x: Tensor, scale: Tensor, dtype: str = "int8", axis: int | None = None) -> Tensor:
    return torch.empty_like(x, dtype=qtype(dtype).storage)


@torch.library.custom_op("quantizer::dequantize", mutates_args=())
def dequantize(q: Tensor, scale: Tensor, axis: int | None = None) -> Tensor:
    """Steps q [*] back to q * s in the scale's dtype."""
    return (q.float() * _shaped(scale, q.dim(), axis)).to(scale.dtype)


@dequantize.register_fake
def _(q: Tensor, scale: Tensor, axis: int | None = None) -> Tensor:
    return torch.empty_like(q, dtype=scale.dtype)


@torch.library.custom_op("quantizer::fake_quantize", mutates_args=())
def fake_quantize(x: Tensor, scale: Tensor, dtype: str = "int8", axis: int | None = None) -> Tensor:
    """x [*] rounded to what ``dtype`` can hold, in x's own dtype: dequantize(quantize(x))."""
    return _steps(x, scale, dtype, axis).mul_(_shaped(scale, x.dim(), axis)).to(x.dtype)


@fake_quantize.register_fake
def _(x: Tensor, scale: Tensor, dtype: str = "int8", axis: int | None = None) -> Tensor:
    return torch.empty_like(x)


def _keep_operands(ctx: Any, inputs: tuple[Tensor, Tensor, str, int | None], output: Tensor) -> None:
    x, scale, ctx.dtype, ctx.axis = inputs
    ctx.save_for_backward(x, scale)


def _straight_through(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    """Rounding passes the gradient on, clipping stops it (Bengio et al. 2013, arXiv:1308.3432)."""
    x, scale = ctx.saved_tensors
    kind = qtype(ctx.dtype)
    steps = torch.div(x.float(), _shaped(scale, x.dim(), ctx.axis)).round_()
    return gradient * ((steps >= kind.qmin) & (steps <= kind.qmax)), None, None, None


fake_quantize.register_autograd(_straight_through, setup_context=_keep_operands)
