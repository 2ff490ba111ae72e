"""Pass that stores activations as UINT8 with zero point 128, for CPUs that multiply unsigned by signed bytes.

Legend: s the scale, q the INT8 code of a value, -128 <= q <= 127.

AVX512-VNNI's ``vpdpbusd`` multiplies unsigned by signed bytes. With u = q + 128 and zero point 128, s * (u - 128) is
s * q: the same values, in the storage that the kernels of a CPU engine take.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from quantizer.export.passes.base import add_constant
from quantizer.numerics.qtype import INT8
from quantizer.qdq.graph import is_dequantized

_ZERO = -INT8.qmin
_NAME = "quantizer_unsigned_zero_point"


class UnsignedActivations:
    """``Q(x, s, int8 0) -> DQ`` becomes ``Q(x, s, uint8 128) -> DQ(.., uint8 128)``; codes that are a result stay.

    Args:
        where: ``weighted``: only where the DQ feeds a product with a stored weight; ``all``: everywhere.
    """

    def __init__(self, where: Literal["weighted", "all"]) -> None:
        self.where = where

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        import onnx_ir

        chosen = list(self._signed(model))
        if not chosen:
            return 0
        zero = add_constant(model, _NAME, np.array(_ZERO, dtype=np.uint8), onnx_ir.DataType.UINT8)
        for quantize in chosen:
            _set_zero_point(quantize, zero)
            quantize.outputs[0].type = onnx_ir.TensorType(onnx_ir.DataType.UINT8)
            for dequantize, _ in quantize.outputs[0].uses():
                _set_zero_point(dequantize, zero)
        return len(chosen)

    def ensures(self, model: Any) -> str | None:
        left = [node.name for node in self._signed(model)]
        return f"an activation is still signed: {left[0]}" if left else None

    def _signed(self, model: Any) -> Iterator[Any]:
        for node in model.graph:
            if node.op_type != "QuantizeLinear" or not _is_signed_scalar(node.inputs[2]):
                continue
            if _is_read_as_a_value(node) and (self.where == "all" or _feeds_a_weighted_product(node)):
                yield node


def _is_signed_scalar(zero_point: Any) -> bool:
    """Return whether a zero point is one INT8 number: no other format fits UINT8, and only one number is written."""
    constant = zero_point.const_value
    return constant is not None and constant.dtype.name == INT8.onnx_type and len(constant.shape) == 0


def _is_read_as_a_value(quantize: Any) -> bool:
    """Return whether only DQs read the codes, and no output of the graph is one of them."""
    codes = quantize.outputs[0]
    readers = [(reader.op_type, index) for reader, index in codes.uses()]
    return not codes.is_graph_output() and all(reader == ("DequantizeLinear", 0) for reader in readers)


def _set_zero_point(node: Any, zero: Any) -> None:
    if len(node.inputs) < 3:
        node.resize_inputs(3)
    node.replace_input_with(2, zero)


def _feeds_a_weighted_product(quantize: Any) -> bool:
    readers = [reader for dequantize, _ in quantize.outputs[0].uses() for reader, _ in dequantize.outputs[0].uses()]
    return any(_is_stored_weight(value) for reader in readers for value in reader.inputs)


def _is_stored_weight(value: Any) -> bool:
    return is_dequantized(value) and bool(value.producer().inputs[0].is_initializer())
