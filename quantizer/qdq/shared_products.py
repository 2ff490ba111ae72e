"""Quantized products whose result several nodes read, which an engine then scales twice or not at all.

OpenVINO 2026.4 computes a convolution or a product of two activations on integers, and multiplies the result by the
scales behind it. Where several nodes read the result, some of them can take the multiplication into themselves: a
QuantizeLinear, a reduction, a pooling, a ReLU, another factor. They read the integers then. Its graph optimizer moves
the multiplication that is left into the product without a look at them, and they read what is scaled already: no digit
is right. With fixed sizes the multiplication often becomes part of another kernel before that, and all is right; with
``SNIPPETS_MODE=DISABLE`` it does not. Right are a linear layer, and a product with a bias other than 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quantizer.qdq.graph import constant, is_constant, is_quantize, varying_inputs
from quantizer.qdq.operand import PRODUCTS, operands

_SIZED = frozenset({"Resize", "Shape", "Size"})
"""Operators with which a file computes with the sizes of its tensors."""


def is_shared_product(node: Any) -> bool:
    """Return whether a node is a quantized product without a bias whose result is read more than once."""
    if node.op_type not in PRODUCTS or not all(operand.quantized for operand in operands(node)):
        return False
    if node.op_type == "Gemm" or (node.op_type == "MatMul" and any(map(is_constant, node.inputs))):
        return False
    if any(not _is_zero(bias) for bias in node.inputs[2:] if bias is not None):
        return False
    value = node.outputs[0]
    while len(readers := [reader for reader, _ in value.uses()]) == 1 and not value.is_graph_output():
        if not _scales(readers[0]):
            return False
        value = readers[0].outputs[0]
    return bool(len(readers) + value.is_graph_output() > 1)


def sized_biases(nodes: Iterable[Any]) -> list[Any]:
    """Return the convolutions of a graph whose bias the engine may lose, as the file computes with sizes and rounds.

    OpenVINO reads a convolution with a bias as a convolution, its shape, and an addition of the bias in that shape.
    Where the file itself computes with a size, it then takes the size from there, which makes a second reader of the
    convolution. The addition is no part of its kernel any more but of the Q behind it, where all channels get the bias
    of the first.
    """
    nodes = list(nodes)
    if not any(node.op_type in _SIZED for node in nodes) or not any(map(is_quantize, nodes)):
        return []
    convolutions = [node for node in nodes if node.op_type in ("Conv", "ConvTranspose")]
    return [node for node in convolutions if len(node.inputs) > 2 and is_constant(node.inputs[2])]


def _scales(node: Any) -> bool:
    """Return whether a node multiplies a value by constants, or adds zeros to it: the engine joins both with scales."""
    varying = varying_inputs(node)
    if len(varying) != 1 or node.op_type not in ("Add", "Cast", "Div", "Identity", "Mul", "Sub"):
        return False
    others = [given for given in node.inputs if given not in (None, varying[0])]
    return node.op_type not in ("Add", "Sub") or all(map(_is_zero, others))


def _is_zero(value: Any) -> bool:
    array = constant(value)
    return array is not None and not array.any()
