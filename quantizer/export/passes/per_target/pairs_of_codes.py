"""Pass that stores INT4 weights with an odd number of inputs as INT8, for a target that reads them wrongly.

Two codes of INT4 share a byte. Measured with OpenVINO 2026.4: where a weight [N, K] has an odd K of 17 or more, its
kernel for float activations takes each second row of codes from the wrong half of the byte (5 to 30 dB, for more than
one row of the other operand). The same codes in INT8 are right.
"""

from __future__ import annotations

from typing import Any

from quantizer.export.passes.base import MatchPass
from quantizer.export.passes.base import add_constant
from quantizer.export.passes.base import drop_unread
from quantizer.qdq.graph import attribute
from quantizer.qdq.graph import is_dequantize

__all__ = ["PairsOfCodes"]

_BYTES = {"INT4": "INT8", "UINT4": "UINT8"}

_MOVES = frozenset({"Transpose", "Reshape", "Expand", "Cast", "Identity"})
"""Operators between a weight and its product."""


class PairsOfCodes(MatchPass[str]):
    """``INT4 [K, N] -> DQ -> MatMul`` with an odd K becomes ``INT8 [K, N] -> DQ -> MatMul``, with the same codes."""

    left = "a weight of INT4 still has an odd number of inputs"

    def match(self, node: Any) -> str | None:
        """Return the format for the codes of a dequantizer; None for a node that stays."""
        codes = node.inputs[0] if is_dequantize(node) else None
        if codes is None or not codes.is_initializer() or codes.dtype is None or codes.dtype.name not in _BYTES:
            return None
        return _BYTES[codes.dtype.name] if any(map(_is_odd, _inner_sizes(node.outputs[0]))) else None

    def apply(self, model: Any, node: Any, found: str) -> None:
        import onnx_ir

        element = onnx_ir.DataType[found]
        for place in (0, 2):
            value = node.inputs[place] if place < len(node.inputs) else None
            if value is not None:
                codes = value.const_value.numpy().astype(element.numpy())
                node.replace_input_with(place, add_constant(model, f"{value.name}_bytes", codes, element))
                drop_unread(model, value)


def _is_odd(size: Any) -> bool:
    return not isinstance(size, int) or size % 2 == 1


def _inner_sizes(value: Any) -> list[Any]:
    """Return the sizes of the axis over which the products that read a weight add up."""
    found = []
    for reader, place in value.uses():
        if reader.op_type in _MOVES:
            found += _inner_sizes(reader.outputs[0])
        elif reader.op_type == "MatMul" and value.shape is not None:
            found.append(value.shape[-1 if place == 0 else -2])
        elif reader.op_type == "Gemm" and value.shape is not None and place < 2:
            turned = attribute(reader, ("transA", "transB")[place], 0)
            found.append(value.shape[-2 if (place == 0) == bool(turned) else -1])
    return found
