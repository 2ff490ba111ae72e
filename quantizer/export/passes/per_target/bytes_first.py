"""Pass that casts inputs of bytes at once, for targets that read bytes nowhere else.

``image.permute(0, 3, 1, 2).float()`` of a uint8 image is a Transpose of bytes. As INT32 it is the same numbers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from quantizer.export.passes.base import add_constant
from quantizer.qdq.graph import element

_LAYOUT = frozenset(
    {
        "Transpose",
        "Reshape",
        "Squeeze",
        "Unsqueeze",
        "Flatten",
        "Identity",
        "Slice",
        "Gather",
        "Split",
        "Expand",
        "Tile",
    }
    | {"Concat", "Where", "Pad", "Max", "Min", "DepthToSpace", "SpaceToDepth", "GatherElements", "GatherND"}
)
"""Operators that make no new numbers."""
_COMPARED = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_WIDE = "INT32"


class BytesFirst:
    """``Transpose(x) -> Cast`` of an input x of bytes becomes ``Cast(x, INT32) -> Transpose -> Cast``.

    Sums and products of bytes wrap around, and stay as they are.

    Args:
        narrow: the element types that the target reads by a Cast alone.
    """

    def __init__(self, narrow: Collection[str]) -> None:
        self._narrow = frozenset(narrow)

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        import onnx_ir

        found = [value for value in model.graph.inputs if self._reached(value)]
        for value in found:
            reached = self._reached(value)
            for node in reached:
                for place, given in enumerate(node.inputs):
                    if element(given) in self._narrow and given.const_value is not None:
                        array = given.const_value.numpy().astype(np.int32)
                        wide = add_constant(model, f"{given.name}_wide", array, onnx_ir.DataType[_WIDE])
                        node.replace_input_with(place, wide)
                for made in node.outputs:
                    if element(made) in self._narrow:
                        made.type = onnx_ir.TensorType(onnx_ir.DataType[_WIDE])
            cast = onnx_ir.Node("", "Cast", [value], [onnx_ir.AttrInt64("to", int(onnx_ir.DataType[_WIDE]))])
            cast.outputs[0].shape, cast.outputs[0].type = value.shape, onnx_ir.TensorType(onnx_ir.DataType[_WIDE])
            cast.metadata_props.update(reached[0].metadata_props)
            for node in reached:
                for place, given in enumerate(node.inputs):
                    if given is value:
                        node.replace_input_with(place, cast.outputs[0])
            model.graph.insert_before(model.graph[0], cast)
        return len(found)

    def ensures(self, model: Any) -> str | None:
        left = [value.name for value in model.graph.inputs if self._reached(value)]
        return f"an input of bytes is still read by more than casts: {left[0]}" if left else None

    def _reached(self, value: Any) -> list[Any]:
        """Return the nodes but casts that read a narrow input or what layout makes of it; empty if it must stay."""
        if element(value) not in self._narrow:
            return []
        found: dict[Any, None] = {}
        pending = [value]
        while pending:
            one = pending.pop()
            if one.is_graph_output():
                return []
            for node, _ in one.uses():
                if node.op_type == "Cast" or node in found:
                    continue
                if node.graph is not value.graph or node.op_type not in _LAYOUT | _COMPARED:
                    return []
                found[node] = None
                pending += [made for made in node.outputs if element(made) in self._narrow]
        others = (given for node in found for given in node.inputs if element(given) in self._narrow)
        known = {id(value)} | {id(made) for node in found for made in node.outputs}
        return list(found) if all(id(one) in known or one.const_value is not None for one in others) else []
