"""Pass that moves layout operators and float casts before the Q, so that a product reads its DQ directly.

A transposition, a reshaping, or a conversion to another float type keeps each value, and a Q with one scale rounds each
value by itself, so their order is free. An engine computes in low precision what directly follows a DQ.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass, add_constant, drop_unread
from quantizer.qdq.graph import floats, is_dynamic_quantize, pair_before

_LAYOUT = frozenset({"Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


class LayoutBeforeQuantize(MatchPass[tuple[Any, Any]]):
    """``Q(x, s) -> DQ(s) -> Transpose`` becomes ``Transpose(x) -> Q(s) -> DQ(s)``; a Cast takes the scale along."""

    left = "a DQ is still not read directly"

    def run(self, model: Any) -> int:
        # In the order of the graph: the successor of a moved node then reads the DQ, and is moved in its turn.
        changed = super().run(model)
        if changed:
            model.graph.sort()
        return changed

    def match(self, node: Any) -> tuple[Any, Any] | None:
        """Return the Q and the DQ before which a layout operator can be moved; None for any other node."""
        if node.op_type not in _LAYOUT and not _is_float_cast(node):
            return None
        pair = pair_before(node.inputs[0])
        if pair is None or node.outputs[0].is_graph_output():
            return None
        if any(len(list(entry.outputs[0].uses())) != 1 for entry in pair):
            return None
        if is_dynamic_quantize(pair[0]):
            # Its scale is that of all values, in any order, and always of one type.
            return pair if node.op_type in _LAYOUT else None
        scale = floats(pair[0].inputs[1])
        return pair if scale is not None and scale.ndim == 0 else None

    def apply(self, model: Any, node: Any, found: tuple[Any, Any]) -> None:
        import onnx_ir

        quantize, dequantize = found
        moved, result = node.outputs[0], dequantize.outputs[0]
        moved.replace_all_uses_with(result)
        node.replace_input_with(0, quantize.inputs[0])
        quantize.replace_input_with(0, moved)
        quantize.outputs[0].shape = result.shape = moved.shape
        if node.op_type != "Cast":
            return
        kind = onnx_ir.DataType(node.attributes["to"].as_int())
        step, scale = quantize.inputs[1], floats(quantize.inputs[1])
        assert scale is not None
        made = add_constant(model, f"{step.name}_cast", np.asarray(scale, kind.numpy()), kind)
        for entry in found:
            entry.replace_input_with(1, made)
        result.type = onnx_ir.TensorType(kind)
        drop_unread(model, step)


def _is_float_cast(node: Any) -> bool:
    import onnx_ir

    kinds = (onnx_ir.DataType.FLOAT, onnx_ir.DataType.FLOAT16, onnx_ir.DataType.BFLOAT16)
    return node.op_type == "Cast" and node.attributes["to"].as_int() in kinds
