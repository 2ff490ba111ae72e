"""Values that an engine multiplies by factors of channels before a QuantizeLinear, and wrongly.

OpenVINO 2026.4 makes one kernel of a network with products of two axes where its sizes are fixed and small (``Linear,
ReLU, * factors, Linear`` of 64 channels, or with a batch norm), and no digit of what that computes is right. With three
axes, with Tanh, Sigmoid or Gelu between, or with ReLU and no factors, all are. The scales of a weight are such factors,
too, where neither a bias nor an activation keeps them from the Q: ``Linear, Linear`` without a bias. Factors that are
not all positive are another case, see ``scales_by_negatives``.
"""

from __future__ import annotations

from typing import Any

from quantizer.qdq.graph import constant
from quantizer.qdq.graph import has_several_numbers
from quantizer.qdq.graph import is_quantize
from quantizer.qdq.graph import maker
from quantizer.qdq.graph import varying_inputs
from quantizer.qdq.operand import MATMULS

__all__ = ["scales_by_negatives", "scales_flat_product"]

_BETWEEN = frozenset(
    ["Add", "BatchNormalization", "Cast", "Clip", "Div", "Identity", "LeakyRelu", "Mul", "PRelu", "Relu", "Sub"]
)

_LINEAR = frozenset(["Add", "Cast", "Clip", "Div", "Identity", "Mul", "Sub"])
"""What leaves the scales of a weight where a Q takes them into itself, but for a bias that differs between channels. A
Clip may be wider than the range of the Q."""
_SUMS = frozenset(["Add", "Sub"])


def scales_by_negatives(quantize: Any) -> bool:
    """Return whether a Q rounds a value that factors of channels multiply, of which some are not positive.

    OpenVINO takes factors into a Q before it plans memory if all are positive. It does so later with others, and in a
    model for all sizes it then gives all channels the factor of the first.
    """
    if not is_quantize(quantize):
        return False
    value = quantize.inputs[0]
    while (node := maker(value)) is not None and node.op_type in _BETWEEN:
        varying = varying_inputs(node)
        if len(varying) != 1:
            return False
        others = [given for given in node.inputs if given not in (None, varying[0])]
        factors = {"BatchNormalization": others[:1], "Div": others, "Mul": others}.get(node.op_type, [])
        if any(has_several_numbers(one) and not _positive(one) for one in factors):
            return True
        value = varying[0]
    return False


def _positive(value: Any) -> bool:
    array = constant(value)
    return array is not None and bool((array > 0).all())


def scales_flat_product(quantize: Any) -> bool:
    """Return whether a Q rounds a product of two axes multiplied by factors of channels, but for its bias."""
    if not is_quantize(quantize):
        return False
    value, factors, last, linear = quantize.inputs[0], [], None, True
    while (node := maker(value)) is not None and node.op_type in _BETWEEN:
        varying = varying_inputs(node)
        if len(varying) != 1:
            return False
        others = [given for given in node.inputs if given not in (None, varying[0])]
        factors.append(any(map(has_several_numbers, others)))
        linear = linear and node.op_type in _LINEAR and not (node.op_type in _SUMS and any(map(_differ, others)))
        value, last = varying[0], node
    if node is None or node.op_type not in MATMULS:
        return False
    if node.outputs[0].shape is None or len(node.outputs[0].shape) != 2:
        return False
    return linear or any(factors[:-1] if last is not None and last.op_type == "Add" else factors)


def _differ(value: Any) -> bool:
    array = constant(value)
    return array is None or bool((array != array.flat[0]).any())
