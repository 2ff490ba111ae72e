"""The codes of an activation for an integer kernel.

Legend: x [.., K] the activation; s its scale; z its zero point; q [.., K] the codes, x' = (q - z) s.

Kernels of CPUs take unsigned bytes, those of GPUs signed ones. An INT8 code plus 128 is an unsigned one with the zero
point 128, and a UINT8 code minus 128 a signed one, so both take both. A range of each call is that of the tensor, or,
where a block is as long as a row, of each row: then x is divided by the scales of its rows first and the product
multiplied by them afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantizer.numerics.byte_codes import byte_codes
from quantizer.numerics.dynamic_range import block_scales, dynamic_range
from quantizer.numerics.qtype import INT8, UINT8, qtype
from quantizer.proxy.operand_quantizer import OperandQuantizer

Codes = tuple[Tensor, "float | Tensor", "int | Tensor", "Tensor | None"]
"""q, s, z, and the scales of the rows [.., 1], by which the product has yet to be multiplied; None: by none."""


class Activation:
    """The quantizer of an activation, with all that does not depend on the values computed in advance.

    Args:
        quantizer: has one scale for the tensor, or takes ranges at each call, of the tensor or of its rows.
        device: where the kernel computes; None: where the scale is.
    """

    def __init__(self, quantizer: OperandQuantizer, device: torch.device | None = None) -> None:
        self._set(quantizer, quantizer, device)
        self._calls = [Activation.__new__(Activation) for _ in quantizer.calls]
        for number, call in enumerate(self._calls):
            call._set(quantizer, quantizer.of_call(number), device)

    def of_call(self, number: int | None) -> Activation:
        """Return the activation with the range of a call by its number in the pass."""
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
        # Numbers would be constants of a compiled graph, which a block that a model repeats then has for each layer.
        if device is None and quantizer.scale is not None:
            device = quantizer.scale.device
        self._step = torch.tensor(self._scale, device=device)
        self._points = {
            signed: torch.tensor(self._point + shift, dtype=torch.int32, device=device)
            for signed, shift in ((True, self._to_signed), (False, self._to_unsigned))
        }
        self._centered = self._point + self._to_signed == 0

    def unsigned(self, x: Tensor) -> Codes:
        """Return UINT8 codes of float32 values on the CPU, in one pass over them where the range is fixed."""
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
        """Return codes by operations that a compiler fuses with those before, on any device; INT8 or UINT8 ones.

        s [] and z [] are tensors, and z is None where it is zero whatever the values are.
        """
        if self._factored:
            x = self._quantizer.multiplied(x)
        made = INT8 if signed else UINT8
        scale, rows = self._step, None
        point = None if signed and self._centered else self._points[signed]
        if self._by_row:
            rows = block_scales(x, self._kind.name, x.shape[-1])
        elif self._dynamic:
            scale, zero = dynamic_range(x, self._kind.name)
            point = zero.int() + (self._to_signed if signed else self._to_unsigned)
        steps = (x / (scale if rows is None else rows)).round()
        codes = (steps if point is None else steps + point).clamp(made.qmin, made.qmax).to(made.storage)
        return codes, scale, point, rows

    def floating(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes in the range of a floating-point format, in float32, and s []."""
        if self._factored:
            x = self._quantizer.multiplied(x)
        return (x / self._step).clamp(self._kind.qmin, self._kind.qmax), self._step

    @property
    def storage(self) -> torch.dtype:
        """The torch type of the format's codes."""
        return self._kind.storage
