"""Passes that keep the axes of scales and zero points, for a target that would give them those of another tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass, add_constant, drop_unread, insert_before
from quantizer.qdq.gathered_axes import gathers_axis, gathers_zero_points, joins_before
from quantizer.qdq.graph import attribute, constant


class GathersApart(MatchPass[Any]):
    """``product -> Gather`` becomes ``product -> Max(both inputs) -> Gather``, with the same values."""

    left = "zero points of a product can still be moved behind a Gather"

    def match(self, node: Any) -> Any | None:
        """Return what a Gather reads, if it is such a product; None for any other node."""
        return node.inputs[0] if gathers_zero_points(node) else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        same = insert_before(node, "Max", [found, found], like=found, shape=found.shape)
        node.replace_input_with(0, same)


class KeptAxes(MatchPass[int]):
    """``Gather(x, 3)`` becomes ``Gather(x, [3]) -> Squeeze``, with the same values."""

    left = "an index behind a product still takes out its axis"

    def match(self, node: Any) -> int | None:
        """Return the index that a node reads of its axis; None for a node that stays."""
        if not gathers_axis(node):
            return None
        index = constant(node.inputs[1])
        assert index is not None
        return int(index)

    def apply(self, model: Any, node: Any, found: int) -> None:
        import onnx_ir

        axis, given, result, index = attribute(node, "axis", 0), node.inputs[0], node.outputs[0], node.inputs[1]
        sizes = list(given.shape)
        sizes[axis] = 1
        int64 = onnx_ir.DataType.INT64
        held = {"index": [found], "axis": [axis % len(sizes)]}
        at, axes = (add_constant(model, f"{result.name}.{key}", np.array(held[key]), int64) for key in held)
        attributes = [onnx_ir.AttrInt64("axis", axis)]
        kept = insert_before(
            node, "Gather", [given, at], like=result, shape=onnx_ir.Shape(sizes), attributes=attributes
        )
        taken = insert_before(node, "Squeeze", [kept, axes], like=result, shape=result.shape)
        name = result.name
        result.replace_all_uses_with(taken, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
        drop_unread(model, index)
        taken.name = name


class ConcatsBeforeQuantize(MatchPass[Any]):
    """``Concat -> Q`` becomes ``Concat -> Max(both inputs) -> Q``, with the same values."""

    left = "a concatenation can still be joined behind the Q"

    def match(self, node: Any) -> Any | None:
        """Return what a Q rounds, if a concatenation of places makes it; None for any other node."""
        return node.inputs[0] if joins_before(node) else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        same = insert_before(node, "Max", [found, found], like=found, shape=found.shape)
        node.replace_input_with(0, same)
