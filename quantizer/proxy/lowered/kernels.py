"""Kernels of torch for a product of an activation and a weight that is stored as codes.

Legend: x [.., K] the activation; w [N, K] the weight, with one scale t_n a row; a the codes of x, with scale s and zero
point z (see ``activation.py``); b [N] the bias.

    y = s (a - z) w^T t + b,  all sums in integers

oneDNN subtracts z by the sums of the rows of w, and adds b, inside the kernel. ``aten::_int_mm`` does neither: what it
returns is corrected afterwards, in operations that a compiler fuses. ``aten::_scaled_mm`` multiplies FP8 by FP8.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from quantizer.proxy.lowered.activation import Activation
from quantizer.proxy.lowered.compiled_linear import integer_linear

Window = tuple[Any, ...]
"""Stride, padding, dilation and groups of a convolution, as its call gives them; empty for other products."""


class Kernel(Protocol):
    """The computation of the calls of a site.

    Attributes:
        name: the operator of torch.
    """

    name: str

    def of_calls(self, number: int) -> list[Kernel]:
        """Return the kernels of the first calls of a pass, which share the weight."""

    def __call__(
        self, x: Tensor, bias: Tensor | None, window: Window, out: torch.dtype = torch.float32
    ) -> Tensor | None:
        """Return the result in the type ``out``, of x and b in float32; None if the kernel cannot make this call."""


class _Product:
    """A product of an activation, whose calls may have ranges of their own."""

    _activation: Activation

    def of_calls(self, number: int) -> list[Kernel]:
        """Return the kernels of the first calls of a pass, which share the weight."""
        made: list[Any] = [copy.copy(self) for _ in range(number)]
        for call, kernel in enumerate(made):
            kernel._activation = self._activation.of_call(call)
        return made


class IntegerLinear(_Product):
    """oneDNN's linear, for CPUs.

    Args:
        weight: w, int8.
        scales: t, float32.
        activation: makes a.
    """

    name = "onednn::qlinear_pointwise"

    def __init__(self, weight: Tensor, scales: Tensor, activation: Activation) -> None:
        self._weight, self._scales, self._activation = weight, scales, activation
        self._zeros = torch.zeros(len(scales), dtype=torch.int64)
        self._packed = torch.ops.onednn.qlinear_prepack(weight, None)
        self._call: Any = torch.ops.onednn.qlinear_pointwise.default

    def __call__(self, x: Tensor, bias: Tensor | None, window: Window, out: torch.dtype = torch.float32) -> Tensor:
        if torch.compiler.is_compiling():
            return self._compiled(x, bias).to(out)
        if x.dim() == 1:
            return self(x[None], bias, window, out)[0]
        codes, scale, point, rows = self._activation.unsigned(x)
        if not codes.is_contiguous():
            codes = codes.contiguous()
        inside = bias if rows is None else None
        result: Tensor = self._call(
            *(codes, scale, point, self._packed, self._scales, self._zeros, inside),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        if rows is not None:
            result.mul_(rows)
            if bias is not None:
                result.add_(bias)
        return result.to(out)

    def _compiled(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the result by operations that Inductor fuses, around one that it calls."""
        codes, scale, point, rows = self._activation.fusible(x, signed=False)
        assert point is not None
        inside = bias if rows is None else None
        result = integer_linear(codes, scale, point, self._weight, self._scales, inside)
        if rows is None:
            return result
        return result * rows if bias is None else result * rows + bias


class IntegerConvolution(_Product):
    """oneDNN's convolution over one or two axes, for CPUs.

    The weight is packed for the strides and borders of a call when it is first made with them.

    Args:
        weight: int8 [N, K, *window].
        scales: t, float32.
        activation: makes a.
    """

    name = "onednn::qconv_pointwise"

    def __init__(self, weight: Tensor, scales: Tensor, activation: Activation) -> None:
        self._weight, self._scales, self._activation = weight, scales, activation
        self._zeros = torch.zeros(len(scales), dtype=torch.int64)
        self._packed: dict[Window, tuple[Tensor, tuple[Any, ...]] | None] = {}
        self._call: Any = torch.ops.onednn.qconv_pointwise.default

    def __call__(
        self, x: Tensor, bias: Tensor | None, window: Window, out: torch.dtype = torch.float32
    ) -> Tensor | None:
        if x.dim() != self._weight.dim() or torch.compiler.is_compiling():
            return None
        key = tuple(tuple(part) if isinstance(part, list) else part for part in window)
        if key not in self._packed:
            self._packed[key] = self._pack(key)
        found = self._packed[key]
        if found is None:
            return None
        packed, places = found
        codes, scale, point, _ = self._activation.unsigned(x)
        made: Tensor = self._call(
            *(codes, scale, point, packed, self._scales, self._zeros, bias, *places),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        # What follows may take a view, which the layout of the kernel, channels last, does not allow.
        return (made.contiguous() if x.is_contiguous() else made).to(out)

    def _pack(self, window: Window) -> tuple[Tensor, tuple[Any, ...]] | None:
        axes = self._weight.dim() - 2
        stride, padding, dilation = (part if isinstance(part, str) else _spread(part, axes) for part in window[:3])
        if isinstance(padding, str):
            width = [0] * axes if padding == "valid" else _around(self._weight.shape[2:], dilation)
            if width is None:
                return None
            padding = width
        places = (stride, padding, dilation, window[3])
        # Scale and zero point only tell that there may be one.
        packed = torch.ops.onednn.qconv_prepack(self._weight, self._scales, 1.0, 1, *places, None)
        return packed, places


def _in_steps(weight: Tensor, step: int) -> tuple[Tensor, int]:
    """Return a weight with zeros up to whole steps of N and K, and how many were added to K."""
    extra = -weight.shape[1] % step
    # Zero is the same byte in both formats, and torch pads no FP8.
    padded = functional.pad(weight.view(torch.uint8), (0, extra, 0, -len(weight) % step))
    return padded.contiguous().view(weight.dtype), extra


class IntegerMatmul(_Product):
    """``torch._int_mm`` with its corrections, for GPUs. cuBLAS wants more than 16 rows, and K and N in eights.

    Args:
        weight: w, int8.
        scales: t, float32.
        activation: makes a.
    """

    name = "aten::_int_mm"

    def __init__(self, weight: Tensor, scales: Tensor, activation: Activation) -> None:
        self._columns, self._scales, self._activation = len(weight), scales, activation
        self._weight, self._extra = _in_steps(weight, _EIGHT)
        self._sums = weight.sum(1, dtype=torch.int32)

    def __call__(self, x: Tensor, bias: Tensor | None, window: Window, out: torch.dtype = torch.float32) -> Tensor:
        codes, scale, point, rows = self._activation.fusible(x, signed=True)
        flat = codes.reshape(-1, codes.shape[-1])
        missing = max(0, _ROWS - len(flat))
        if missing or self._extra:
            # What is added meets rows and columns of zeros, or is cut off below.
            flat = functional.pad(flat, (0, self._extra, 0, missing))
        sums = torch._int_mm(flat, self._weight.t())[: flat.shape[0] - missing, : self._columns]
        if point is not None:
            sums = sums - point * self._sums
        result = sums * (self._scales * scale)
        result = result.reshape(*x.shape[:-1], self._columns)
        if rows is not None:
            result = result * rows
        return (result if bias is None else result + bias).to(out)


class ScaledMatmul(_Product):
    """``torch._scaled_mm`` of FP8 codes, for GPUs from compute capability 8.9 on, which want K and N in sixteens.

    Args:
        weight: w, float8_e4m3fn.
        scales: t, float32.
        activation: makes a.
    """

    name = "aten::_scaled_mm"

    def __init__(self, weight: Tensor, scales: Tensor, activation: Activation) -> None:
        self._columns, self._scales, self._activation = len(weight), scales, activation
        self._weight, self._extra = _in_steps(weight, _SIXTEEN)
        self._one = torch.ones((), device=weight.device)

    def __call__(self, x: Tensor, bias: Tensor | None, window: Window, out: torch.dtype = torch.float32) -> Tensor:
        values, scale = self._activation.floating(x)
        flat = values.reshape(-1, values.shape[-1])
        if self._extra:
            flat = functional.pad(flat, (0, self._extra))
        codes = flat.to(self._activation.storage)
        if out is torch.bfloat16:
            return self._scaled_inside(codes, scale, bias).reshape(*x.shape[:-1], self._columns)
        one = self._one
        sums = torch._scaled_mm(codes, self._weight.t(), one, one, out_dtype=torch.float32)[:, : self._columns]
        result = (sums * (self._scales * scale)).reshape(*x.shape[:-1], self._columns)
        return (result if bias is None else result + bias).to(out)

    def _scaled_inside(self, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """Return the result in bfloat16, for which the kernel itself takes a scale for each row and channel, and b.

        Sums stay in the matrix unit, which keeps 14 bits of them and not 24: what is added is codes of 4 bits, and the
        result has 8. It takes 4 to 7 hundredths from a whole model's time, and up to a fifth from a product's.
        """
        extra = len(self._weight) - self._columns
        scales = functional.pad(self._scales, (0, extra))[None]
        rows = scale.expand(len(codes), 1).contiguous()
        added = None if bias is None else functional.pad(bias.bfloat16(), (0, extra))
        made = torch._scaled_mm(
            codes, self._weight.t(), rows, scales, bias=added, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return made[:, : self._columns]


class TableLookup:
    """The rows of a table of embeddings that are asked for, dequantized.

    Args:
        weight: int8 [N, K].
        scales: float32 [N].
    """

    name = "aten::embedding"

    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        self._weight, self._scales = weight, scales[:, None]

    def of_calls(self, number: int) -> list[Kernel]:
        """Return itself for each call: a lookup has no activation."""
        return [self] * number

    def __call__(self, x: Tensor, bias: Tensor | None, window: Window, out: torch.dtype = torch.float32) -> Tensor:
        return (functional.embedding(x, self._weight) * functional.embedding(x, self._scales)).to(out)


_EIGHT, _SIXTEEN = 8, 16
_ROWS = 17


def _spread(value: Any, axes: int) -> list[int]:
    """Return a number, or a sequence of one, as one number for each axis."""
    values = [value] if isinstance(value, int) else list(value)
    return values * axes if len(values) == 1 else values


def _around(window: Any, dilation: Any) -> list[int] | None:
    """Return the padding on each side that keeps the size; None if one side needs more than the other."""
    whole = [step * (size - 1) for size, step in zip(window, dilation, strict=True)]
    return None if any(width % 2 for width in whole) else [width // 2 for width in whole]
