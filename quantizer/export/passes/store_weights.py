"""Weights stored as integers: a Q whose input is a constant is carried out at export.

A frozen proxy holds its weights as integers already; a proxy that trains holds them as floats behind a Q/DQ pair.
"""

from __future__ import annotations

from typing import Any

import torch

from quantizer.numerics import ops

__all__ = ["StoreWeights"]


class StoreWeights:
    """``Q(w, s) -> DQ`` of a constant w becomes ``DQ`` of stored integers."""

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        import onnx_ir

        found = _constant_weights(model)
        for node in found:
            weight, scale = (torch.from_numpy(node.inputs[i].const_value.numpy().copy()) for i in (0, 1))
            axis = node.attributes["axis"].as_int() if scale.dim() and "axis" in node.attributes else None
            steps = ops.quantize(weight.float(), scale.float(), "int8", axis).numpy()
            name = f"{node.inputs[0].name}_stored_{node.inputs[1].name}"
            stored = onnx_ir.Value(
                name=name,
                shape=onnx_ir.Shape(steps.shape),
                type=onnx_ir.TensorType(onnx_ir.DataType.INT8),
                const_value=onnx_ir.tensor(steps, name=name),
            )
            model.graph.register_initializer(stored)
            node.outputs[0].replace_all_uses_with(stored)
            _remove(model, node)
        return len(found)

    def ensures(self, model: Any) -> str | None:
        left = [node.inputs[0].name for node in _constant_weights(model)]
        return f"a weight is still a float behind a Q: {left[0]}" if left else None


def _constant_weights(model: Any) -> list[Any]:
    return [
        node
        for node in model.graph
        if node.op_type == "QuantizeLinear" and all(value.const_value is not None for value in node.inputs[:2])
    ]


def _remove(model: Any, node: Any) -> None:
    """Take the node out, and the float weight where nothing else reads it."""
    weight = node.inputs[0]
    model.graph.remove(node, safe=True)
    if weight.is_initializer() and not weight.uses():
        del model.graph.initializers[weight.name]
