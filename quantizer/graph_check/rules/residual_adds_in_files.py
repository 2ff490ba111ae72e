"""Rule of residual adds: reading the operand that skips the block is what costs time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quantizer.graph_check.finding import Fault
from quantizer.graph_check.rule import rules
from quantizer.graph_check.subject import Subject
from quantizer.qdq.attention import mask_adds
from quantizer.qdq.graph import is_constant, is_dequantize, is_quantize, maker, name_of
from quantizer.qdq.operand import PRODUCTS


@rules.add("residual-side")
def residual_side(subject: Subject) -> Iterator[Fault]:
    """Quantize the operand that skips the block if only one operand of a residual add is quantized."""
    masks = set(mask_adds(subject.nodes))
    for node in subject.nodes:
        if node.op_type != "Add" or node in masks or any(is_constant(value) for value in node.inputs):
            continue
        low = [value for value in node.inputs if is_dequantize(maker(value))]
        if len(low) != 1:
            continue
        high = next(value for value in node.inputs if value is not low[0])
        if _from_product(low[0]) and not _from_product(high):
            problem = (
                f"adds the rounded output of a product to {high.name}, which stays float: "
                "the product's output is rounded for nothing, and the skipped operand is read as floats"
            )
            yield Fault(name_of(node), problem, f"quantize {high.name} (and the other too, or not), or neither")


def _from_product(value: Any) -> bool:
    """Return whether a value is the result of a product, with its bias, requantized or not."""
    node = maker(value)
    while node is not None:
        if node.op_type in PRODUCTS:
            return True
        bias = node.op_type == "Add" and any(is_constant(read) for read in node.inputs)
        if not (bias or is_dequantize(node) or is_quantize(node) or node.op_type in ("Identity", "Dropout", "Reshape")):
            return False
        node = maker(next((read for read in node.inputs if not is_constant(read)), None))
    return False
