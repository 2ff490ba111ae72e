"""Sizes of what is given as data: the one source of them.

Exports open these axes, engines are built, run and timed at these sizes, and outputs are compared at them. No size is
made up where there is data.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantizer.utils.dimension_names import CACHE, PAST, TOTAL

Axes = Mapping[str, Mapping[int, str]]
"""Input name to {axis: dimension name}."""

InputShapes = tuple[tuple[str, bool, tuple[int, ...]], ...]
"""The inputs of a call: the name of each, whether it holds floats, and its shape."""

_Column = tuple[int | None, ...]
"""The size of an axis in each batch."""

BATCH, SEQUENCE = "batch", "sequence"

_CACHE_AXIS = 2
_MATRIX, _MOST_OF_SEQUENCE = 2, 3
"""Ranks of token ids [B, S], and of what else may be a sequence: features [B, S, D]."""


@dataclass(frozen=True)
class DataSizes:
    """The open axes of a model's inputs, and the sizes of their dimensions.

    Attributes:
        axes: the open axes of each input. Axes of one dimension have one size in every batch.
        seen: the size of each dimension in each batch, in their order; the first one alone where a model fixes it.
    """

    axes: Axes
    seen: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, batches: Sequence[Mapping[str, Any]]) -> DataSizes:
        """Return the open axes and the sizes of batches of inputs by name; the first batch is the usual one.

        Axis 0 of the first input is ``batch``, and so is that of each input that is as long in every batch. Each other
        axis is open if its size varies; axes that vary together are one dimension. Of those that do not vary, axis 1 of
        a matrix of integers [B, S] is open too, as what has tokens takes any number of them, and what lies beside them:
        axis 1 of other integers that are as long, and a decoder's cache. After a first input of floats a matrix of
        integers that is as long is its mask, and its axis 1 is open where the other is.
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
                other = TOTAL if cached else f"{_plain(name)}_sequence"
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
                axes[name][axis] = named.setdefault(column, SEQUENCE if is_first else f"{_plain(name)}_axis{axis}")
        seen = {
            dimension: tuple(size for size in columns[name, axis] if size is not None)
            for name, opened in axes.items()
            for axis, dimension in opened.items()
        }
        return cls(axes, seen)

    @classmethod
    def of_shapes(cls, calls: Iterable[InputShapes]) -> DataSizes | None:
        """Return the open axes and the sizes of calls; None: there are none."""
        made = [
            {
                name: torch.empty(shape, dtype=torch.float32 if floats else torch.int64, device="meta")
                for name, floats, shape in call
            }
            for call in calls
        ]
        return cls.of(made) if made else None

    @property
    def usual(self) -> dict[str, int]:
        """The size of each dimension in the first batch."""
        return {dimension: sizes[0] for dimension, sizes in self.seen.items()}

    @property
    def ranges(self) -> dict[str, tuple[int, int, int]]:
        """The least, the usual and the largest size of each dimension in the data."""
        return {dimension: (min(sizes), sizes[0], max(sizes)) for dimension, sizes in self.seen.items()}

    def is_open(self, dimension: str) -> bool:
        """Return whether an axis of this dimension is open."""
        return any(dimension in opened.values() for opened in self.axes.values())

    def only(self, axes: Axes) -> DataSizes:
        """Return the sizes with those axes alone, as where a model fixes others at the size of the first batch."""
        left = {
            name: {axis: dimension for axis, dimension in opened.items() if axis in axes.get(name, {})}
            for name, opened in self.axes.items()
        }
        made = replace(self, axes=left)
        return replace(made, seen={name: had[: None if made.is_open(name) else 1] for name, had in self.seen.items()})

    def resized(self, batch: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Return a batch at other sizes of open dimensions: cut, or with its entries again and again."""
        made = dict(batch)
        for name, opened in self.axes.items():
            for axis, dimension in opened.items() if name in made else ():
                value, size = made[name], sizes.get(dimension)
                if size is not None and size != value.shape[axis]:
                    made[name] = value.index_select(axis, torch.arange(size) % value.shape[axis])
        return made


def input_shapes(forward: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> InputShapes:
    """Return the shapes of the tensors that a function is called with, by the names of its arguments."""
    names = [name for name in inspect.signature(forward).parameters if name not in keywords]
    given = {**dict(zip(names, args, strict=False)), **keywords}
    return tuple(
        (name, value.is_floating_point(), tuple(value.shape))
        for name, value in given.items()
        if isinstance(value, Tensor) and value.dim() > 0 and not value.is_nested
    )


def _token_inputs(inputs: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the names of matrices of integers, but of those that are masks of a first input of floats."""
    lead = next(iter(inputs.values()), None)
    length = lead.shape[1] if lead is not None and lead.is_floating_point() and lead.dim() >= _MATRIX else None
    for name, value in inputs.items():
        if value.dim() == _MATRIX and not value.is_floating_point() and value.shape[1] != length:
            yield name


def _size(value: Any, axis: int) -> int | None:
    return value.shape[axis] if isinstance(value, Tensor) and axis < value.dim() else None


def _plain(name: str) -> str:
    """Return a name of which the name of a dimension can be made: ``past.0.key`` is none in Python."""
    return re.sub(r"\W", "_", name)
