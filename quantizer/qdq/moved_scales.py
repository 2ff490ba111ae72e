"""Values whose scales an engine can still move behind what reads them.

OpenVINO 2026.4 scales a quantized product behind its sums, and moves the scales on behind operators that keep numbers
apart. Scales of channels [1, 1, N] then meet a result with other axes: behind an index or a mean over tokens they are
those of another axis. A bias of the product, or anything that is not linear, keeps them in the product's own kernel.
"""

from __future__ import annotations

from typing import Any

from quantizer.qdq.graph import steps_before
from quantizer.qdq.operand import MATMULS, Operand, operands

_LINEAR = frozenset(["Add", "Cast", "Div", "Identity", "Mul", "Neg", "Slice", "Sub", "Unsqueeze"])


def moved_product(value: Any) -> tuple[Operand, ...]:
    """Return the operands of the quantized product whose scales can be moved behind what reads a value; empty: none."""
    steps, node = steps_before(value, _LINEAR)
    if node is None or node.op_type not in MATMULS or [step.node.op_type for step in steps] == ["Add"]:
        return ()
    found = operands(node)
    return found if all(one.quantized for one in found) else ()
