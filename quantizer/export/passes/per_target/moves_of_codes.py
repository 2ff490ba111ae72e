"""Pass that lets operators that only move values move their codes.

A maximum of neighbours, a repetition or another order of values gives values with the same codes, so that a Q and DQ
behind it change nothing. An engine that finds them there moves bytes, and the next operator finds a quantized operand.
"""

from __future__ import annotations

from typing import Any

from quantizer.export.passes.base import MatchPass, insert_before
from quantizer.qdq.graph import floats, is_quantize, pair_before, readers
from quantizer.qdq.operand import MOVES


class MovesOfCodes(MatchPass[tuple[Any, Any]]):
    """``Q -> DQ -> MaxPool`` becomes ``Q -> DQ -> MaxPool -> Q -> DQ``, of one scale, where no Q reads it."""

    left = "an operator still moves floats that have codes"

    def match(self, node: Any) -> tuple[Any, Any] | None:
        """Return the Q and the DQ before an operator that moves values; None for any other node."""
        if not _only_moves(node) or node.outputs[0].is_graph_output():
            return None
        pair = pair_before(node.inputs[0])
        if pair is None or not is_quantize(pair[0]):
            return None
        scale = floats(pair[0].inputs[1])
        read = readers(node.outputs[0])
        return pair if scale is not None and scale.ndim == 0 and read and not all(map(is_quantize, read)) else None

    def apply(self, model: Any, node: Any, found: tuple[Any, Any]) -> None:
        quantize, dequantize = found
        moved = node.outputs[0]
        first = readers(moved)[0]
        codes = insert_before(
            first, "QuantizeLinear", [moved, *quantize.inputs[1:]], like=quantize.outputs[0], shape=moved.shape
        )
        values = insert_before(
            first, "DequantizeLinear", [codes, *dequantize.inputs[1:]], like=moved, shape=moved.shape
        )
        codes.producer().metadata_props.update(node.metadata_props)
        values.producer().metadata_props.update(node.metadata_props)
        for reader, place in list(moved.uses()):
            if reader is not codes.producer():
                reader.replace_input_with(place, values)

    def run(self, model: Any) -> int:
        # In the order of the graph: behind one move may be another.
        changed = super().run(model)
        if changed:
            model.graph.sort()
        return changed


def _only_moves(node: Any) -> bool:
    """Return whether the results of an operator are values of its first input."""
    if node.op_type in ("MaxPool", "DepthToSpace", "SpaceToDepth", *MOVES):
        return len(node.outputs) == 1
    mode = node.attributes["mode"].as_string() if "mode" in node.attributes else "nearest"
    return node.op_type == "Resize" and mode == "nearest"
