"""Operators that pick elements by index, and that make indices."""

from __future__ import annotations

import operator
from typing import Any

import torch

from quantizer.engines.torch_engine.onnx_import.graph_builder import (
    Constant,
    GraphBuilder,
    OnnxNode,
    Sizes,
    Value,
    operators,
)

aten = torch.ops.aten


@operators.add("Gather")
def _gather(build: GraphBuilder, node: OnnxNode) -> Value:
    given, places = node.inputs[0], build.sizes(node.inputs[1])
    axis = node.attributes.get("axis", 0)
    constant = isinstance(node.inputs[1], Constant)
    if isinstance(given, Sizes) and constant and places is not None:
        alone = isinstance(node.inputs[1], Constant) and node.inputs[1].array.ndim == 0
        return Sizes(tuple(given.items[place] for place in places), alone)
    data = build.tensor(given)
    if isinstance(node.inputs[1], Constant) and node.inputs[1].array.ndim == 0:
        return build.call(aten.select.int, data, axis, int(node.inputs[1].array))
    indices = build.tensor(node.inputs[1])
    if axis == 0 and node.ranks[0] == 2 and not _counts_from_the_end(node.inputs[1]):
        return build.call(aten.embedding.default, data, indices)
    if axis < 0:
        if node.ranks[0] is None:
            raise node.fault("the rank of its input is not known; export the model again")
        axis += node.ranks[0]
    return build.call(aten.index.Tensor, data, [None] * axis + [indices])


@operators.add("GatherElements")
def _gather_elements(build: GraphBuilder, node: OnnxNode) -> Value:
    axis = node.attributes.get("axis", 0)
    data = build.tensor(node.inputs[0])
    return build.call(aten.gather.default, data, axis, _from_the_start(build, node, data, axis))


def _counts_from_the_end(indices: Value | None) -> bool:
    return isinstance(indices, Constant) and bool((indices.array < 0).any())


def _from_the_start(build: GraphBuilder, node: OnnxNode, data: Any, axis: int) -> Any:
    """Return indices of an axis without those that count from its end, which ONNX has and torch's kernels refuse."""
    given = node.inputs[1]
    indices = build.tensor(given)
    if isinstance(given, Constant) and not _counts_from_the_end(given):
        return indices
    below = build.call(aten.lt.Tensor, indices, build.buffer("zero", torch.tensor(0)))
    size = build.call(aten.sym_size.int, data, axis)
    return build.call(aten.where.self, below, build.call(aten.add.Scalar, indices, size), indices)


@operators.add("GatherND")
def _gather_nd(build: GraphBuilder, node: OnnxNode) -> Value:
    if node.attributes.get("batch_dims", 0):
        raise node.fault("batch_dims other than 0 are not supported")
    data, indices = build.tensor(node.inputs[0]), build.tensor(node.inputs[1])
    return build.call(aten.index.Tensor, data, _picks(build, node, indices))


def _picks(build: GraphBuilder, node: OnnxNode, indices: Any) -> list[Any]:
    """Return the index into each axis from a table of indices, whose last axis holds the index of one element."""
    count = _last_size(node)
    if count is None:
        raise node.fault("the length of its indices is not known; export the model again")
    return [build.call(aten.select.int, indices, -1, place) for place in range(count)]


def _last_size(node: OnnxNode) -> int | None:
    """Return the size of the last axis of the indices, which is how many axes of the data they are for."""
    value, shape = node.inputs[1], node.shapes[1]
    if isinstance(value, Constant):
        return int(value.array.shape[-1])
    if shape and isinstance(shape[-1], int):
        return shape[-1]
    if isinstance(value, torch.fx.Node) and value.target is aten.cat.default:
        # What the exporter writes: indices of one axis each, side by side.
        parts = value.args[0]
        return len(parts) if isinstance(parts, list | tuple) else None
    if isinstance(value, torch.fx.Node) and value.target is aten.unsqueeze.default and value.args[1] == -1:
        return 1  # what it writes for a slice that is assigned to: indices of the first axis
    return None


_REDUCTIONS = {"add": "sum", "mul": "prod", "min": "amin", "max": "amax"}
"""What torch calls the reductions with which values are scattered."""


@operators.add("ScatterND")
def _scatter_nd(build: GraphBuilder, node: OnnxNode) -> Value:
    reduction = node.attributes.get("reduction", "none")
    if reduction not in ("none", "add"):
        raise node.fault(f"a reduction by {reduction!r} is not supported; 'none' and 'add' are")
    data, indices, updates = (build.tensor(value) for value in node.inputs[:3])
    picks = _picks(build, node, indices)
    return build.call(aten.index_put.default, data, picks, updates, reduction == "add")


@operators.add("ScatterElements")
def _scatter_elements(build: GraphBuilder, node: OnnxNode) -> Value:
    data, updates = build.tensor(node.inputs[0]), build.tensor(node.inputs[2])
    axis, reduction = node.attributes.get("axis", 0), node.attributes.get("reduction", "none")
    indices = _from_the_start(build, node, data, axis)
    if reduction == "none":
        return build.call(aten.scatter.src, data, axis, indices, updates)
    if reduction not in _REDUCTIONS:
        raise node.fault(f"a reduction by {reduction!r} is not supported; 'none', 'add', 'mul', 'min' and 'max' are")
    return build.call(aten.scatter_reduce.two, data, axis, indices, updates, _REDUCTIONS[reduction])


@operators.add("Slice")
def _slice(build: GraphBuilder, node: OnnxNode) -> Value:
    starts, ends = build.needed_sizes(node, 1), build.needed_sizes(node, 2)
    axes = list(range(len(starts))) if node.input(3) is None else build.needed_sizes(node, 3)
    steps = [1] * len(starts) if node.input(4) is None else build.needed_sizes(node, 4)
    given = node.inputs[0]
    if isinstance(given, Sizes) and all(isinstance(item, int) for item in (*starts, *ends, *steps)):
        return Sizes(given.items[starts[0] : ends[0] : steps[0]])
    made = build.tensor(given)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if isinstance(step, int) and step < 0:
            if step != -1 or not _is_whole(start, end):
                raise node.fault(f"a step of {step} is not supported; a step of -1 through a whole axis is")
            made = build.call(aten.flip.default, made, [axis])
            continue
        made = build.call(aten.slice.Tensor, made, axis, start, end, step)
    return made


def _is_whole(start: Any, end: Any) -> bool:
    """Return whether a slice backwards takes a whole axis, however long: it starts at the last place."""
    return isinstance(start, int) and isinstance(end, int) and (start == -1 or start >= _FAR) and end <= -_FAR


_FAR = 2**31 - 1
"""What exporters write for an end that no axis reaches."""


@operators.add("Range")
def _range(build: GraphBuilder, node: OnnxNode) -> Value:
    bounds = [build.sizes(value) for value in node.inputs]
    if any(bound is None for bound in bounds):
        raise node.fault("its bounds are computed from data; they are needed as constants or sizes")
    start, end, step = (bound[0] for bound in bounds if bound is not None)
    return build.call(aten.arange.start_step, start, end, step)


@operators.add("OneHot")
def _one_hot(build: GraphBuilder, node: OnnxNode) -> Value:
    depth = build.needed_sizes(node, 1)[0]
    off_on = build.tensor(node.inputs[2])
    if node.attributes.get("axis", -1) != -1:
        raise node.fault("an axis other than the last is not supported")
    indices = build.call(aten.unsqueeze.default, build.tensor(node.inputs[0]), -1)
    places = build.call(aten.arange.default, depth)
    # An index below 0 counts from the end.
    from_end = build.call(aten.add.Scalar, indices, depth)
    hits = build.call(
        aten.logical_or.default,
        build.call(aten.eq.Tensor, indices, places),
        build.call(aten.eq.Tensor, from_end, places),
    )
    return build.call(
        aten.where.self,
        hits,
        build.call(aten.select.int, off_on, 0, 1),
        build.call(aten.select.int, off_on, 0, 0),
    )


@operators.add("Trilu")
def _trilu(build: GraphBuilder, node: OnnxNode) -> Value:
    diagonal = 0 if node.input(1) is None else build.needed_sizes(node, 1)[0]
    target = aten.triu.default if node.attributes.get("upper", 1) else aten.tril.default
    return build.call(target, build.tensor(node.inputs[0]), diagonal)


@operators.add("TopK")
def _top_k(build: GraphBuilder, node: OnnxNode) -> tuple[Value, ...]:
    found = build.call(
        aten.topk.default,
        build.tensor(node.inputs[0]),
        build.needed_sizes(node, 1)[0],
        node.attributes.get("axis", -1),
        bool(node.attributes.get("largest", 1)),
        bool(node.attributes.get("sorted", 1)),
    )
    return build.call(operator.getitem, found, 0), build.call(operator.getitem, found, 1)
