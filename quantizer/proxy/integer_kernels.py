"""Integer kernels of torch for a linear, convolution or lookup with an integer weight.

Legend: x [.., K] the activation; w [N, K] the integer weight, with one scale t_n per row; a the integers of x, with
scale s and zero point z; b [N] the bias.

    y = s (a - z) w^T t + b,  all sums in integers

- oneDNN subtracts z with the row sums of w, and adds b, inside the kernel.
- ``aten::_int_mm`` does neither, so its result is corrected in operations that a compiler fuses.
- ``aten::_scaled_mm`` multiplies FP8 by FP8.
- ``quantizer::integer_linear`` is oneDNN's linear as one operator of a compiled graph. Inductor supports oneDNN's own
  operator only in frozen graphs; this one packs the weight at the first call.

CPU kernels take unsigned bytes, GPU kernels signed ones. INT8 plus 128 is unsigned with zero point 128, and UINT8 minus
128 is signed, so each device supports both formats. A dynamic range is that of the tensor, or of each row if a block is
as long as a row. Then x is divided by the scales of its rows first, and the result is multiplied by them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree
from torch.utils.weak import WeakTensorKeyDictionary

from quantizer.numerics.formats import INT8, UINT8, qtype
from quantizer.numerics.torch_operators import block_scales, dynamic_range
from quantizer.numerics.weight_codes import byte_codes
from quantizer.proxy.operand_quantizer import OperandQuantizer, is_recorded

Window = tuple[Any, ...]
"""Stride, padding, dilation and groups of a convolution call; empty for other operations."""


class Kernel(Protocol):
    """The computation of the calls of a site.

    Attributes:
        name: the operator of torch.
    """

    name: str

    def of_calls(self, number: int) -> list[Kernel]:
        """Return the kernels of the first ``number`` calls of a pass, which share the weight."""

    def __call__(
        self, x: Tensor, bias: Tensor | None, window: Window, out: torch.dtype = torch.float32
    ) -> Tensor | None:
        """Return the result in the type ``out``, for x and b in float32; None if the kernel does not support it."""


class ActivationProduct:
    """Base of kernels with an activation, whose calls may have their own ranges."""

    _activation: Activation

    def of_calls(self, number: int) -> list[Kernel]:
        kernels: list[Any] = [copy.copy(self) for _ in range(number)]
        for call, kernel in enumerate(kernels):
            kernel._activation = self._activation.of_call(call)
        return kernels


class IntegerLinear(ActivationProduct):
    """oneDNN's linear, for CPUs."""

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
        """Return the result with operations that Inductor fuses, around one operator that it calls."""
        codes, scale, point, rows = self._activation.fusible(x, signed=False)
        assert point is not None
        inside = bias if rows is None else None
        result = integer_linear(codes, scale, point, self._weight, self._scales, inside)
        if rows is None:
            return result
        return result * rows if bias is None else result * rows + bias


class IntegerConvolution(ActivationProduct):
    """oneDNN's convolution over one or two axes, for CPUs.

    The weight is packed at the first call with given strides and padding.

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
        entry = self._packed[key]
        if entry is None:
            return None
        packed, places = entry
        codes, scale, point, _ = self._activation.unsigned(x)
        result: Tensor = self._call(
            *(codes, scale, point, packed, self._scales, self._zeros, bias, *places),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        # The kernel returns channels last, of which later code could not take a view.
        return (result.contiguous() if x.is_contiguous() else result).to(out)

    def _pack(self, window: Window) -> tuple[Tensor, tuple[Any, ...]] | None:
        axes = self._weight.dim() - 2
        stride, padding, dilation = (part if isinstance(part, str) else _spread(part, axes) for part in window[:3])
        if isinstance(padding, str):
            width = [0] * axes if padding == "valid" else _around(self._weight.shape[2:], dilation)
            if width is None:
                return None
            padding = width
        places = (stride, padding, dilation, window[3])
        # The values of scale and zero point do not matter here.
        packed = torch.ops.onednn.qconv_prepack(self._weight, self._scales, 1.0, 1, *places, None)
        return packed, places


def _padded_to(weight: Tensor, step: int) -> tuple[Tensor, int]:
    """Return a weight padded with zeros to multiples of ``step`` in N and K, and the padding of K."""
    extra = -weight.shape[1] % step
    # Zero is the same byte in both formats, and torch cannot pad FP8.
    padded = functional.pad(weight.view(torch.uint8), (0, extra, 0, -len(weight) % step))
    return padded.contiguous().view(weight.dtype), extra


class IntegerMatmul(ActivationProduct):
    """``torch._int_mm`` with corrections, for GPUs. cuBLAS needs more than 16 rows, and multiples of 8 for K and N."""

    name = "aten::_int_mm"

    def __init__(self, weight: Tensor, scales: Tensor, activation: Activation) -> None:
        self._columns, self._scales, self._activation = len(weight), scales, activation
        self._weight, self._extra = _padded_to(weight, _EIGHT)
        self._sums = weight.sum(1, dtype=torch.int32)

    def __call__(self, x: Tensor, bias: Tensor | None, window: Window, out: torch.dtype = torch.float32) -> Tensor:
        codes, scale, point, rows = self._activation.fusible(x, signed=True)
        flat = codes.reshape(-1, codes.shape[-1])
        missing = max(0, _LEAST_ROWS - len(flat))
        if missing or self._extra:
            # Added columns are multiplied by zeros, and added rows are cut off below.
            flat = functional.pad(flat, (0, self._extra, 0, missing))
        sums = torch._int_mm(flat, self._weight.t())[: flat.shape[0] - missing, : self._columns]
        if point is not None:
            sums = sums - point * self._sums
        result = sums * (self._scales * scale)
        result = result.reshape(*x.shape[:-1], self._columns)
        if rows is not None:
            result = result * rows
        return (result if bias is None else result + bias).to(out)


class ScaledMatmul(ActivationProduct):
    """``torch._scaled_mm`` in FP8, for GPUs from compute capability 8.9, with multiples of 16 for K and N."""

    name = "aten::_scaled_mm"

    def __init__(self, weight: Tensor, scales: Tensor, activation: Activation) -> None:
        self._columns, self._scales, self._activation = len(weight), scales, activation
        self._weight, self._extra = _padded_to(weight, _SIXTEEN)
        self._one = torch.ones((), device=weight.device)

    def __call__(self, x: Tensor, bias: Tensor | None, window: Window, out: torch.dtype = torch.float32) -> Tensor:
        values, scale = self._activation.floating(x)
        flat = values.reshape(-1, values.shape[-1])
        if self._extra:
            flat = functional.pad(flat, (0, self._extra))
        codes = flat.to(self._activation.storage)
        if out is torch.bfloat16:
            return self._scaled_inside(codes, scale, bias).reshape(*x.shape[:-1], self._columns)
        unit_scale = self._one
        sums = torch._scaled_mm(codes, self._weight.t(), unit_scale, unit_scale, out_dtype=torch.float32)[
            :, : self._columns
        ]
        result = (sums * (self._scales * scale)).reshape(*x.shape[:-1], self._columns)
        return (result if bias is None else result + bias).to(out)

    def _scaled_inside(self, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """Return the result in bfloat16, for which the kernel takes a scale per row and channel, and b.

        The sums stay in the matrix unit with 14 bits instead of 24; the summands have 4 bits and the result has 8. This
        saves 4% to 7% of a model's time, and up to 20% of a linear's time.
        """
        extra = len(self._weight) - self._columns
        scales = functional.pad(self._scales, (0, extra))[None]
        rows = scale.expand(len(codes), 1).contiguous()
        kernel_bias = None if bias is None else functional.pad(bias.bfloat16(), (0, extra))
        result = torch._scaled_mm(
            codes, self._weight.t(), rows, scales, bias=kernel_bias, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return result[:, : self._columns]


class TableLookup:
    """A lookup in an embedding table, which dequantizes only the rows in use.

    Args:
        weight: int8 [N, K].
        scales: float32 [N].
    """

    name = "aten::embedding"

    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        self._weight, self._scales = weight, scales[:, None]

    def of_calls(self, number: int) -> list[Kernel]:
        """Return this kernel for each call, as a lookup has no activation."""
        return [self] * number

    def __call__(self, x: Tensor, bias: Tensor | None, window: Window, out: torch.dtype = torch.float32) -> Tensor:
        return (functional.embedding(x, self._weight) * functional.embedding(x, self._scales)).to(out)


_EIGHT, _SIXTEEN = 8, 16
_LEAST_ROWS = 17


def _spread(value: Any, axes: int) -> list[int]:
    """Return a number, or a sequence of length 1, as one number per axis."""
    values = [value] if isinstance(value, int) else list(value)
    return values * axes if len(values) == 1 else values


def _around(window: Any, dilation: Any) -> list[int] | None:
    """Return the padding on each side that keeps the size; None if the sides differ."""
    totals = [step * (size - 1) for size, step in zip(window, dilation, strict=True)]
    return None if any(width % 2 for width in totals) else [width // 2 for width in totals]


_NAME = "quantizer::integer_linear"
_PACKED: MutableMapping[Tensor, tuple[Tensor, Tensor]] = WeakTensorKeyDictionary()

torch.library.define(_NAME, "(Tensor codes, Tensor s, Tensor z, Tensor weight, Tensor t, Tensor? bias) -> Tensor")


@torch.library.impl(_NAME, "CPU")
def _integer_linear(codes: Tensor, s: Tensor, z: Tensor, weight: Tensor, t: Tensor, bias: Tensor | None) -> Tensor:
    entry = _PACKED.get(weight)
    if entry is None:
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        entry = _PACKED[weight] = packed, torch.zeros(len(weight), dtype=torch.int64)
    call: Any = torch.ops.onednn.qlinear_pointwise.default
    operands = (codes.contiguous(), float(s), int(z), entry[0], t, entry[1], bias)
    result: Tensor = call(*operands, 1.0, 0, torch.float32, "none", [], "")
    return result


def _without_data(codes: Tensor, s: Tensor, z: Tensor, weight: Tensor, t: Tensor, bias: Tensor | None) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], len(weight)), dtype=torch.float32)


torch.library.register_fake(_NAME, _without_data)


def integer_linear(codes: Tensor, s: Tensor, z: Tensor, weight: Tensor, t: Tensor, bias: Tensor | None) -> Tensor:
    """Return y [.., N], float32, for a [.., K], uint8, and the weight w [N, K], int8."""
    result: Tensor = torch.ops.quantizer.integer_linear(codes, s, z, weight, t, bias)
    return result


Codes = tuple[Tensor, "float | Tensor", "int | Tensor", "Tensor | None"]
"""a, s, z, and the scales of the rows [.., 1] that multiply the result; None: no scales of rows."""


class Activation:
    """The quantizer of an activation, with everything precomputed that does not depend on the values."""

    def __init__(self, quantizer: OperandQuantizer, device: torch.device | None = None) -> None:
        self._set(quantizer, quantizer, device)
        self._calls = [Activation.__new__(Activation) for _ in quantizer.calls]
        for number, call in enumerate(self._calls):
            call._set(quantizer, quantizer.of_call(number), device)

    def of_call(self, number: int | None) -> Activation:
        """Return the activation with the range of a call, by its number in the pass."""
        return self if number is None or number >= len(self._calls) else self._calls[number]

    def _set(self, factored: OperandQuantizer, quantizer: OperandQuantizer, device: torch.device | None) -> None:
        self._kind = qtype(quantizer.dtype)
        self._quantizer = factored
        self._factored = factored.factor is not None
        self._dynamic = quantizer.dynamic
        self._by_row = quantizer.dynamic and quantizer.block_size is not None
        self._scale = 1.0 if quantizer.scale is None else float(quantizer.scale)
        self._point = 0 if quantizer.zero_point is None else int(quantizer.zero_point)
        self._to_unsigned = UINT8.qmin - self._kind.qmin
        self._to_signed = INT8.qmin - self._kind.qmin
        # Numbers would be constants, so that a repeated block would need one compiled graph per layer.
        if device is None and quantizer.scale is not None:
            device = quantizer.scale.device
        self._step = torch.tensor(self._scale, device=device)
        self._points = {
            signed: torch.tensor(self._point + shift, dtype=torch.int32, device=device)
            for signed, shift in ((True, self._to_signed), (False, self._to_unsigned))
        }
        self._centered = self._point + self._to_signed == 0

    def unsigned(self, x: Tensor) -> Codes:
        """Return UINT8 integers of float32 values on the CPU, in one pass if the range is fixed."""
        if self._factored:
            x = self._quantizer.multiplied(x)
        if not self._dynamic:
            point = self._point + self._to_unsigned
            return byte_codes(x, self._scale, point), self._scale, point, None
        if self._by_row:
            rows = block_scales(x, self._kind.name, x.shape[-1])
            return byte_codes(x / rows, 1.0, self._to_unsigned), 1.0, self._to_unsigned, rows
        scale, zero = dynamic_range(x, self._kind.name)
        step, point = float(scale), int(zero) + self._to_unsigned
        return byte_codes(x, step, point), step, point, None

    def fusible(self, x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return INT8 or UINT8 integers, on any device, by operations that a compiler fuses with earlier ones.

        s [] and z [] are tensors, and z is None where it is always zero.
        """
        if self._factored:
            x = self._quantizer.multiplied(x)
        kind = INT8 if signed else UINT8
        scale, rows = self._step, None
        point = None if signed and self._centered else self._points[signed]
        if self._by_row:
            rows = block_scales(x, self._kind.name, x.shape[-1])
        elif self._dynamic:
            scale, zero = dynamic_range(x, self._kind.name)
            point = zero.int() + (self._to_signed if signed else self._to_unsigned)
        steps = (x / (scale if rows is None else rows)).round()
        codes = (steps if point is None else steps + point).clamp(kind.qmin, kind.qmax).to(kind.storage)
        return codes, scale, point, rows

    def floating(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values before the cast to a floating-point format, clamped, in float32, and s []."""
        if self._factored:
            x = self._quantizer.multiplied(x)
        return (x / self._step).clamp(self._kind.qmin, self._kind.qmax), self._step

    def stored_codes(self, x: Tensor) -> Tensor:
        """Return INT8 or FP8 values of float32 ones with a fixed range."""
        if self._kind.is_float:
            return self.floating(x)[0].to(self._kind.storage)
        return self.fusible(x, signed=True)[0]

    @property
    def stored_point(self) -> int:
        """The zero point of ``stored_codes``."""
        return 0 if self._kind.is_float else self._point + self._to_signed

    @property
    def step(self) -> float:
        """The scale of a fixed range."""
        return self._scale

    @property
    def storage(self) -> torch.dtype:
        return self._kind.storage


class StoredWeight(Tensor):
    """A tensor with shape, type and device of a weight, whose values are computed only when they are used.

    A module's ``F.linear(x, self.weight)`` reads its weight at each call, but the site computes with the integers, so
    dequantized values would be wasted.
    """

    _read: Callable[[], Tensor]

    @staticmethod
    def of(like: Tensor, dtype: torch.dtype, read: Callable[[], Tensor]) -> StoredWeight:
        """Return the weight with shape and device of ``like``, whose values ``read`` returns."""
        make: Any = Tensor._make_wrapper_subclass
        weight: StoredWeight = make(StoredWeight, like.shape, dtype=dtype, device=like.device, requires_grad=False)
        weight._read = read
        return weight

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            # A parameter of this weight is still a StoredWeight.
            return StoredWeight.of(args[0], args[0].dtype, args[0]._read)
        args, kwargs = _pytree.tree_map(_values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._read().clone()

    def numpy(self, *, force: bool = False) -> Any:
        return self._read().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self._read().__array__(dtype)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StoredWeight({self._read()!r})"


def _values(value: Any) -> Any:
    return value._read() if isinstance(value, StoredWeight) else value


class LazyWeight(OperandQuantizer):
    """A stored weight, dequantized only if code outside of its site computes with it.

    Attributes:
        shown: the tensor that the module reads as its weight; None: it was not read yet.
    """

    shown: StoredWeight | None

    @staticmethod
    def of(quantizer: OperandQuantizer) -> None:
        """Turn the quantizer of a stored weight into a lazy one."""
        quantizer.__class__ = LazyWeight
        vars(quantizer)["shown"] = None

    def as_parameter(self) -> Tensor:
        """Return the weight, whose values are computed when used; in a compiled graph, the dequantized weight."""
        if is_recorded():
            return super().as_parameter()
        shown = self.shown
        if shown is None:
            assert self.stored is not None
            shown = self.shown = StoredWeight.of(self.stored, self.stored_dtype, super().as_parameter)
        return shown

    def forward(self, x: Any) -> Any:
        # A lookup that limits norms writes into the rows that it reads, so it needs real values.
        return _values(super().forward(x))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.shown = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Drop ``shown``, which refers to this object."""
        return {**super().__getstate__(), "shown": None}  # type: ignore[no-untyped-call]
