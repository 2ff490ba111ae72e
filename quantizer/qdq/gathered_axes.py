"""Indices that take out an axis behind a convolution, which an engine computes with another number of axes.

OpenVINO 2026.4 moves the scales of a quantized convolution [1, C, 1, 1] behind a Gather. Where the index is one number,
the result has one axis less than they have, and the product of both one too many: it refuses the file, or ends the
process. An index of one element keeps the axis, and a Squeeze behind it takes it out.
"""

from __future__ import annotations

from typing import Any

from quantizer.qdq.graph import attribute
from quantizer.qdq.graph import constant
from quantizer.qdq.graph import maker
from quantizer.qdq.operand import MOVES
from quantizer.qdq.operand import operands

__all__ = ["gathers_axis"]

_CHANNELS = 1
_PASSED = frozenset([*MOVES, "Add", "Cast", "Clip", "Concat", "Div", "Gather", "MaxPool", "Mul", "Relu", "Sub"])
"""Operators behind which scales can be moved, or which keep the axes of their first input in any case."""


def gathers_axis(node: Any) -> bool:
    """Return whether a Gather by one constant number reads an axis of places of a quantized convolution."""
    if node.op_type != "Gather" or node.inputs[0].shape is None:
        return False
    index, axes = constant(node.inputs[1]), len(node.inputs[0].shape)
    if index is None or index.ndim or attribute(node, "axis", 0) % axes <= _CHANNELS:
        return False
    before = maker(node.inputs[0])
    while before is not None and before.op_type in _PASSED:
        before = maker(before.inputs[0])
    is_convolution = before is not None and before.op_type in ("Conv", "ConvTranspose")
    return is_convolution and all(operand.quantized for operand in operands(before))
