"""ONNX operators that move, create, select or resize values, and operators that compute shapes."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch

from quantizer.export.onnx_import.graph_builder import (
    Constant,
    GraphBuilder,
    OnnxNode,
    Sizes,
    Value,
    as_tensor,
    operators,
)

aten = torch.ops.aten


@operators.add("Reshape")
def _reshape(build: GraphBuilder, node: OnnxNode) -> Value:
    sizes = build.needed_sizes(node, 1)
    x = node.inputs[0]
    if isinstance(x, Sizes):
        return Sizes(x.items, is_scalar=not sizes)
    result = build.tensor(x)
    if not node.attributes.get("allowzero", 0):
        sizes = [build.call(aten.sym_size.int, result, axis) if size == 0 else size for axis, size in enumerate(sizes)]
    return build.call(aten.reshape.default, result, sizes)


@operators.add("Flatten")
def _flatten(build: GraphBuilder, node: OnnxNode) -> Value:
    result, axis, rank = build.tensor(node.inputs[0]), node.attributes.get("axis", 1), node.ranks[0]
    if rank is None:
        raise node.error("the rank of its input is unknown; export the model again")
    axis = axis + rank if axis < 0 else axis
    if axis == 1:
        return build.call(aten.flatten.using_ints, result, 1, -1)
    if axis == 0:
        return build.call(aten.reshape.default, result, [1, -1])
    front = build.call(aten.flatten.using_ints, result, 0, axis - 1)
    return build.call(aten.flatten.using_ints, front, 1, -1)


@operators.add("Transpose")
def _transpose(build: GraphBuilder, node: OnnxNode) -> Value:
    order = node.attributes.get("perm")
    if order is None:
        if node.ranks[0] is None:
            raise node.error("the rank of its input is unknown; export the model again")
        order = list(reversed(range(node.ranks[0])))
    return build.call(aten.permute.default, build.tensor(node.inputs[0]), list(order))


def _axes(build: GraphBuilder, node: OnnxNode) -> list[int] | None:
    return None if node.input(1) is None else build.needed_sizes(node, 1)


@operators.add("Unsqueeze")
def _unsqueeze(build: GraphBuilder, node: OnnxNode) -> Value:
    axes = build.needed_sizes(node, 1)
    if isinstance(node.inputs[0], Sizes):
        return Sizes(node.inputs[0].items)
    result = build.tensor(node.inputs[0])
    rank = node.ranks[0]
    if rank is not None:
        axes = sorted(axis + rank + len(axes) if axis < 0 else axis for axis in axes)
    for axis in axes:
        result = build.call(aten.unsqueeze.default, result, axis)
    return result


@operators.add("Squeeze")
def _squeeze(build: GraphBuilder, node: OnnxNode) -> Value:
    axes = _axes(build, node)
    if isinstance(node.inputs[0], Sizes):
        return Sizes(node.inputs[0].items, is_scalar=True)
    result = build.tensor(node.inputs[0])
    return build.call(aten.squeeze.default, result) if axes is None else build.call(aten.squeeze.dims, result, axes)


@operators.add("Concat")
def _concat(build: GraphBuilder, node: OnnxNode) -> Value:
    parts = [build.sizes(value) for value in node.inputs]
    if any(isinstance(value, Sizes) for value in node.inputs) and all(part is not None for part in parts):
        return Sizes(tuple(item for part in parts if part is not None for item in part))
    return build.call(aten.cat.default, [build.tensor(value) for value in node.inputs], node.attributes["axis"])


@operators.add("Split")
def _split(build: GraphBuilder, node: OnnxNode) -> tuple[Value, ...]:
    x, axis, count = build.tensor(node.inputs[0]), node.attributes.get("axis", 0), len(node.outputs)
    if node.input(1) is not None:
        chunks = build.call(aten.split_with_sizes.default, x, build.needed_sizes(node, 1), axis)
    else:
        chunks = build.call(aten.tensor_split.sections, x, node.attributes.get("num_outputs", count), axis)
    return tuple(build.call(operator.getitem, chunks, index) for index in range(count))


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
        raise node.error("the rank of its input is unknown; export the model again")
    before = dict(zip(axes, pads[: len(axes)], strict=True))
    after = dict(zip(axes, pads[len(axes) :], strict=True))
    # torch lists pads from the last axis to the first.
    order: list[Any] = [size for axis in reversed(range(rank)) for size in (before.get(axis, 0), after.get(axis, 0))]
    while len(order) > 2 and order[-2:] == [0, 0]:
        order = order[:-2]
    x = build.tensor(node.inputs[0])
    if mode != "constant":
        names = {"reflect": aten.pad.default, "edge": aten.pad.default}
        if mode not in names:
            raise node.error(f"the mode {mode!r} is not supported")
        return build.call(names[mode], x, order, "replicate" if mode == "edge" else mode)
    value = build.constant_number(node, 2, 0.0)
    return build.call(aten.constant_pad_nd.default, x, order, value)


@operators.add("DepthToSpace")
def _depth_to_space(build: GraphBuilder, node: OnnxNode) -> Value:
    if node.attributes.get("mode", "DCR") != "CRD":
        raise node.error("only the mode CRD is supported")
    return build.call(aten.pixel_shuffle.default, build.tensor(node.inputs[0]), node.attributes["blocksize"])


@operators.add("Shape")
def _shape(build: GraphBuilder, node: OnnxNode) -> Value:
    if isinstance(node.inputs[0], Sizes):
        return Constant(
            node.outputs[0], np.array([] if node.inputs[0].is_scalar else [len(node.inputs[0].items)], "int64")
        )
    shape = node.inputs[0].array.shape if isinstance(node.inputs[0], Constant) else node.shapes[0]
    if shape is None:
        raise node.error("the rank of its input is unknown; export the model again")
    x = None if isinstance(node.inputs[0], Constant) else build.tensor(node.inputs[0])
    axes = range(len(shape))[node.attributes.get("start", 0) : node.attributes.get("end", len(shape))]
    return Sizes(
        tuple(shape[axis] if shape[axis] is not None else build.call(aten.sym_size.int, x, axis) for axis in axes)
    )


@operators.add("Constant")
def _constant(build: GraphBuilder, node: OnnxNode) -> Value:
    for name, dtype in (("value_int", "int64"), ("value_ints", "int64"), ("value_float", "float32")):
        if name in node.attributes:
            return Constant(node.outputs[0], np.asarray(node.attributes[name], dtype))
    if "value" not in node.attributes:
        raise node.error(f"a constant with the attribute {', '.join(node.attributes)} is not supported")
    return Constant(node.outputs[0], np.asarray(node.attributes["value"]))


@operators.add("ConstantOfShape")
def _constant_of_shape(build: GraphBuilder, node: OnnxNode) -> Value:
    value = as_tensor(node.attributes["value"]) if "value" in node.attributes else torch.zeros(1)
    return build.call(aten.full.default, build.needed_sizes(node, 0), value.item(), dtype=value.dtype)


@operators.add("Expand")
def _expand(build: GraphBuilder, node: OnnxNode) -> Value:
    sizes = build.needed_sizes(node, 1)
    rank = node.ranks[0]
    if rank is not None and rank > len(sizes):
        sizes = [1] * (rank - len(sizes)) + sizes
    x = build.tensor(node.inputs[0])
    if 1 not in sizes:
        return build.call(aten.expand.default, x, sizes)
    # A size of 1 keeps the axis in ONNX; torch requires -1 for that.
    expanded = [-1 if size == 1 and index >= len(sizes) - (rank or 0) else size for index, size in enumerate(sizes)]
    return build.call(aten.expand.default, x, expanded)


@operators.add("Size")
def _size(build: GraphBuilder, node: OnnxNode) -> Value:
    if isinstance(node.inputs[0], Sizes):
        return Constant(node.outputs[0], np.array(len(node.inputs[0].items)))
    return Sizes((build.call(aten.sym_numel.default, build.tensor(node.inputs[0])),), is_scalar=True)


@operators.add("Gather")
def _gather(build: GraphBuilder, node: OnnxNode) -> Value:
    x, known_indices = node.inputs[0], build.sizes(node.inputs[1])
    axis = node.attributes.get("axis", 0)
    constant = isinstance(node.inputs[1], Constant)
    if isinstance(x, Sizes) and constant and known_indices is not None:
        scalar_index = isinstance(node.inputs[1], Constant) and node.inputs[1].array.ndim == 0
        return Sizes(tuple(x.items[index] for index in known_indices), scalar_index)
    data = build.tensor(x)
    if isinstance(node.inputs[1], Constant) and node.inputs[1].array.ndim == 0:
        return build.call(aten.select.int, data, axis, int(node.inputs[1].array))
    indices = build.tensor(node.inputs[1])
    if axis == 0 and node.ranks[0] == 2 and not _has_negative(node.inputs[1]):
        return build.call(aten.embedding.default, data, indices)
    if axis < 0:
        if node.ranks[0] is None:
            raise node.error("the rank of its input is unknown; export the model again")
        axis += node.ranks[0]
    return build.call(aten.index.Tensor, data, [None] * axis + [indices])


@operators.add("GatherElements")
def _gather_elements(build: GraphBuilder, node: OnnxNode) -> Value:
    axis = node.attributes.get("axis", 0)
    data = build.tensor(node.inputs[0])
    return build.call(aten.gather.default, data, axis, _non_negative(build, node, data, axis))


def _has_negative(indices: Value | None) -> bool:
    return isinstance(indices, Constant) and bool((indices.array < 0).any())


def _non_negative(build: GraphBuilder, node: OnnxNode, data: Any, axis: int) -> Any:
    """Return indices without negative ones, which ONNX allows and torch kernels refuse."""
    x = node.inputs[1]
    indices = build.tensor(x)
    if isinstance(x, Constant) and not _has_negative(x):
        return indices
    below = build.call(aten.lt.Tensor, indices, build.buffer("zero", torch.tensor(0)))
    size = build.call(aten.sym_size.int, data, axis)
    return build.call(aten.where.self, below, build.call(aten.add.Scalar, indices, size), indices)


@operators.add("GatherND")
def _gather_nd(build: GraphBuilder, node: OnnxNode) -> Value:
    if node.attributes.get("batch_dims", 0):
        raise node.error("batch_dims other than 0 are not supported")
    data, indices = build.tensor(node.inputs[0]), build.tensor(node.inputs[1])
    return build.call(aten.index.Tensor, data, _axis_indices(build, node, indices))


def _axis_indices(build: GraphBuilder, node: OnnxNode, indices: Any) -> list[Any]:
    """Return one index tensor per axis from a table of indices; its last axis holds the coordinates of an element."""
    count = _last_size(node)
    if count is None:
        raise node.error("the length of its indices is unknown; export the model again")
    return [build.call(aten.select.int, indices, -1, place) for place in range(count)]


def _last_size(node: OnnxNode) -> int | None:
    """Return the size of the last axis of the indices: the number of indexed axes of the data; None if unknown."""
    value, shape = node.inputs[1], node.shapes[1]
    if isinstance(value, Constant):
        return int(value.array.shape[-1])
    if shape and isinstance(shape[-1], int):
        return shape[-1]
    if isinstance(value, torch.fx.Node) and value.target is aten.cat.default:
        # The exporter concatenates indices of one axis each.
        parts = value.args[0]
        return len(parts) if isinstance(parts, list | tuple) else None
    if isinstance(value, torch.fx.Node) and value.target is aten.unsqueeze.default and value.args[1] == -1:
        return 1  # the exporter writes a slice assignment with indices of the first axis
    return None


_REDUCTIONS = {"add": "sum", "mul": "prod", "min": "amin", "max": "amax"}
"""torch names of scatter reductions."""


@operators.add("ScatterND")
def _scatter_nd(build: GraphBuilder, node: OnnxNode) -> Value:
    reduction = node.attributes.get("reduction", "none")
    if reduction not in ("none", "add"):
        raise node.error(f"the reduction {reduction!r} is not supported; use 'none' or 'add'")
    data, indices, updates = (build.tensor(value) for value in node.inputs[:3])
    picks = _axis_indices(build, node, indices)
    return build.call(aten.index_put.default, data, picks, updates, reduction == "add")


@operators.add("ScatterElements")
def _scatter_elements(build: GraphBuilder, node: OnnxNode) -> Value:
    data, updates = build.tensor(node.inputs[0]), build.tensor(node.inputs[2])
    axis, reduction = node.attributes.get("axis", 0), node.attributes.get("reduction", "none")
    indices = _non_negative(build, node, data, axis)
    if reduction == "none":
        return build.call(aten.scatter.src, data, axis, indices, updates)
    if reduction not in _REDUCTIONS:
        raise node.error(f"the reduction {reduction!r} is not supported; use 'none', 'add', 'mul', 'min' or 'max'")
    return build.call(aten.scatter_reduce.two, data, axis, indices, updates, _REDUCTIONS[reduction])


@operators.add("Slice")
def _slice(build: GraphBuilder, node: OnnxNode) -> Value:
    starts, ends = build.needed_sizes(node, 1), build.needed_sizes(node, 2)
    axes = list(range(len(starts))) if node.input(3) is None else build.needed_sizes(node, 3)
    steps = [1] * len(starts) if node.input(4) is None else build.needed_sizes(node, 4)
    x = node.inputs[0]
    if isinstance(x, Sizes) and all(isinstance(item, int) for item in (*starts, *ends, *steps)):
        return Sizes(x.items[starts[0] : ends[0] : steps[0]])
    result = build.tensor(x)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if isinstance(step, int) and step < 0:
            if step != -1 or not _is_whole(start, end):
                raise node.error(f"the step {step} is not supported; negative steps must be -1 over a complete axis")
            result = build.call(aten.flip.default, result, [axis])
            continue
        result = build.call(aten.slice.Tensor, result, axis, start, end, step)
    return result


def _is_whole(start: Any, end: Any) -> bool:
    """Return whether a reverse slice covers a complete axis of any length."""
    return isinstance(start, int) and isinstance(end, int) and (start == -1 or start >= _OPEN_END) and end <= -_OPEN_END


_OPEN_END = 2**31 - 1
"""Lower bound of the numbers that exporters write for an open end."""


@operators.add("Range")
def _range(build: GraphBuilder, node: OnnxNode) -> Value:
    bounds = [build.sizes(value) for value in node.inputs]
    if any(bound is None for bound in bounds):
        raise node.error("its bounds are computed from data; expected constants or sizes")
    start, end, step = (bound[0] for bound in bounds if bound is not None)
    return build.call(aten.arange.start_step, start, end, step)


@operators.add("OneHot")
def _one_hot(build: GraphBuilder, node: OnnxNode) -> Value:
    depth = build.needed_sizes(node, 1)[0]
    off_on = build.tensor(node.inputs[2])
    if node.attributes.get("axis", -1) != -1:
        raise node.error("an axis other than the last is not supported")
    indices = build.call(aten.unsqueeze.default, build.tensor(node.inputs[0]), -1)
    classes = build.call(aten.arange.default, depth)
    # Negative indices count from the end.
    from_end = build.call(aten.add.Scalar, indices, depth)
    hits = build.call(
        aten.logical_or.default,
        build.call(aten.eq.Tensor, indices, classes),
        build.call(aten.eq.Tensor, from_end, classes),
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
    values_indices = build.call(
        aten.topk.default,
        build.tensor(node.inputs[0]),
        build.needed_sizes(node, 1)[0],
        node.attributes.get("axis", -1),
        bool(node.attributes.get("largest", 1)),
        bool(node.attributes.get("sorted", 1)),
    )
    return build.call(operator.getitem, values_indices, 0), build.call(operator.getitem, values_indices, 1)


_HALVES = ("half_pixel", "pytorch_half_pixel")
_KERNELS = {
    "linear": {
        3: aten.upsample_linear1d.vec,
        4: aten.upsample_bilinear2d.vec,
        5: aten.upsample_trilinear3d.vec,
    },
    "cubic": {4: aten.upsample_bicubic2d.vec},
    "nearest": {3: aten.upsample_nearest1d.vec, 4: aten.upsample_nearest2d.vec, 5: aten.upsample_nearest3d.vec},
}


@operators.add("Resize")
def _resize(build: GraphBuilder, node: OnnxNode) -> Value:
    mode, rank = node.attributes.get("mode", "nearest"), node.ranks[0]
    kernel = None if rank is None else _KERNELS.get(mode, {}).get(rank)
    if kernel is None or node.attributes.get("axes") or node.attributes.get("antialias", 0):
        raise node.error(f"torch cannot resize a tensor with {rank} axes in mode {mode!r} with these attributes")
    size, scales = _extent(build, node)
    x = build.tensor(node.inputs[0])
    transformation = node.attributes.get("coordinate_transformation_mode", "half_pixel")
    if mode == "nearest":
        if transformation != "asymmetric" or node.attributes.get("nearest_mode", "round_prefer_floor") != "floor":
            raise node.error("mode 'nearest' is only supported with 'asymmetric' coordinates and rounding 'floor'")
        return build.call(kernel, x, size, scales)
    if transformation not in (*_HALVES, "align_corners"):
        raise node.error(f"the coordinate mode {transformation!r} is not supported")
    if mode == "cubic" and node.attributes.get("cubic_coeff_a", -0.75) != -0.75:
        raise node.error("mode 'cubic' is only supported with the coefficient -0.75")
    return build.call(kernel, x, size, transformation == "align_corners", scales)


def _extent(build: GraphBuilder, node: OnnxNode) -> tuple[list[Any] | None, list[float] | None]:
    """Return the sizes, or else the scales, of the axes after the first two."""
    scales = node.input(2)
    if isinstance(scales, Constant) and scales.array.size:
        return None, [float(scale) for scale in scales.array[2:]]
    return build.needed_sizes(node, 3)[2:], None
