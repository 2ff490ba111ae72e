"""Pass that stores INT4 weights with an odd number of inputs as INT8, for a target that reads them wrongly.

See ``qdq/odd_pairs.py``.
"""

from __future__ import annotations

from typing import Any

from quantizer.export.passes.base import MatchPass, add_constant, drop_unread
from quantizer.qdq.odd_pairs import has_odd_pairs

_BYTES = {"INT4": "INT8", "UINT4": "UINT8"}


class PairsOfCodes(MatchPass[str]):
    """``INT4 [K, N] -> DQ -> MatMul`` with an odd K becomes ``INT8 [K, N] -> DQ -> MatMul``, with the same codes."""

    left = "a weight of INT4 still has an odd number of inputs"

    def match(self, node: Any) -> str | None:
        """Return the format for the codes of a dequantizer; None for a node that stays."""
        return _BYTES[node.inputs[0].dtype.name] if has_odd_pairs(node) else None

    def apply(self, model: Any, node: Any, found: str) -> None:
        import onnx_ir

        element = onnx_ir.DataType[found]
        for place in (0, 2):
            value = node.inputs[place] if place < len(node.inputs) else None
            if value is not None:
                codes = value.const_value.numpy().astype(element.numpy())
                node.replace_input_with(place, add_constant(model, f"{value.name}_bytes", codes, element))
                drop_unread(model, value)
