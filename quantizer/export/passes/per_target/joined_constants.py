"""Pass that quantizes a join with a constant part, such as a class token, as a whole, for a target that would not.

OpenVINO quantizes the parts of a Concat in its place. A constant part and one that is computed then have other zero
points, one for each place along the axis that joins them, and its MatMul refuses those where the axis has a fixed
length. It leaves the Concat alone where an axis of length 1 is added behind it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass
from quantizer.export.passes.base import add_constant
from quantizer.export.passes.base import insert_before
from quantizer.qdq.graph import attribute
from quantizer.qdq.graph import is_dequantize

__all__ = ["JoinedConstants"]

_SPREADS = frozenset({"Expand", "Tile", "Reshape", "Unsqueeze", "Transpose", "Cast", "Identity"})
"""Operators that make a constant larger or give it another shape, whatever says which."""


class JoinedConstants(MatchPass[list[Any]]):
    """``Concat(token, x) -> Q -> DQ -> MatMul`` becomes ``Concat -> Unsqueeze -> Q -> DQ -> Squeeze -> MatMul``."""

    left = "a join with a constant part is still quantized by its parts"

    def match(self, node: Any) -> list[Any] | None:
        """Return the dequantizers behind a quantizer of such a join; None for a node that stays."""
        if node.op_type != "QuantizeLinear" or len(node.inputs[1].shape or ()) > 0:
            return None
        join = node.inputs[0].producer()
        shape = node.inputs[0].shape
        if (
            join is None
            or join.op_type != "Concat"
            or shape is None
            or attribute(join, "axis", 0) in (-1, len(shape) - 1)
        ):
            return None
        if not any(map(_is_constant, join.inputs)):
            return None
        readers = list(node.outputs[0].consumers())
        products = [reader for dequantize in readers for reader in dequantize.outputs[0].consumers()]
        all_products = all(map(is_dequantize, readers)) and all(reader.op_type == "MatMul" for reader in products)
        return readers if all_products and products else None

    def apply(self, model: Any, node: Any, found: list[Any]) -> None:
        import onnx_ir

        joined = node.inputs[0]
        shape = onnx_ir.Shape([1, *joined.shape])
        axes = add_constant(model, f"{joined.name}.axes", np.array([0]), onnx_ir.DataType.INT64)
        node.replace_input_with(0, insert_before(model, node, "Unsqueeze", [joined, axes], like=joined, shape=shape))
        node.outputs[0].shape = shape
        for dequantize in found:
            result = dequantize.outputs[0]
            readers = list(result.uses())
            result.shape = shape
            for reader, place in readers:
                made = insert_before(model, reader, "Squeeze", [result, axes], like=joined, shape=joined.shape)
                reader.replace_input_with(place, made)


def _is_constant(value: Any) -> bool:
    """Return whether a value is a constant that may be spread."""
    while value is not None and not value.is_initializer():
        maker = value.producer()
        if maker is None or maker.op_type not in _SPREADS:
            return False
        value = maker.inputs[0]
    return value is not None
