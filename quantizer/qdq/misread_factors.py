"""Constants that differ along an axis, which an engine applies to a matrix product along another one.

OpenVINO 2026.4 makes what is computed number by number behind a matrix product a part of its kernel. There, numbers
that differ along one axis are those of the second axis, whichever they belong to, and factors of a product of two
activations are those of other rows. It refuses the file, reads beyond the numbers, or no digit is right. Measured over
products of a weight and of two activations, of two to four axes, with a QuantizeLinear behind and without. Right are
numbers along the last axis, except for factors of two activations, and a table that is added.

A square weight that one product reads transposed and another as it is has the values of one of them in both.
"""

from __future__ import annotations

from typing import Any

from quantizer.qdq.graph import has_several_numbers, is_constant, steps_before
from quantizer.qdq.operand import MATMULS, operands
from quantizer.qdq.reductions import BY_NUMBER

_BETWEEN = BY_NUMBER | {"Cast", "Identity"}
_SCALES = frozenset(["Div", "Mul"])
_SUMS = frozenset(["Add", "Sub"])


def misplaces_numbers(node: Any) -> bool:
    """Return whether a node applies numbers to a matrix product that would be those of another axis of it."""
    if node.op_type not in _SCALES | _SUMS:
        return False
    steps, product = steps_before(node.outputs[0], _BETWEEN)
    if product is None or product.op_type not in MATMULS:
        return False
    scales = node.op_type in _SCALES
    for one in filter(has_several_numbers, steps[0].constants):
        # Counted from the last axis, as constants have fewer than what they are applied to.
        axes = [axis for axis, size in enumerate(reversed(list(one.shape or ()))) if size != 1]
        if axes == [0]:
            found = operands(product)
            if scales and all(read.quantized and not read.is_weight for read in found):
                return True
        elif axes and (scales or len(axes) == 1):
            return True
    return False


def is_read_both_ways(transpose: Any) -> bool:
    """Return whether a node transposes a square weight that something else reads as it is."""
    if transpose.op_type != "Transpose":
        return False
    weight = transpose.inputs[0]
    if weight.shape is None or len(weight.shape) != 2 or weight.shape[0] != weight.shape[1] or not is_constant(weight):
        return False
    return any(reader.op_type in MATMULS for reader, _ in weight.uses())
