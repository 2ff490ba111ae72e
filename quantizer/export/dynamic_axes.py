"""Dynamic axes of the inputs in the file: by convention, or from the caller."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantizer.common.decoder_cache import CACHE
from quantizer.common.decoder_cache import PAST
from quantizer.common.decoder_cache import TOTAL
from quantizer.errors import ExportError

__all__ = ["Axes", "asked_axes", "check_dynamic", "dynamic_shapes", "hint", "usual_axes"]

logger = logging.getLogger(__name__)

Axes = Mapping[str, Mapping[int, str]]
"""Input name to {axis: dimension name}."""

_CACHE_AXIS = 2
_SHORTEST = 2
"""The least sequence: what torch.export sees of an axis of length 1 holds for that length alone."""

_OTHERWISE = "dynamic_axes= says otherwise"
_OF_SHAPES = ("ConstraintViolationError", "UserError")


def usual_axes(inputs: Mapping[str, Any]) -> Axes:
    """Return the dynamic axes by convention: axis 0 is ``batch``, axis 1 of integer inputs ``sequence``.

    After a first input of floats an integer one that is as long is its mask, and has a fixed axis 1 as it has.

    The batch is the length of the first input's axis 0. An axis 0 of another length is fixed, and so is every axis of
    length 1, which may be there to be broadcast, except a batch of one row. An encoder and its decoder have separate
    sequences: inputs of one length in the example share a dimension. Axis 2 of ``past_key_values...``, a decoder's
    cache, is ``past_sequence``, and the length of that and of what is read is ``total_sequence``.
    """
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.dim() > 0}
    rows = {name: value.shape[0] for name, value in tensors.items()}
    first = next(iter(tensors.values()), None)
    batch = 1 if first is None else first.shape[0]
    masked = first.shape[1:2] if first is not None and first.is_floating_point() else ()
    lengths: dict[int, str] = {}
    found: dict[str, dict[int, str]] = {}
    cached = {name: value.shape[_CACHE_AXIS] for name, value in tensors.items() if name.startswith(CACHE)}
    for name, value in tensors.items():
        found[name] = {0: "batch"} if rows[name] == batch else {}
        if rows[name] not in (1, batch):
            logger.warning(
                "export: axis 0 of %r is fixed at %d, as the batch of the example is %d; %s",
                name,
                rows[name],
                batch,
                _OTHERWISE,
            )
        if name in cached:
            found[name][_CACHE_AXIS] = PAST
        if value.is_floating_point() or value.dim() == 1 or value.shape[1:2] == masked:
            continue
        if value.shape[1] < _SHORTEST:
            logger.warning(
                "export: axis 1 of %r is fixed at %d, as in the example; %s", name, value.shape[1], _OTHERWISE
            )
        else:
            other = TOTAL if cached else f"{name}_sequence"
            found[name][1] = lengths.setdefault(value.shape[1], other if lengths else "sequence")
    return found


def asked_axes(axes: Axes, inputs: Mapping[str, Any]) -> Axes:
    """Return the caller's own axes.

    Raises:
        ExportError: the example has no such input or axis, a name is none, or one dimension has two lengths.
    """
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


def dynamic_shapes(inputs: Mapping[str, Any], axes: Axes) -> dict[str, Any]:
    """Return the argument for ``torch.export``: one entry for each input."""
    dimensions: dict[str, Any] = {}

    def entry(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return None
        for axis, dimension in axes.get(name, {}).items():
            least = min(value.shape[axis], _SHORTEST)
            dimensions.setdefault(dimension, torch.export.Dim(dimension, min=1 if dimension == "batch" else least))
        return {axis: dimensions[dimension] for axis, dimension in axes.get(name, {}).items()}

    return {name: entry(name, value) for name, value in inputs.items()}


def check_dynamic(model: Any, inputs: Mapping[str, Any], axes: Axes, *, asked: bool) -> None:
    """Log the axes that are fixed in the graph all the same: torch fixes an axis if the model only works at one length.

    Raises:
        ExportError: the caller ``asked`` for one of them.
    """
    shapes = {value.name: value.shape for value in model.graph.inputs}
    for name, named in axes.items():
        shape = shapes.get(name)
        for axis, dimension in named.items():
            if shape is None or axis >= len(shape) or not isinstance(shape[axis], int):
                continue
            what = f"axis {axis} of {name!r} can only be {shape[axis]} in this model"
            if asked:
                raise ExportError(f"dynamic_axes: {what}, so it is not {dimension!r}; leave it out of dynamic_axes")
            logger.warning("export: %s, so it is fixed in the file", what)


def hint(error: BaseException) -> str:
    """Return advice on dynamic axes if an error of the exporter is about the lengths of axes; else an empty text."""
    while error.__cause__ is not None:
        error = error.__cause__
    if type(error).__name__ not in _OF_SHAPES:
        return ""
    return "; dynamic_axes= says which axes of the inputs are dynamic, {} that none is"
