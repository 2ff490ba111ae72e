"""Sizes of matrix multiplications: K, N, multiply-adds, and the axis of a weight's output channels.

Legend: [M, K] times [K, N]; a convolution is such a multiplication with input patches as rows. Shapes are plain
numbers, so that this file does not need torch.

``Labels`` are the labels in the equation of an ``einsum`` of two operands. Every axis of an operand has a label;
``...`` stands for all axes without their own label. A label of both operands is a batch label if it is in the output,
and contracted otherwise. A label of one operand and of the output indexes that operand's channels.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quantizer.plan.reasons import ReasonCode

Shape = Sequence[int]

_LINEAR = 2  # axes of a linear's weight; those of a convolution have more
_MATRIX = 2  # axes


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The shapes of one call: of its operands, in the catalogue's order, and of its result.

    Attributes:
        weight: the position of the operand that is a weight; None without one.
    """

    operands: tuple[Shape, ...]
    result: Shape
    weight: int | None = None
    equation: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The size of one call.

    Attributes:
        depth: K.
        width: N; with a weight its number of channels, on either side.
        axis: the axis of the weight's channels; None without one.
        inner: the axis of the weight that is contracted with the last axis of the other operand; None without one.
        rows: M; 0: it includes the batch, and so may be any number.
        head: the head size of a complete attention; 0 for other calls.
        sequence: the longest sequence of a complete attention; 0 for other calls.
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
        """Return the head size and the longest sequence, for a matrix multiplication of an attention."""
        if self.head:
            return self.head, self.sequence
        if probabilities is None:
            return self.depth, max(self.rows, self.width)
        return (
            (self.width, max(self.rows, self.depth)) if probabilities == 0 else (self.rows, max(self.depth, self.width))
        )


GeometryOf = Callable[[Call], Geometry]


def weighted(call: Call) -> Geometry:
    """Return the size of a linear or a convolution, with the weight [N, ...] and K = product of its other axes."""
    weight = call.operands[1]
    depth = math.prod(weight[1:])
    inner = 1 if len(weight) == _LINEAR else None
    multiply_adds = math.prod(call.result) * depth
    rows = int(len(call.operands[0]) == 1)
    return Geometry(depth=depth, width=weight[0], multiply_adds=multiply_adds, axis=0, inner=inner, rows=rows)


def recurrent(call: Call) -> Geometry:
    """Return the size of a linear of a recurrence, whose inputs cannot have smoothing factors."""
    return replace(weighted(call), inner=None)


def transposed(call: Call) -> Geometry:
    """Return the size of a transposed convolution, with the weight [channels in, channels out / groups, ...].

    With groups, an index of axis 1 belongs to one output channel of each group. If each group has one input channel
    (depthwise), axis 0 counts the groups, and each output channel depends on one of its indices. In all other grouped
    cases no axis separates the output channels, so the scale is per tensor.
    """
    source, weight = call.operands
    width = call.result[len(call.result) - len(weight) + 1]
    per_input = math.prod(weight[1:])
    depth = weight[0] * per_input // width
    groups = width // weight[1]
    axis = 1 if groups == 1 else 0 if groups == weight[0] else None
    return Geometry(depth=depth, width=width, multiply_adds=math.prod(source) * per_input, axis=axis)


def product(call: Call) -> Geometry:
    """Return the size of a matrix multiplication, batched or not.

    A vector has no channels, and ``addbmm`` sums over batches.
    """
    first, second = call.operands
    rows, columns = (first[-2] if len(first) > 1 else 1), (second[-1] if len(second) > 1 else 1)
    depth = first[-1]
    # Axes before the matrix are a batch; with a weight they are rows.
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


def grouped(call: Call) -> Geometry:
    """Return the size of [S, K] by [E, K, N], where each row is multiplied by the matrix of its expert."""
    rows, experts = call.operands
    weighted_last = len(rows) == _MATRIX and len(experts) == _MATRIX + 1 and call.weight == 1
    return Geometry(
        depth=rows[-1],
        width=experts[-1],
        multiply_adds=math.prod(rows) * experts[-1],
        axis=_MATRIX if weighted_last else None,
        inner=1 if weighted_last else None,
    )


def einsum(call: Call) -> Geometry:
    """Return the size of an einsum: K of the contracted labels, N of the channels of the weight or second operand."""
    equation_labels = labels(call.equation, [len(shape) for shape in call.operands])
    sizes = equation_labels.sizes(call.operands)
    of = 1 if call.weight is None else call.weight
    return Geometry(
        depth=volume(sizes, equation_labels.contracted),
        width=volume(sizes, equation_labels.channels(of)),
        multiply_adds=volume(sizes, set(sizes)),
        axis=None if call.weight is None else equation_labels.channel_axis(call.weight, call.operands[call.weight]),
        rows=volume(sizes, equation_labels.channels(0)) if call.weight is None else 0,
    )


def attention(call: Call) -> Geometry:
    """Return the smaller K and N of query [.., L, E] by key [.., S, E] and of the result by value [.., S, V]."""
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
    """Return the size of an embedding: no multiply-adds, and one scale per row of the table."""
    return Geometry(depth=0, width=0, multiply_adds=0, axis=0)


def _broadcast(first: Shape, second: Shape) -> list[int]:
    longest = max(len(first), len(second))
    padded = ([1] * (longest - len(shape)) + list(shape) for shape in (first, second))
    return [max(pair) for pair in zip(*padded, strict=True)]


_DOTS = "..."


@dataclass(frozen=True, kw_only=True, slots=True)
class Labels:
    """The labels of the operands' axes and of the output; ``...`` is replaced by one label for each of its axes."""

    operands: tuple[tuple[str, ...], tuple[str, ...]]
    output: frozenset[str]

    def sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Return the length of each label, after broadcasting of axes of length 1."""
        lengths: dict[str, int] = {}
        for names, shape in zip(self.operands, shapes, strict=True):
            for name, size in zip(names, shape, strict=True):
                lengths[name] = max(lengths.get(name, 1), size)
        return lengths

    def channels(self, operand: int) -> frozenset[str]:
        """Return the labels of this operand and of the output that the other operand does not have."""
        return frozenset(self.operands[operand]) & self.output - frozenset(self.operands[1 - operand])

    @property
    def contracted(self) -> frozenset[str]:
        return frozenset(self.operands[0] + self.operands[1]) - self.output

    def channel_axis(self, operand: int, shape: Sequence[int]) -> int | None:
        """Return the axis of an operand's longest channel label, the first of several; None without channels."""
        own = self.channels(operand)
        axes = [axis for axis, name in enumerate(self.operands[operand]) if name in own]
        return max(axes, key=lambda axis: shape[axis], default=None)


def problem(node: ast.Call, equation: str) -> str | None:
    """Return why the channels of a call in the source cannot be determined; None if they can."""
    if any(isinstance(argument, ast.Starred) for argument in node.args):
        return ReasonCode.EINSUM_STARRED.text()
    if not equation:
        return ReasonCode.EINSUM_UNSPELLED.text()
    inputs = equation.replace(" ", "").partition("->")[0].split(",")
    if len(inputs) != 2:
        if len(inputs) == 1:
            return ReasonCode.EINSUM_OF_ONE.text()
        return ReasonCode.EINSUM_OF_MANY.text(count=len(inputs))
    for names in inputs:
        single = names.replace(_DOTS, "")
        if len(set(single)) < len(single):
            return ReasonCode.EINSUM_TWICE.text()
    return None


def labels(equation: str, dimensions: Sequence[int]) -> Labels:
    """Return the labels of an equation without ``problem``, for operands with these numbers of axes."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    first, second = inputs.split(",")
    names = (_expanded(first, dimensions[0]), _expanded(second, dimensions[1]))
    dots = {name for name in names[0] + names[1] if name.startswith(_DOTS)}
    if not arrow:
        single = (first + second).replace(".", "")
        return Labels(operands=names, output=frozenset(dots | {name for name in single if single.count(name) == 1}))
    explicit = frozenset(output.replace(_DOTS, ""))
    return Labels(operands=names, output=explicit | dots if _DOTS in output else explicit)


def _expanded(names: str, dimensions: int) -> tuple[str, ...]:
    before, dots, after = names.partition(_DOTS)
    count = dimensions - len(before) - len(after) if dots else 0
    # Numbered from the right, because broadcasting aligns the last axes.
    return (*before, *(f"{_DOTS}{place}" for place in range(count, 0, -1)), *after)


def volume(sizes: dict[str, int], names: frozenset[str] | set[str]) -> int:
    """Return the product of the lengths of some labels."""
    return math.prod(sizes[name] for name in names)
