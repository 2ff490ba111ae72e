"""Quantization of tensors for user code, with checks of all arguments.

Legend: x [*] float values; s the scale; z the zero point, of the shape of s; q [*] the quantized values.

The formats are ``int8``, ``fp8`` (E4M3, saturating), ``int4`` and ``uint8``. Only ``uint8`` takes a zero point. The
formulas are in ``quantizer.numerics.torch_operators``.

| granularity | arguments | shape of s |
|---|---|---|
| per tensor | none | [] |
| per axis | ``axis`` of size A | [A] |
| per block | ``axis``, ``block_size`` B | the shape of x, with A / B in place of A |

The functions compile, trace and export as one operator each. In ONNX they become ``QuantizeLinear`` and
``DequantizeLinear``: opset 19 or later for ``fp8``, 21 for ``int4`` and for blocks. Values are checked in eager mode
only, because a compiled, traced or exported program does not know them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantizer.numerics import torch_operators as ops
from quantizer.numerics.formats import QType, qtype
from quantizer.numerics.granularity import scale_shape

__all__ = ["dequantize", "fake_quantize", "quantize"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def quantize(
    x: Tensor,
    scale: Tensor,
    dtype: str = "int8",
    axis: int | None = None,
    block_size: int | None = None,
    zero_point: Tensor | None = None,
) -> Tensor:
    """Return x / scale, rounded to the nearest value of a format and clipped to its range.

    Ties are rounded to even. A zero point is added between rounding and clipping.

    Example::

        scale = x.abs().amax() / 127
        q = quantize(x, scale)

    Args:
        x: [*] float16, bfloat16, float32 or float64. The computation is in float32.
        scale: positive and finite, of one of these types. The granularity determines its shape.
        dtype: the format: ``int8``, ``uint8``, ``fp8`` or ``int4``.
        axis: the axis along which scales differ; negative values count from the end. None: one scale for all of x.
        block_size: the number of neighbours along the axis that share a scale. It must divide the size of the axis.
        zero_point: uint8, of the scale's shape: the quantized value of 0.0, only for ``uint8``. None: 0.

    Returns:
        Quantized values [*]: int8 for ``int8`` and ``int4``, uint8 for ``uint8``, float8_e4m3fn for ``fp8``.

    Raises:
        TypeError: a tensor has the wrong type.
        ValueError: the format is unknown, or an axis, block size, scale or zero point does not fit.
    """
    kind = qtype(dtype)
    _check_floating("x", x)
    _check_parameters(x, scale, kind, axis, block_size, zero_point)
    result: Tensor = ops.quantize(x, scale, dtype, axis, block_size, zero_point)
    return result


def dequantize(
    q: Tensor,
    scale: Tensor,
    dtype: str = "int8",
    axis: int | None = None,
    block_size: int | None = None,
    zero_point: Tensor | None = None,
) -> Tensor:
    """Return the float values of quantized values: (q - z) * s.

    Args:
        q: [*] quantized values as ``quantize`` returns them, in the storage type of the format.
        scale: as for ``quantize``.
        dtype: the format.
        axis: as for ``quantize``.
        block_size: as for ``quantize``.
        zero_point: as for ``quantize``.

    Returns:
        Values [*] in the type of the scale.

    Raises:
        TypeError: a tensor has the wrong type.
        ValueError: the format is unknown, a quantized value is out of its range, or an axis, block size, scale or zero
            point does not fit.
    """
    kind = qtype(dtype)
    if q.dtype != kind.storage:
        raise TypeError(f"q is {q.dtype}; the quantized values of {dtype} are {kind.storage}")
    _check_parameters(q, scale, kind, axis, block_size, zero_point)
    if kind.is_packed and _reads_values() and not bool(((q >= kind.qmin) & (q <= kind.qmax)).all()):
        raise ValueError(f"q has values outside of the range of {dtype}, {kind.qmin} to {kind.qmax}")
    result: Tensor = ops.dequantize(q, scale, dtype, axis, block_size, zero_point)
    return result


def fake_quantize(
    x: Tensor,
    scale: Tensor,
    dtype: str = "int8",
    axis: int | None = None,
    block_size: int | None = None,
    zero_point: Tensor | None = None,
) -> Tensor:
    """Return x rounded to a format: ``dequantize(quantize(x))`` in the type of x.

    The gradient passes straight through to x and is zero where x was clipped. The gradient of the scale, if it requires
    one, is that of LSQ (arXiv:1902.08153, equation 3): the sum of q - x / s where x was not clipped, and of q
    elsewhere.

    Args:
        x: [*] float values.
        scale: as for ``quantize``.
        dtype: the format.
        axis: as for ``quantize``.
        block_size: as for ``quantize``.
        zero_point: as for ``quantize``.

    Returns:
        Values [*] in the type of x.

    Raises:
        TypeError: a tensor has the wrong type.
        ValueError: the format is unknown, or an axis, block size, scale or zero point does not fit.
    """
    kind = qtype(dtype)
    _check_floating("x", x)
    _check_parameters(x, scale, kind, axis, block_size, zero_point)
    result: Tensor = ops.fake_quantize(x, scale, dtype, axis, block_size, zero_point)
    return result


def _reads_values() -> bool:
    """Return whether tensor values are available, which means that nothing is compiled, exported or traced."""
    return not (torch.compiler.is_compiling() or _is_tracing())


def _is_tracing() -> bool:
    """Return whether torch is tracing; sizes are tensors then, and the trace would fix the result of a comparison."""
    return bool(torch._C._get_tracing_state())


def _check_floating(name: str, value: Tensor) -> None:
    if value.dtype not in _FLOATS:
        raise TypeError(f"{name} is {value.dtype}; expected float16, bfloat16, float32 or float64")


def _check_parameters(
    x: Tensor, scale: Tensor, kind: QType, axis: int | None, block_size: int | None, zero_point: Tensor | None
) -> None:
    """Raise if scale and zero point do not fit each other, the format or the shape of x."""
    _check_floating("scale", scale)
    _check_granularity(x, scale, axis, block_size)
    if zero_point is not None:
        _check_zero_point(zero_point, scale, kind)
    if _reads_values() and not bool(((scale > 0) & scale.isfinite()).all()):
        raise ValueError(f"scale must be positive and finite; it has {_first_invalid(scale)}")


def _check_granularity(x: Tensor, scale: Tensor, axis: int | None, block_size: int | None) -> None:
    if axis is None and block_size is not None:
        raise ValueError(f"block_size={block_size} needs the axis that it divides")
    if axis is not None and not -x.dim() <= axis < x.dim():
        raise ValueError(f"axis={axis} is out of range for a tensor with {x.dim()} axes")
    if _is_tracing():
        return
    if axis is not None and block_size is not None and (block_size < 1 or x.shape[axis] % block_size):
        raise ValueError(f"block_size={block_size} does not divide axis {axis} of size {x.shape[axis]}")
    expected = scale_shape(x.shape, axis, block_size)
    if scale.shape != expected:
        how = "per tensor" if axis is None else f"along axis {axis}"
        how += "" if block_size is None else f" in blocks of {block_size}"
        raise ValueError(
            f"scale has the shape {list(scale.shape)}; a tensor {list(x.shape)} {how} needs {list(expected)}"
        )


def _check_zero_point(zero_point: Tensor, scale: Tensor, kind: QType) -> None:
    if not kind.has_zero_point:
        raise ValueError(f"{kind.name} is symmetric: zero_point must be None")
    if zero_point.dtype != kind.storage:
        raise TypeError(f"zero_point is {zero_point.dtype}; {kind.name} needs {kind.storage}")
    if not _is_tracing() and zero_point.shape != scale.shape:
        raise ValueError(f"zero_point {list(zero_point.shape)} and scale {list(scale.shape)} must have the same shape")


def _first_invalid(scale: Tensor) -> float:
    return float(scale[~((scale > 0) & scale.isfinite())].flatten()[0])
