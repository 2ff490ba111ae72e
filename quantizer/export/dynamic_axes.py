"""Dynamic axes of the inputs in the file: by convention, or from the caller."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantizer.errors import ExportError
from quantizer.utils.sizes import BATCH, Axes, DataSizes

logger = logging.getLogger(__name__)

_SHORTEST = 2
"""The least sequence: what torch.export sees of an axis of length 1 holds for that length alone."""

_OTHERWISE = "dynamic_axes= says otherwise"
_OF_SHAPES = ("ConstraintViolationError", "UserError")


def usual_axes(inputs: Mapping[str, Any], told: DataSizes | None = None, data: DataSizes | None = None) -> DataSizes:
    """Return the open axes where the caller names none: those of the data, or by the example alone."""
    if told is not None and _fits(inputs, told.axes):
        return told
    sizes = data if data is not None and _fits(inputs, data.axes) else DataSizes.of([inputs])
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.dim() > 0}
    batch = next((value.shape[0] for value in tensors.values()), 1)
    for name, value in tensors.items():
        opened = sizes.axes.get(name, {})
        if 0 not in opened and value.shape[0] not in (1, batch):
            logger.warning(
                "export: axis 0 of %r is fixed at %d, as the batch of the example is %d; %s",
                name,
                value.shape[0],
                batch,
                _OTHERWISE,
            )
        if value.dim() == 2 and not value.is_floating_point() and 1 not in opened and value.shape[1] == 1:
            logger.warning("export: axis 1 of %r is fixed at 1, as in the example; %s", name, _OTHERWISE)
    return sizes


def _fits(inputs: Mapping[str, Any], axes: Axes) -> bool:
    """Return whether an example has the open axes of the data, and one size in each dimension."""
    shapes = {name: value.shape for name, value in inputs.items() if isinstance(value, Tensor) and value.dim() > 0}
    if shapes.keys() != axes.keys() or any(len(shapes[name]) <= axis for name in axes for axis in axes[name]):
        return False
    sizes = {(dimension, shapes[name][axis]) for name in axes for axis, dimension in axes[name].items()}
    return len(sizes) == len({dimension for dimension, _ in sizes})


def asked_axes(axes: Axes, inputs: Mapping[str, Any]) -> Axes:
    """Return the caller's own axes."""
    lengths: dict[str, tuple[str, int]] = {}
    for name, named in axes.items():
        if name not in inputs:
            raise ExportError(f"dynamic_axes names the input {name!r}; the example has: {', '.join(inputs)}")
        shape = inputs[name].shape if isinstance(inputs[name], Tensor) else ()
        for axis, dimension in named.items():
            if not 0 <= axis < len(shape):
                raise ExportError(f"dynamic_axes: {name!r} has no axis {axis}; expected 0 to {len(shape) - 1}")
            if not dimension.isidentifier():
                raise ExportError(f"dynamic_axes: {dimension!r} is no name of a dimension; expected one like 'batch'")
            place = f"axis {axis} of {name!r}"
            first, length = lengths.setdefault(dimension, (place, shape[axis]))
            if length != shape[axis]:
                raise ExportError(
                    f"dynamic_axes: {dimension!r} is {length} in the example at {first} and {shape[axis]} at {place}; "
                    "one dimension has one length: give them two names"
                )
    return axes


def widened(inputs: Mapping[str, Any], sizes: DataSizes) -> dict[str, Any]:
    """Return an example with no open axis of size 1 where the data has larger ones.

    torch takes what broadcasts at size 1 for a property of the model, and fixes the axis.
    """
    usual = {
        dimension: min(size for size in seen if size > 1)
        for dimension, seen in sizes.seen.items()
        if max(seen, default=1) > 1 and any(_is_one(inputs.get(name), axis) for name, axis in _places(sizes, dimension))
    }
    return sizes.resized(inputs, usual)


def _places(sizes: DataSizes, dimension: str) -> list[tuple[str, int]]:
    return [(name, axis) for name, opened in sizes.axes.items() for axis, word in opened.items() if word == dimension]


def _is_one(value: Any, axis: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > axis and value.shape[axis] == 1


def dynamic_shapes(inputs: Mapping[str, Any], sizes: DataSizes) -> dict[str, Any]:
    """Return the argument for ``torch.export``: one entry for each input."""
    axes = sizes.axes
    dimensions: dict[str, Any] = {}

    def entry(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return None
        for axis, dimension in axes.get(name, {}).items():
            least = min(value.shape[axis], _SHORTEST, *sizes.seen.get(dimension, ()))
            dimensions.setdefault(dimension, torch.export.Dim(dimension, min=1 if dimension == BATCH else least))
        return {axis: dimensions[dimension] for axis, dimension in axes.get(name, {}).items()}

    return {name: entry(name, value) for name, value in inputs.items()}


def check_dynamic(model: Any, axes: Axes, *, asked: bool, log: bool = True) -> None:
    """Log the axes that are fixed in the graph: torch fixes an axis if the model only works at one length."""
    shapes = {value.name: value.shape for value in model.graph.inputs}
    for name, named in axes.items():
        shape = shapes.get(name)
        for axis, dimension in named.items():
            if shape is None or axis >= len(shape) or not isinstance(shape[axis], int):
                continue
            what = f"axis {axis} of {name!r} can only be {shape[axis]} in this model"
            if asked:
                raise ExportError(f"dynamic_axes: {what}, so it is not {dimension!r}; leave it out of dynamic_axes")
            if log:
                logger.warning("export: %s, so it is fixed in the file", what)


def hint(error: BaseException) -> str:
    """Return advice on dynamic axes if an error of the exporter is about the lengths of axes; else an empty text."""
    while error.__cause__ is not None:
        error = error.__cause__
    if type(error).__name__ not in _OF_SHAPES:
        return ""
    return "; dynamic_axes= says which axes of the inputs are dynamic, {} that none is"
