"""The size of a product: its K and N, its multiply-adds, and the axis of a weight's output channels.

Legend: a product of [M, K] and [K, N]; a convolution is one too, with its input patches as rows. Shapes are plain
numbers: nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass

from quantizer.operations.einsum import labels
from quantizer.operations.einsum import volume

__all__ = ["Call", "Geometry", "GeometryOf", "attention", "einsum", "lookup", "product", "transposed", "weighted"]

Shape = Sequence[int]

_LINEAR = 2  # axes of a linear's weight; those of a convolution have more


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call: the shapes of the operands that it was given, in the catalogue's order, and of its result.

    ``weight`` is the place of the operand that is a weight (None: none is); ``equation`` that of an einsum.
    """

    operands: tuple[Shape, ...]
    result: Shape
    weight: int | None = None
    equation: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """``depth`` K, ``width`` N, ``multiply_adds`` of the call, ``axis`` of the weight's channels (None: it has none).

    ``inner`` is the axis of the weight that the last axis of the other operand is summed with (None: another axis is).
    N of a product with a weight are the weight's channels, whichever side it stands on. ``rows`` is M (0: a batch
    counts in it, so it may be any number). ``head`` and ``sequence`` are what the call says of them where it is a whole
    attention (0: it is none).
    """

    depth: int
    width: int
    multiply_adds: int
    axis: int | None = None
    inner: int | None = None
    rows: int = 0
    head: int = 0
    sequence: int = 0

    def attention(self, probabilities: int | None) -> tuple[int, int]:
        """Head size and longest sequence of a product of an attention.

        Args:
            probabilities: the place of the operand that a softmax gave; None: it is scores that the product gives.
        """
        if self.head:
            return self.head, self.sequence
        if probabilities is None:
            return self.depth, max(self.rows, self.width)
        return (
            (self.width, max(self.rows, self.depth)) if probabilities == 0 else (self.rows, max(self.depth, self.width))
        )


GeometryOf = Callable[[Call], Geometry]


def weighted(call: Call) -> Geometry:
    """Return the size of a linear or a convolution: the weight is [N, ...] and all its other axes are K."""
    weight = call.operands[1]
    depth = math.prod(weight[1:])
    inner = 1 if len(weight) == _LINEAR else None
    multiply_adds = math.prod(call.result) * depth
    rows = int(len(call.operands[0]) == 1)
    return Geometry(depth=depth, width=weight[0], multiply_adds=multiply_adds, axis=0, inner=inner, rows=rows)


def transposed(call: Call) -> Geometry:
    """Return the size of a transposed convolution: its weight is [channels in, channels out / groups, ...].

    With groups, axis 1 holds channels of all groups at once. Where each group has one input channel (depthwise), axis 0
    counts the groups, and all that a channel out is made of stands in one row of it. Elsewhere no axis is the channels'
    own: per tensor.
    """
    source, weight = call.operands
    width = call.result[len(call.result) - len(weight) + 1]
    per_input = math.prod(weight[1:])
    depth = weight[0] * per_input // width
    groups = width // weight[1]
    axis = 1 if groups == 1 else 0 if groups == weight[0] else None
    return Geometry(depth=depth, width=width, multiply_adds=math.prod(source) * per_input, axis=axis)


def product(call: Call) -> Geometry:
    """Return the size of a matrix product, batched or not; a vector has no channels, ``addbmm`` sums its batches."""
    first, second = call.operands
    rows, columns = (first[-2] if len(first) > 1 else 1), (second[-1] if len(second) > 1 else 1)
    depth = first[-1]
    # Axes before the matrix are the batch's own; of a product by a weight they are rows.
    unbatched = call.weight is None or len(call.operands[1 - call.weight]) == 1
    batches = math.prod(_broadcast(first[:-2], second[:-2]))
    axis, inner, width = None, None, columns
    if call.weight == 0:
        axis, width = (len(first) - 2 if len(first) > 1 else None), rows
    elif call.weight == 1:
        axis = len(second) - 1 if len(second) > 1 else None
        inner = max(len(second) - 2, 0)
    multiply_adds = batches * rows * depth * columns
    return Geometry(
        depth=depth, width=width, multiply_adds=multiply_adds, axis=axis, inner=inner, rows=rows if unbatched else 0
    )


def einsum(call: Call) -> Geometry:
    """Return the size of an einsum: K are the labels summed over, N the second operand's own (or the weight's)."""
    found = labels(call.equation, [len(shape) for shape in call.operands])
    sizes = found.sizes(call.operands)
    of = 1 if call.weight is None else call.weight
    return Geometry(
        depth=volume(sizes, found.contracted),
        width=volume(sizes, found.channels(of)),
        multiply_adds=volume(sizes, set(sizes)),
        axis=None if call.weight is None else found.channel_axis(call.weight, call.operands[call.weight]),
        rows=volume(sizes, found.channels(0)) if call.weight is None else 0,
    )


def attention(call: Call) -> Geometry:
    """Query [.., L, E] by key [.., S, E], then probabilities [.., L, S] by value [.., S, V]: the lesser K and N."""
    query, key, value = call.operands
    depth, width = min(query[-1], key[-2]), min(key[-2], value[-1])
    multiply_adds = math.prod(call.result[:-1]) * key[-2] * (query[-1] + value[-1])
    return Geometry(
        depth=depth,
        width=width,
        multiply_adds=multiply_adds,
        rows=query[-2],
        head=max(query[-1], value[-1]),
        sequence=max(query[-2], key[-2]),
    )


def lookup(call: Call) -> Geometry:
    """Return the size of an embedding: it computes nothing, and each row of its table has a scale."""
    return Geometry(depth=0, width=0, multiply_adds=0, axis=0)


def _broadcast(first: Shape, second: Shape) -> list[int]:
    longest = max(len(first), len(second))
    padded = ([1] * (longest - len(shape)) + list(shape) for shape in (first, second))
    return [max(pair) for pair in zip(*padded, strict=True)]
