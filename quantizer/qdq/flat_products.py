"""Values that an engine multiplies by factors of channels before a QuantizeLinear, and wrongly.

OpenVINO 2026.4 makes one kernel of a network with products of two axes where its sizes are fixed and small (``Linear,
ReLU, * factors, Linear`` of 64 channels, or with a batch norm), and no digit of what that computes is right. With three
axes, with Tanh, Sigmoid or Gelu between, or with ReLU and no factors, all are. The scales of a weight are such factors,
too, where neither a bias nor an activation keeps them from the Q: ``Linear, Linear`` without a bias. Factors that are
not all positive are another case, see ``scales_by_negatives``.
"""

from __future__ import annotations

from typing import Any

from quantizer.qdq.graph import Step, constant, has_several_numbers, is_quantize, steps_before
from quantizer.qdq.operand import MATMULS

_BETWEEN = frozenset(
    ["Add", "BatchNormalization", "Cast", "Clip", "Div", "Identity", "LeakyRelu", "Mul", "PRelu", "Relu", "Sub"]
)

_LINEAR = frozenset(["Add", "Cast", "Clip", "Div", "Identity", "Mul", "Sub"])
"""What leaves the scales of a weight where a Q takes them into itself, but for a bias that differs between channels. A
Clip may be wider than the range of the Q."""
_SUMS = frozenset(["Add", "Sub"])
_FACTORS = {"BatchNormalization": 1, "Div": 1, "Mul": 1}
"""How many of the constants of an operator are factors: the first ones."""


def scales_by_negatives(quantize: Any) -> bool:
    """Return whether a Q rounds a value that factors of channels multiply, of which some are not positive.

    OpenVINO takes factors into a Q before it plans memory if all are positive. It does so later with others, and in a
    model for all sizes it then gives all channels the factor of the first.
    """
    if not is_quantize(quantize):
        return False
    steps, _ = steps_before(quantize.inputs[0], _BETWEEN)
    factors = [factor for step in steps for factor in step.constants[: _FACTORS.get(step.node.op_type, 0)]]
    return any(has_several_numbers(factor) and not _positive(factor) for factor in factors)


def _positive(value: Any) -> bool:
    array = constant(value)
    return array is not None and bool((array > 0).all())


def scales_flat_product(quantize: Any) -> bool:
    """Return whether a Q rounds a product of two axes multiplied by factors of channels, but for its bias."""
    if not is_quantize(quantize):
        return False
    steps, node = steps_before(quantize.inputs[0], _BETWEEN)
    if node is None or node.op_type not in MATMULS:
        return False
    if node.outputs[0].shape is None or len(node.outputs[0].shape) != 2:
        return False
    if all(map(_leaves_scales, steps)):
        return True
    scaling = steps[:-1] if steps[-1].node.op_type == "Add" else steps
    return any(has_several_numbers(one) for step in scaling for one in step.constants)


def _leaves_scales(step: Step) -> bool:
    """Return whether a step leaves the scales of a weight where a Q takes them into itself."""
    kind = step.node.op_type
    return kind in _LINEAR and not (kind in _SUMS and any(map(_differ, step.constants)))


def _differ(value: Any) -> bool:
    array = constant(value)
    return array is None or bool((array != array.flat[0]).any())
