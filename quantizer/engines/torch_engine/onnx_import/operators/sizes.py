"""Operators that make shapes, and tensors of a given shape."""

from __future__ import annotations

import numpy as np
import torch

from quantizer.engines.torch_engine.onnx_import.graph_builder import (
    Constant,
    GraphBuilder,
    OnnxNode,
    Sizes,
    Value,
    as_tensor,
    operators,
)

aten = torch.ops.aten


@operators.add("Shape")
def _shape(build: GraphBuilder, node: OnnxNode) -> Value:
    if isinstance(node.inputs[0], Sizes):
        return Constant(node.outputs[0], np.array([] if node.inputs[0].alone else [len(node.inputs[0].items)], "int64"))
    shape = node.inputs[0].array.shape if isinstance(node.inputs[0], Constant) else node.shapes[0]
    if shape is None:
        raise node.fault("the rank of its input is not known; export the model again")
    given = None if isinstance(node.inputs[0], Constant) else build.tensor(node.inputs[0])
    axes = range(len(shape))[node.attributes.get("start", 0) : node.attributes.get("end", len(shape))]
    return Sizes(
        tuple(shape[axis] if shape[axis] is not None else build.call(aten.sym_size.int, given, axis) for axis in axes)
    )


@operators.add("Constant")
def _constant(build: GraphBuilder, node: OnnxNode) -> Value:
    for name, dtype in (("value_int", "int64"), ("value_ints", "int64"), ("value_float", "float32")):
        if name in node.attributes:
            return Constant(node.outputs[0], np.asarray(node.attributes[name], dtype))
    if "value" not in node.attributes:
        raise node.fault(f"a constant given as {', '.join(node.attributes)} is not supported")
    return Constant(node.outputs[0], np.asarray(node.attributes["value"]))


@operators.add("ConstantOfShape")
def _constant_of_shape(build: GraphBuilder, node: OnnxNode) -> Value:
    value = as_tensor(node.attributes["value"]) if "value" in node.attributes else torch.zeros(1)
    return build.call(aten.full.default, build.needed_sizes(node, 0), value.item(), dtype=value.dtype)


@operators.add("Expand")
def _expand(build: GraphBuilder, node: OnnxNode) -> Value:
    wanted = build.needed_sizes(node, 1)
    rank = node.ranks[0]
    if rank is not None and rank > len(wanted):
        wanted = [1] * (rank - len(wanted)) + wanted
    given = build.tensor(node.inputs[0])
    if 1 not in wanted:
        return build.call(aten.expand.default, given, wanted)
    # In ONNX a wanted size of 1 leaves the axis as it is; in torch it would have to be 1 already.
    kept = [-1 if size == 1 and place >= len(wanted) - (rank or 0) else size for place, size in enumerate(wanted)]
    return build.call(aten.expand.default, given, kept)


@operators.add("Size")
def _size(build: GraphBuilder, node: OnnxNode) -> Value:
    if isinstance(node.inputs[0], Sizes):
        return Constant(node.outputs[0], np.array(len(node.inputs[0].items)))
    return Sizes((build.call(aten.sym_numel.default, build.tensor(node.inputs[0])),), alone=True)
