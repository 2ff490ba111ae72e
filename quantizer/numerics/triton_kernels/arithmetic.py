"""Arithmetic that all kernels share: activations, and the quantization of a result.

A result v becomes INT8 as round(v / s) + z, ties to even, limited to [-128, 127]; NaN becomes z, which stands for 0,
because no integer stands for NaN. It becomes FP8 (E4M3) as v / s, limited to [-448, 448]; NaN stays. A tensor of
zeros has the scale 0: every result becomes z, or 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantizer.numerics.formats import FP8, INT8

KINDS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
"""The kind of a quantized result, for the kernels, by its type."""

_TIES_TO_EVEN = tl.constexpr(12582912.0)
"""1.5 times 2^23: the sum with a float32 below 2^22 has no fraction, so it is rounded."""

_LEAST_INT8, _LARGEST_INT8, _LARGEST_FP8 = (tl.constexpr(float(limit)) for limit in (INT8.qmin, INT8.qmax, FP8.qmax))

_SMALLEST_FP8 = tl.constexpr(2.0**-6)
"""The smallest normal number of FP8; below it, numbers are multiples of 2^-9."""

_TO_MULTIPLES = tl.constexpr(1.5 * 2.0**14)
"""The sum with a float32 below 2^13 is a multiple of 2^-9."""

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def activated(value, ACTIVATION: tl.constexpr):
    """Return the activation of float32 values."""
    if ACTIVATION == "relu":
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "gelu":
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh u) is the sigmoid of 2 u.
        value = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    elif ACTIVATION == "silu":
        value = value * tl.sigmoid(value)
    return value


@triton.jit
def dot_in_float32(a, b, total):
    """Return a b + total in float32 for a and b in half precision; Triton's interpreter multiplies no bfloat16."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total)


@triton.jit
def _on_fp8_grid(value):
    """Return float32 values rounded to numbers of FP8, which Triton's interpreter converts without an error.

    A GPU rounds when it converts; the interpreter truncates, or loses the next power of two.
    """
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(value) < _SMALLEST_FP8, (value + _TO_MULTIPLES) - _TO_MULTIPLES, normal)


@triton.jit
def quantized(value, scale, zero_point, KIND: tl.constexpr):
    """Return float32 values quantized to ``int8`` or ``fp8``; only INT8 has a zero point, a whole float32."""
    ratio = tl.where(scale == 0.0, 0.0, tl.div_rn(value, tl.where(scale == 0.0, 1.0, scale)))
    if KIND == "int8":
        ratio = tl.where(ratio == ratio, ratio, 0.0)
        limited = tl.minimum(tl.maximum(ratio, _LEAST_INT8 - zero_point), _LARGEST_INT8 - zero_point)
        result = ((limited + _TIES_TO_EVEN) - _TIES_TO_EVEN + zero_point).to(tl.int8)
    else:
        limited = tl.where(ratio == ratio, tl.minimum(tl.maximum(ratio, -_LARGEST_FP8), _LARGEST_FP8), ratio)
        if _INTERPRETED:
            limited = _on_fp8_grid(limited)
        result = limited.to(tl.float8e4nv)
    return result
