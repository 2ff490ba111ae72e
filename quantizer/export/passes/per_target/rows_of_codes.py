"""Pass that dequantizes the rows that are looked up, for a target that would dequantize the whole table.

Legend: t the codes of a table [V x D], s its scales [V], i the rows.

    Gather(DQ(t, s), i) = Cast(Gather(t, i)) * Gather(s, i)

ONNX Runtime computes a DQ of a table at each run: of MiniLM's 30,522 rows, which takes 6 ms where the whole text of 128
tokens takes 11. OpenVINO computes it once, and holds the table in floats.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass, add_constant, drop_unread, insert_before, replace_node
from quantizer.qdq.graph import attribute, floats, is_dequantize


class RowsOfCodes(MatchPass[Any]):
    """``DQ(t, s, axis 0) -> Gather`` becomes ``Gather -> Cast`` of the codes, times the scales of those rows."""

    left = "a whole table is still dequantized for some of its rows"

    def match(self, node: Any) -> Any | None:
        """Return the DQ of a stored table of INT8 with a scale a row, out of which rows are taken."""
        if node.op_type != "Gather" or attribute(node, "axis", 0) != 0:
            return None
        table = node.inputs[0].producer()
        if not is_dequantize(table) or table.inputs[0].const_value is None or attribute(table, "block_size", 0):
            return None
        codes, scales, *zero = table.inputs
        symmetric = not zero or zero[0] is None or not np.any(zero[0].const_value.numpy())
        rows = codes.shape.is_static() and len(codes.shape) == 2 and attribute(table, "axis", 1) == 0
        return table if rows and symmetric and codes.dtype.name == "INT8" and len(scales.shape) == 1 else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        import onnx_ir

        result, (codes, scales) = node.outputs[0], found.inputs[:2]
        column = floats(scales)
        assert column is not None
        tall = add_constant(model, f"{scales.name}_of_rows", column[:, None], scales.dtype)
        first = [onnx_ir.AttrInt64("axis", 0)]
        taken = insert_before(node, "Gather", [codes, node.inputs[1]], like=codes, shape=result.shape, attributes=first)
        to = [onnx_ir.AttrInt64("to", scales.dtype)]
        cast = insert_before(node, "Cast", [taken], like=result, shape=result.shape, attributes=to)
        step = insert_before(node, "Gather", [tall, node.inputs[1]], like=tall, shape=None, attributes=first)
        made = insert_before(node, "Mul", [cast, step], like=result, shape=result.shape)
        replace_node(model, node, made)
        if not found.outputs[0].uses():
            inputs = [value for value in found.inputs if value is not None]
            model.graph.remove(found, safe=True)
            for value in inputs:
                drop_unread(model, value)
