"""Pass that stores the weight of each expert by itself, behind a DQ of its own, as engines read weights.

Gather(DQ(w [E, K, N], scale [E, 1, N], blocks of K), e) = DQ(w[e] [K, N], scale[e] [N], axis 1)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass, add_constant, drop_unread, insert_before
from quantizer.qdq.graph import block_size, is_dequantized

_EXPERTS = 3  # axes


class ExpertWeights(MatchPass[int]):
    """Each matrix of stored experts that is read becomes a stored matrix."""

    left = "a matrix is taken out of dequantized experts"

    def match(self, node: Any) -> int | None:
        """Return the number of the expert that a Gather takes out of stored ones; None for any other node."""
        if node.op_type != "Gather" or not is_dequantized(node.inputs[0]):
            return None
        stored = node.inputs[0].producer().inputs
        number = node.inputs[1].const_value
        constant = number is not None and all(given is None or given.const_value is not None for given in stored)
        first_axis = "axis" not in node.attributes or node.attributes["axis"].as_int() == 0
        if not constant or not first_axis or number.numpy().ndim or len(stored[0].shape) != _EXPERTS:
            return None
        return int(number.numpy())

    def apply(self, model: Any, node: Any, found: int) -> None:
        import onnx_ir

        dequantize = node.inputs[0].producer()
        axis = dequantize.attributes["axis"].as_int() if "axis" in dequantize.attributes else None
        blocks = block_size(dequantize)
        depth = int(dequantize.inputs[0].shape[1])

        def of_expert(array: Any) -> Any:
            """Return the scales of the expert: of its channels, of blocks, or one."""
            if array.ndim == 0:
                return array
            return array[found].reshape(-1) if blocks == depth else array[found]

        def constant(value: Any, change: Any) -> Any:
            array = np.ascontiguousarray(change(value.const_value.numpy()))
            return add_constant(model, f"{value.name}_{found}", array, value.const_value.dtype)

        codes, scale, *zero = (value for value in dequantize.inputs if value is not None)
        inputs = [constant(codes, lambda array: array[found]), constant(scale, of_expert)]
        inputs += [constant(value, of_expert) for value in zero]
        attributes = []
        if blocks is not None:
            whole = blocks == depth
            attributes = [onnx_ir.AttrInt64("axis", 1 if whole else int(axis or 0) - 1)]
            attributes += [] if whole else [onnx_ir.AttrInt64("block_size", blocks)]
        taken = node.inputs[0]
        shape = onnx_ir.Shape(taken.shape[1:])
        made = insert_before(node, "DequantizeLinear", inputs, like=taken, shape=shape, attributes=attributes)
        made.producer().metadata_props.update(dequantize.metadata_props)
        node.outputs[0].replace_all_uses_with(made)
        index = node.inputs[1]
        model.graph.remove(node, safe=True)
        drop_unread(model, index)
        if not taken.uses():
            stored = [value for value in dequantize.inputs if value is not None]
            model.graph.remove(dequantize, safe=True)
            for value in stored:
                drop_unread(model, value)
