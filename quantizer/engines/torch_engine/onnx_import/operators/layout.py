"""Operators that move values, and leave them as they are."""

from __future__ import annotations

import operator
from typing import Any

import torch

from quantizer.engines.torch_engine.onnx_import.graph_builder import GraphBuilder, OnnxNode, Sizes, Value, operators

aten = torch.ops.aten


@operators.add("Reshape")
def _reshape(build: GraphBuilder, node: OnnxNode) -> Value:
    wanted = build.needed_sizes(node, 1)
    given = node.inputs[0]
    if isinstance(given, Sizes):
        return Sizes(given.items, alone=not wanted)
    made = build.tensor(given)
    if not node.attributes.get("allowzero", 0):
        wanted = [build.call(aten.sym_size.int, made, axis) if size == 0 else size for axis, size in enumerate(wanted)]
    return build.call(aten.reshape.default, made, wanted)


@operators.add("Flatten")
def _flatten(build: GraphBuilder, node: OnnxNode) -> Value:
    made, axis, rank = build.tensor(node.inputs[0]), node.attributes.get("axis", 1), node.ranks[0]
    if rank is None:
        raise node.fault("the rank of its input is not known; export the model again")
    axis = axis + rank if axis < 0 else axis
    if axis == 1:
        return build.call(aten.flatten.using_ints, made, 1, -1)
    if axis == 0:
        return build.call(aten.reshape.default, made, [1, -1])
    front = build.call(aten.flatten.using_ints, made, 0, axis - 1)
    return build.call(aten.flatten.using_ints, front, 1, -1)


@operators.add("Transpose")
def _transpose(build: GraphBuilder, node: OnnxNode) -> Value:
    order = node.attributes.get("perm")
    if order is None:
        if node.ranks[0] is None:
            raise node.fault("the rank of its input is not known; export the model again")
        order = list(reversed(range(node.ranks[0])))
    return build.call(aten.permute.default, build.tensor(node.inputs[0]), list(order))


def _axes(build: GraphBuilder, node: OnnxNode) -> list[int] | None:
    return None if node.input(1) is None else build.needed_sizes(node, 1)


@operators.add("Unsqueeze")
def _unsqueeze(build: GraphBuilder, node: OnnxNode) -> Value:
    axes = build.needed_sizes(node, 1)
    if isinstance(node.inputs[0], Sizes):
        return Sizes(node.inputs[0].items)
    made = build.tensor(node.inputs[0])
    rank = node.ranks[0]
    if rank is not None:
        axes = sorted(axis + rank + len(axes) if axis < 0 else axis for axis in axes)
    for axis in axes:
        made = build.call(aten.unsqueeze.default, made, axis)
    return made


@operators.add("Squeeze")
def _squeeze(build: GraphBuilder, node: OnnxNode) -> Value:
    axes = _axes(build, node)
    if isinstance(node.inputs[0], Sizes):
        return Sizes(node.inputs[0].items, alone=True)
    made = build.tensor(node.inputs[0])
    return build.call(aten.squeeze.default, made) if axes is None else build.call(aten.squeeze.dims, made, axes)


@operators.add("Concat")
def _concat(build: GraphBuilder, node: OnnxNode) -> Value:
    parts = [build.sizes(value) for value in node.inputs]
    if any(isinstance(value, Sizes) for value in node.inputs) and all(part is not None for part in parts):
        return Sizes(tuple(item for part in parts if part is not None for item in part))
    return build.call(aten.cat.default, [build.tensor(value) for value in node.inputs], node.attributes["axis"])


@operators.add("Split")
def _split(build: GraphBuilder, node: OnnxNode) -> tuple[Value, ...]:
    given, axis, count = build.tensor(node.inputs[0]), node.attributes.get("axis", 0), len(node.outputs)
    if node.input(1) is not None:
        found = build.call(aten.split_with_sizes.default, given, build.needed_sizes(node, 1), axis)
    else:
        found = build.call(aten.tensor_split.sections, given, node.attributes.get("num_outputs", count), axis)
    return tuple(build.call(operator.getitem, found, place) for place in range(count))


@operators.add("Tile")
def _tile(build: GraphBuilder, node: OnnxNode) -> Value:
    return build.call(aten.repeat.default, build.tensor(node.inputs[0]), build.needed_sizes(node, 1))


@operators.add("Pad")
def _pad(build: GraphBuilder, node: OnnxNode) -> Value:
    mode = node.attributes.get("mode", "constant")
    pads = build.needed_sizes(node, 1)
    rank = len(pads) // 2
    axes = list(range(rank)) if node.input(3) is None else build.needed_sizes(node, 3)
    if node.input(3) is not None and (rank := node.ranks[0] or 0) == 0:
        raise node.fault("the rank of its input is not known; export the model again")
    before = dict(zip(axes, pads[: len(axes)], strict=True))
    after = dict(zip(axes, pads[len(axes) :], strict=True))
    # torch lists them from the last axis to the first.
    order: list[Any] = [size for axis in reversed(range(rank)) for size in (before.get(axis, 0), after.get(axis, 0))]
    while len(order) > 2 and order[-2:] == [0, 0]:
        order = order[:-2]
    given = build.tensor(node.inputs[0])
    if mode != "constant":
        names = {"reflect": aten.pad.default, "edge": aten.pad.default}
        if mode not in names:
            raise node.fault(f"the mode {mode!r} is not supported")
        return build.call(names[mode], given, order, "replicate" if mode == "edge" else mode)
    value = build.constant_number(node, 2, 0.0)
    return build.call(aten.constant_pad_nd.default, given, order, value)


@operators.add("DepthToSpace")
def _depth_to_space(build: GraphBuilder, node: OnnxNode) -> Value:
    if node.attributes.get("mode", "DCR") != "CRD":
        raise node.fault("only the mode CRD is supported")
    return build.call(aten.pixel_shuffle.default, build.tensor(node.inputs[0]), node.attributes["blocksize"])
