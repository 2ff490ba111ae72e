"""Weights stored as MatMul reads them: [K, N] with the channels on axis 1, and no Transpose behind the DQ.

``torch.nn.functional.linear`` exports as DequantizeLinear - Transpose - MatMul of a weight [N, K].
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["WeightsAsRead"]


class WeightsAsRead:
    """``DQ(w [N, K], axis 0) -> Transpose -> MatMul`` becomes ``DQ(w' [K, N], axis 1) -> MatMul``."""

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        changed = 0
        for transpose in _transposed_weights(model):
            dequantize = transpose.inputs[0].producer()
            if len(list(transpose.inputs[0].uses())) > 1:
                continue  # somebody else reads the weight as it is
            _turn(dequantize)
            transpose.outputs[0].replace_all_uses_with(dequantize.outputs[0])
            transpose.graph.remove(transpose, safe=True)
            changed += 1
        return changed

    def ensures(self, model: Any) -> str | None:
        left = [t.name for t in _transposed_weights(model) if len(list(t.inputs[0].uses())) == 1]
        return f"a Transpose still stands behind a stored weight: {left[0]}" if left else None


def _transposed_weights(model: Any) -> list[Any]:
    found = []
    for node in model.graph:
        if node.op_type != "Transpose" or node.inputs[0] is None or node.attributes["perm"].as_ints() != (1, 0):
            continue
        dequantize = node.inputs[0].producer()
        if dequantize is None or dequantize.op_type != "DequantizeLinear":
            continue
        stored = dequantize.inputs[0]
        if stored.is_initializer() and len(stored.shape) == 2 and len(list(stored.uses())) == 1:
            found.append(node)
    return found


def _turn(dequantize: Any) -> None:
    """Transpose a stored weight and move its channels to axis 1."""
    import onnx_ir

    stored = dequantize.inputs[0]
    stored.const_value = onnx_ir.tensor(np.ascontiguousarray(stored.const_value.numpy().T), name=stored.name)
    stored.shape = onnx_ir.Shape(stored.const_value.shape)
    dequantize.outputs[0].shape = onnx_ir.Shape(stored.const_value.shape)
    if dequantize.inputs[1].const_value.size > 1:
        dequantize.attributes["axis"] = onnx_ir.AttrInt64("axis", 1)
