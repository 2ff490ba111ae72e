"""The labels in the equation of an ``einsum`` of two operands.

Legend: every axis of an operand has a label; ``...`` stands for all axes without a label of their own. A label of both
operands is a batch label if it is in the output, and contracted otherwise. A label of one operand and of the output
indexes that operand's own channels.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantizer.reasons import ReasonCode

_DOTS = "..."


@dataclass(frozen=True, kw_only=True, slots=True)
class Labels:
    """The labels of the operands' axes and of the output; ``...`` is replaced by one label for each of its axes."""

    operands: tuple[tuple[str, ...], tuple[str, ...]]
    output: frozenset[str]

    def sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Return the length of each label, after broadcasting of axes of length 1."""
        found: dict[str, int] = {}
        for names, shape in zip(self.operands, shapes, strict=True):
            for name, size in zip(names, shape, strict=True):
                found[name] = max(found.get(name, 1), size)
        return found

    def channels(self, operand: int) -> frozenset[str]:
        """Return the labels of this operand and of the output that the other operand lacks."""
        return frozenset(self.operands[operand]) & self.output - frozenset(self.operands[1 - operand])

    @property
    def contracted(self) -> frozenset[str]:
        """The labels that are summed over."""
        return frozenset(self.operands[0] + self.operands[1]) - self.output

    def channel_axis(self, operand: int, shape: Sequence[int]) -> int | None:
        """Return the axis of an operand's longest channel label, the first of several; None if it has no channels."""
        own = self.channels(operand)
        axes = [axis for axis, name in enumerate(self.operands[operand]) if name in own]
        return max(axes, key=lambda axis: shape[axis], default=None)


def problem(node: ast.Call, equation: str) -> str | None:
    """Return why the channels of a call in the source cannot be determined; None if they can.

    Args:
        equation: the literal first argument of the call; empty if it is no literal.
    """
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
    kept = frozenset(output.replace(_DOTS, ""))
    return Labels(operands=names, output=kept | dots if _DOTS in output else kept)


def _expanded(names: str, dimensions: int) -> tuple[str, ...]:
    before, dots, after = names.partition(_DOTS)
    count = dimensions - len(before) - len(after) if dots else 0
    # Numbered from the right, because broadcasting aligns the last axes.
    return (*before, *(f"{_DOTS}{place}" for place in range(count, 0, -1)), *after)


def volume(sizes: dict[str, int], names: frozenset[str] | set[str]) -> int:
    """Return the product of the lengths of some labels."""
    return math.prod(sizes[name] for name in names)
