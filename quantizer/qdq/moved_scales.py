"""Values whose scales an engine can still move behind what reads them.

OpenVINO 2026.4 scales a quantized product behind its sums, and moves the scales on behind operators that keep numbers
apart. Scales of channels [1, 1, N] then meet a result with other axes: behind an index or a mean over tokens they are
those of another axis. A bias of the product, or anything that is not linear, keeps them in the product's own kernel.
"""

from __future__ import annotations

from typing import Any

from quantizer.qdq.graph import has_several_numbers
from quantizer.qdq.graph import steps_before
from quantizer.qdq.operand import MATMULS
from quantizer.qdq.operand import operands

__all__ = ["has_moved_scales"]

_LINEAR = frozenset(["Add", "Cast", "Div", "Identity", "Mul", "Neg", "Slice", "Sub", "Unsqueeze"])


def has_moved_scales(value: Any) -> bool:
    """Return whether a value is a product times the scales of its weight's channels, which can still be moved."""
    steps, node = steps_before(value, _LINEAR)
    if node is None or node.op_type not in MATMULS or [step.node.op_type for step in steps] == ["Add"]:
        return False
    found = list(operands(node))
    return all(one.quantized for one in found) and any(has_several_numbers(one.dequantize.inputs[1]) for one in found)
