"""Indices that take out an axis behind a product, which an engine computes with another number of axes.

OpenVINO 2026.4 moves the scales of a quantized convolution [1, C, 1, 1], or of a linear layer [1, 1, N] without a bias
(``x = self.linear(x)[:, 0]``), behind a Gather. Where the index is one number, the result has one axis less than the
scales, and the product of both has one axis too many: OpenVINO refuses the file, ends the process, or adds an axis to
an output. An index of one element keeps the axis, and a Squeeze behind it takes it out. Where the layer reads bytes
with a zero point, any Gather behind it ends the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quantizer.qdq.graph import attribute, constant, is_quantize, maker, steps_before
from quantizer.qdq.moved_scales import moved_product
from quantizer.qdq.operand import MOVES, PRODUCTS, operands

_CHANNELS = 1
_PASSED = frozenset([*MOVES, "Add", "Cast", "Clip", "Concat", "Div", "Gather", "MaxPool", "Mul", "Relu", "Sub"])
"""Operators behind which scales can be moved, or which keep the axes of their first input in any case."""
_JOINED = frozenset(["Add", "Cast", "Clip", "Div", "Identity", "LeakyRelu", "Mul", "Relu", "Sub"])
"""Operators before which a Q can be moved, with those that it takes into itself."""


def gathers_axis(node: Any) -> bool:
    """Return whether a Gather by one constant number reads an axis of a quantized product, but that of its channels."""
    if node.op_type != "Gather" or node.inputs[0].shape is None:
        return False
    index, axes = constant(node.inputs[1]), len(node.inputs[0].shape)
    if index is None or index.ndim:
        return False
    axis = attribute(node, "axis", 0) % axes
    if axis < axes - 1 and moved_product(node.inputs[0]):
        return True
    if axis <= _CHANNELS:
        return False
    before = maker(node.inputs[0])
    while before is not None and before.op_type in _PASSED:
        before = maker(before.inputs[0])
    is_convolution = before is not None and before.op_type in ("Conv", "ConvTranspose")
    return is_convolution and all(operand.quantized for operand in operands(before))


def gathers_zero_points(node: Any) -> bool:
    """Return whether a Gather reads a product without a bias whose operands have a zero point."""
    return node.op_type == "Gather" and any(_has_zero_point(one.dequantize) for one in moved_product(node.inputs[0]))


def joins_before(quantize: Any) -> bool:
    """Return whether a Q with a zero point rounds what a concatenation of places has joined.

    OpenVINO rounds the parts and joins their zero points along the places, where a product can subtract none: it
    refuses the file. ``self.linear(torch.cat((token, x), 1))`` is enough.
    """
    if not is_quantize(quantize) or not _has_zero_point(quantize):
        return False
    _, node = steps_before(quantize.inputs[0], _JOINED)
    if node is None or node.op_type != "Concat":
        return False
    if node.outputs[0].shape is None:
        return True
    axes = len(node.outputs[0].shape)
    axis = attribute(node, "axis", 0) % axes
    # A convolution subtracts zero points of its channels, and a matrix product those of the axis that it sums over.
    subtracted = {_CHANNELS if kind in ("Conv", "ConvTranspose") else axes - 1 for kind in _products(quantize)}
    return bool(subtracted - {axis})


def _products(quantize: Any) -> Iterator[str]:
    """Yield the operators of the products that read the codes of a Q."""
    waiting = [reader for reader, _ in quantize.outputs[0].uses()]
    while waiting:
        node = waiting.pop()
        if node.op_type in PRODUCTS:
            yield node.op_type
        elif node.op_type in (*MOVES, "DequantizeLinear"):
            waiting += [reader for reader, _ in node.outputs[0].uses()]


def _has_zero_point(quantize: Any) -> bool:
    point = constant(quantize.inputs[2]) if len(quantize.inputs) > 2 else None
    return point is not None and bool((point != 0).any())
