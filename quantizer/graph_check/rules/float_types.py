"""Rule of the float type of everything that is not quantized: the graph alone decides it."""

from __future__ import annotations

from collections.abc import Iterator

from quantizer.graph_check.finding import Fault
from quantizer.graph_check.rule import rules
from quantizer.graph_check.subject import Subject
from quantizer.qdq.graph import HALVES
from quantizer.qdq.graph import WIDTHS
from quantizer.qdq.graph import element
from quantizer.qdq.operand import Operand

__all__ = ["float32_rest"]


@rules.add("float32-rest")
def float32_rest(subject: Subject) -> Iterator[Fault]:
    """Use half precision where the target is strongly typed: FP32 tensors make an FP32 engine."""
    halves = {name for name, ours in WIDTHS.items() if name in HALVES and ours == subject.target.float_dtype}
    if not halves:
        return
    types = [_float_type(pair[0]) for pair in subject.products]
    if "FLOAT" in types and not set(HALVES) & set(types):
        problem = (
            f"all {types.count('FLOAT')} products have float32 tensors: {subject.target.name} builds what the graph "
            "says, so everything that is not quantized runs in float32, without a word"
        )
        yield Fault("", problem, f"convert the model to {subject.target.float_dtype} before export, scales included")


def _float_type(operand: Operand) -> str:
    """Return the float type in which a product computes if its operands are not quantized codes."""
    if operand.quantized and not operand.between:
        return element(operand.dequantize.inputs[1])
    return element(operand.product.inputs[operand.index])
