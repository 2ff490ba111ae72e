"""The torch operators ``quantizer::quantize``, ``dequantize``, ``fake_quantize`` and ``fake_quantize_dynamic``.

Legend: x [*] any shape; s the scale and z the zero point (0 without one), of one shape, see ``granularity.py``; q [*]
the quantized values, in the storage type of their format; x' [*] the dequantized values.

=======  =====================================================  =================
format   q                                                      x'
=======  =====================================================  =================
integer  clamp(round(x / s) + z, qmin, qmax)                    (q - z) * s
FP8      clamp(x / s, qmin, qmax), rounded to the format        q * s
=======  =====================================================  =================

x / s is a division in float32 for all types of x and s. Rounding is to nearest, ties to even; x' is rounded once, to
the type of the result. This is ONNX ``QuantizeLinear``, with ``saturate`` for FP8
(https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html). ``torch.fake_quantize_*`` multiplies by 1 / s instead, which
differs near ties by at most 1. NaN stays NaN in x' and in FP8; its integer is undefined.

These are custom operators, because ``torch.fake_quantize_*`` has no kernel for symbolic shapes and cannot be exported
with dynamic axes. A traced or exported program that contains them needs ``import quantizer`` before it is loaded. The
operators do not check their arguments, because reading a scale would wait for the device at each call.
``quantizer.functional`` checks them.

``fake_quantize_dynamic`` rounds values with their own range, and exports as the one operator that engines fuse. In
UINT8, for all of x:

    low = min(x, 0)    high = max(x, 0)
    s = (high - low) / (qmax - qmin)    z = clamp(round(qmin - low / s), qmin, qmax)

This is ONNX ``DynamicQuantizeLinear`` (https://onnx.ai/onnx/operators/onnx__DynamicQuantizeLinear.html). In INT8, for
each block of B neighbours along the last axis:

    s = max|x| / qmax

This is OpenVINO's dynamic quantization, as measured on its release 2026.4 (docs/design/numerics.md). s is 1 where it
would be 0. Nothing is clipped, so the gradient of x passes straight through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantizer.numerics.formats import qtype
from quantizer.numerics.granularity import beside, in_blocks
from quantizer.numerics.rounding import as_stored, keep_for_backward, nearest, straight_through


def _codes(
    x: Tensor, scale: Tensor, dtype: str, axis: int | None, block_size: int | None, zero_point: Tensor | None
) -> Tensor:
    """Return q [*] in float32, with the memory layout of ``empty_like(x)``, as the fake kernels promise.

    All passes work in place on one buffer, because they are bound by memory.
    """
    kind = qtype(dtype)
    result = torch.empty_like(x, dtype=torch.float32)
    codes = in_blocks(result, axis, block_size)
    torch.div(in_blocks(x.float(), axis, block_size), beside(scale, x.dim(), axis, block_size), out=codes)
    nearest(codes, kind, None if zero_point is None else beside(zero_point, x.dim(), axis, block_size))
    return as_stored(result.clamp_(kind.qmin, kind.qmax), kind)


def _to_values(
    codes: Tensor, scale: Tensor, axis: int | None, block_size: int | None, zero_point: Tensor | None
) -> Tensor:
    """Turn q [*] in float32 into x' [*], in place, and return it."""
    blocks = in_blocks(codes, axis, block_size)
    if zero_point is not None:
        blocks.sub_(beside(zero_point, codes.dim(), axis, block_size))
    blocks.mul_(beside(scale, codes.dim(), axis, block_size))
    return codes


@torch.library.custom_op("quantizer::quantize", mutates_args=())
def quantize(
    x: Tensor,
    scale: Tensor,
    dtype: str = "int8",
    axis: int | None = None,
    block_size: int | None = None,
    zero_point: Tensor | None = None,
) -> Tensor:
    """Return the quantized values q [*] of x [*], in the storage type of ``dtype``."""
    return _codes(x, scale, dtype, axis, block_size, zero_point).to(qtype(dtype).storage)


@torch.library.custom_op("quantizer::dequantize", mutates_args=())
def dequantize(
    q: Tensor,
    scale: Tensor,
    dtype: str = "int8",
    axis: int | None = None,
    block_size: int | None = None,
    zero_point: Tensor | None = None,
) -> Tensor:
    """Return x' [*] for q [*], in the scale's type; ``dtype`` matters only in files, as two formats share int8."""
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
    """Return dequantize(quantize(x)) [*] in the type of x."""
    codes = _codes(x, scale, dtype, axis, block_size, zero_point)
    return _to_values(codes, scale, axis, block_size, zero_point).to(x.dtype)


@quantize.register_fake
def _(x: Tensor, scale: Tensor, dtype: str = "int8", *granularity: Any) -> Tensor:
    return torch.empty_like(x, dtype=qtype(dtype).storage)


@dequantize.register_fake
def _(q: Tensor, scale: Tensor, *format_and_granularity: Any) -> Tensor:
    return torch.empty_like(q, dtype=scale.dtype)


@fake_quantize.register_fake
def _(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x)


fake_quantize.register_autograd(straight_through, setup_context=keep_for_backward)


def dynamic_range(x: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """Return s [] in float32 and z [] in the format's storage type, for x [*] with at least one value."""
    kind = qtype(dtype)
    low, high = torch.aminmax(x.float())
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = _positive((high - low) / (kind.qmax - kind.qmin))
    return scale, (kind.qmin - low / scale).clamp(kind.qmin, kind.qmax).round().to(kind.storage)


def block_scales(x: Tensor, dtype: str, block_size: int) -> Tensor:
    """Return s [.., K / B] in float32, of x [.., K]; B divides K."""
    return _positive(in_blocks(x.float(), -1, block_size).abs().amax(-1) / qtype(dtype).qmax)


def _positive(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))


@torch.library.custom_op("quantizer::fake_quantize_dynamic", mutates_args=())
def fake_quantize_dynamic(x: Tensor, dtype: str = "uint8", block_size: int | None = None) -> Tensor:
    """Return x' [*] in the type of x; ``block_size``: B, None: one range for all of x."""
    if x.numel() == 0:
        return torch.empty_like(x)
    if block_size is not None:
        blocks: Tensor = fake_quantize(x, block_scales(x, dtype, block_size), dtype, -1, block_size)
        return blocks
    scale, zero_point = dynamic_range(x, dtype)
    result: Tensor = fake_quantize(x, scale, dtype, None, None, zero_point)
    return result


@fake_quantize_dynamic.register_fake
def _(x: Tensor, dtype: str = "uint8", block_size: int | None = None) -> Tensor:
    return torch.empty_like(x)


def _straight_through(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return gradient, None, None


fake_quantize_dynamic.register_autograd(_straight_through)
