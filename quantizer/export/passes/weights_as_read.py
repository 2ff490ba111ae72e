"""Pass that stores weights as MatMul reads them: [K, N] with the channels on axis 1, and no Transpose behind the DQ.

Blocks keep to their axis: scales [N, K / B] of blocks on axis 1 become [K / B, N] of blocks on axis 0.

``torch.nn.functional.linear`` exports as DequantizeLinear - Transpose - MatMul of a weight [N, K].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantizer.qdq.graph import is_dequantize


class WeightsAsRead:
    """``DQ(w [N, K], axis 0) -> Transpose -> MatMul`` becomes ``DQ(w' [K, N], axis 1) -> MatMul``.

    A module that is called several times has a Transpose for each call, and one weight.
    """

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        changed = 0
        for dequantize, transposes in _transposed_weights(model):
            _turn(dequantize)
            for transpose in transposes:
                transpose.outputs[0].replace_all_uses_with(dequantize.outputs[0])
                transpose.graph.remove(transpose, safe=True)
                changed += 1
        return changed

    def ensures(self, model: Any) -> str | None:
        left = [transposes[0].name for _, transposes in _transposed_weights(model)]
        return f"a Transpose still stands behind a stored weight: {left[0]}" if left else None


def _transposed_weights(model: Any) -> list[tuple[Any, list[Any]]]:
    """Return the dequantizers of weights that nothing but Transposes reads, each with those."""
    found = []
    for node in model.graph:
        if not is_dequantize(node) or node.outputs[0].is_graph_output() or len(node.inputs[0].shape or ()) != 2:
            continue
        readers = node.outputs[0].consumers()
        # Other readers need the weight as it is.
        if readers and all(map(_is_transpose, readers)) and all(map(_is_own, _matrices(node))):
            found.append((node, list(readers)))
    return found


def _is_transpose(node: Any) -> bool:
    return bool(node.op_type == "Transpose" and node.attributes["perm"].as_ints() == (1, 0))


def _matrices(dequantize: Any) -> list[Any]:
    """Return the stored weight, and scale and zero point if they are those of blocks."""
    return [value for value in dequantize.inputs if value is not None and len(value.shape) == 2]


def _is_own(value: Any) -> bool:
    """Return whether a value is a constant of the file that only one node reads."""
    return value.is_initializer() and value.const_value is not None and len(list(value.uses())) == 1


def _turn(dequantize: Any) -> None:
    """Transpose a stored weight, with the scales of its blocks, and move its channels or blocks to the other axis."""
    import onnx_ir

    for value in _matrices(dequantize):
        value.const_value = onnx_ir.tensor(np.ascontiguousarray(value.const_value.numpy().T), name=value.name)
        value.shape = onnx_ir.Shape(value.const_value.shape)
    dequantize.outputs[0].shape = onnx_ir.Shape(dequantize.inputs[0].const_value.shape)
    if len(dequantize.inputs[1].shape) > 0:
        axis = dequantize.attributes["axis"].as_int() % 2
        dequantize.attributes["axis"] = onnx_ir.AttrInt64("axis", 1 - axis)
