"""Sizes of model inputs, taken from the data.

Exports make these axes dynamic, and engines are built, run and timed at these sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantizer.utils.dimension_names import CACHE, PAST, TOTAL
from quantizer.utils.signatures import signature_of

Axes = Mapping[str, Mapping[int, str]]
"""Input name to {axis: dimension name}."""

InputShapes = tuple[tuple[str, bool, tuple[int, ...]], ...]
"""The inputs of a call: name, whether it is floating-point, and shape."""

_Column = tuple[int | None, ...]
"""The size of an axis in each batch."""

BATCH, SEQUENCE = "batch", "sequence"

_CACHE_AXIS = 2
_MATRIX, _MOST_OF_SEQUENCE = 2, 3
"""Ranks of token ids [B, S] and of features [B, S, D]."""


@dataclass(frozen=True)
class DataSizes:
    """Dynamic axes of a model's inputs, and the sizes of their dimensions.

    Attributes:
        axes: the dynamic axes of each input. Axes of one dimension have the same size in every batch.
        seen: the size of each dimension in each batch, in order; only the first if the model fixes it.
    """

    axes: Axes
    seen: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, batches: Sequence[Mapping[str, Any]]) -> DataSizes:
        """Return the dynamic axes and the sizes of batches of inputs by name; the first batch is the usual one.

        An axis is dynamic in these cases:

        - Axis 0 of the first input, and of each input with the same length in every batch, is ``batch``.
        - An axis whose size varies. Axes that vary together are one dimension.
        - Axis 1 of an integer matrix [B, S], because tokens come in any number, and axes of the same length: axis 1 of
          other integers, and the cache of a decoder.

        If the first input is floating-point, an integer matrix of its length is its mask: its axis 1 is dynamic only if
        the other is.
        """
        first = {name: value for name, value in batches[0].items() if isinstance(value, Tensor) and value.dim() > 0}
        columns = {
            (name, axis): tuple(_size(batch.get(name), axis) for batch in batches)
            for name, value in first.items()
            for axis in range(value.dim())
        }
        rows = next(iter(columns.values()), ())
        cached = any(name.startswith(CACHE) for name in first)
        named = {rows: BATCH} if len(set(rows)) > 1 else {}
        tokens: dict[_Column, str] = {}
        for name in _token_inputs(first):
            column = columns[name, 1]
            if columns[name, 0] == rows and column not in named and (len(set(column)) > 1 or column[0] != 1):
                other = TOTAL if cached else f"{_as_identifier(name)}_sequence"
                tokens.setdefault(column, other if tokens else SEQUENCE)
        axes: dict[str, dict[int, str]] = {name: {} for name in first}
        for (name, axis), column in columns.items():
            value, varies = first[name], len(set(column)) > 1
            if axis == 0 and column == rows:
                axes[name][axis] = BATCH
            elif axis == _CACHE_AXIS and name.startswith(CACHE):
                axes[name][axis] = PAST
            elif column in tokens and (varies or (axis == 1 and not value.is_floating_point())):
                axes[name][axis] = tokens[column]
            elif varies:
                inside = axis == 1 and value.dim() in (_MATRIX, _MOST_OF_SEQUENCE) and columns[name, 0] == rows
                is_first = inside and SEQUENCE not in (*named.values(), *tokens.values())
                axes[name][axis] = named.setdefault(
                    column, SEQUENCE if is_first else f"{_as_identifier(name)}_axis{axis}"
                )
        seen = {
            dimension: tuple(size for size in columns[name, axis] if size is not None)
            for name, opened in axes.items()
            for axis, dimension in opened.items()
        }
        return cls(axes, seen)

    @classmethod
    def of_shapes(cls, calls: Iterable[InputShapes]) -> DataSizes | None:
        """Return the dynamic axes and the sizes of calls; None without calls."""
        batches = [
            {
                name: torch.empty(shape, dtype=torch.float32 if floats else torch.int64, device="meta")
                for name, floats, shape in call
            }
            for call in calls
        ]
        return cls.of(batches) if batches else None

    @property
    def usual(self) -> dict[str, int]:
        """The size of each dimension in the first batch."""
        return {dimension: sizes[0] for dimension, sizes in self.seen.items()}

    @property
    def ranges(self) -> dict[str, tuple[int, int, int]]:
        """The smallest, usual and largest size of each dimension in the data."""
        return {dimension: (min(sizes), sizes[0], max(sizes)) for dimension, sizes in self.seen.items()}

    def is_open(self, dimension: str) -> bool:
        return any(dimension in opened.values() for opened in self.axes.values())

    def only(self, axes: Axes) -> DataSizes:
        """Return the sizes with only these dynamic axes; the model fixes others at the size of the first batch."""
        remaining = {
            name: {axis: dimension for axis, dimension in opened.items() if axis in axes.get(name, {})}
            for name, opened in self.axes.items()
        }
        reduced = replace(self, axes=remaining)
        return replace(
            reduced, seen={name: sizes[: None if reduced.is_open(name) else 1] for name, sizes in self.seen.items()}
        )

    def resized(self, batch: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Return a batch with other sizes of dynamic dimensions: entries are cut off or repeated."""
        resized = dict(batch)
        for name, opened in self.axes.items():
            for axis, dimension in opened.items() if name in resized else ():
                value, size = resized[name], sizes.get(dimension)
                if size is not None and size != value.shape[axis]:
                    resized[name] = value.index_select(axis, torch.arange(size) % value.shape[axis])
        return resized


def input_shapes(forward: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> InputShapes:
    """Return the shapes of the tensors that a function is called with, by the names of its arguments."""
    names = [name for name in signature_of(forward).parameters if name not in keywords]
    inputs = {**dict(zip(names, args, strict=False)), **keywords}
    return tuple(
        (name, value.is_floating_point(), tuple(value.shape))
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.dim() > 0 and not value.is_nested
    )


def _token_inputs(inputs: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the names of integer matrices, without masks of a floating-point first input."""
    lead = next(iter(inputs.values()), None)
    length = lead.shape[1] if lead is not None and lead.is_floating_point() and lead.dim() >= _MATRIX else None
    for name, value in inputs.items():
        if value.dim() == _MATRIX and not value.is_floating_point() and value.shape[1] != length:
            yield name


def _size(value: Any, axis: int) -> int | None:
    return value.shape[axis] if isinstance(value, Tensor) and axis < value.dim() else None


def _as_identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)
