"""Rules of element types: those of a node's inputs, those that a target has, and the float type of the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quantizer.graph_check.finding import Fault
from quantizer.graph_check.rule import rules
from quantizer.graph_check.rules.operators import is_quantized_operator
from quantizer.graph_check.rules.opset import opset_format
from quantizer.graph_check.subject import Subject
from quantizer.qdq.element_types import type_groups
from quantizer.qdq.graph import HALVES, WIDTHS, element, is_dequantize, is_quantize, maker, name_of
from quantizer.qdq.operand import Operand

_OF_ANY_TYPE = frozenset({"Cast", "CastLike", "QuantizeLinear", "DequantizeLinear", "Identity", "Reshape", "Transpose"})


@rules.add("mixed-types")
def mixed_types(subject: Subject) -> Iterator[Fault]:
    """Give all inputs of an operator that share a type in ONNX one element type."""
    if any(opset_format(subject)):
        return  # in an older opset a DequantizeLinear makes float32; that rule reports it more clearly
    for node in subject.nodes:
        if is_quantize(node) or is_dequantize(node):
            continue  # the rule scale-type is for those
        for group in type_groups(node, subject.opset):
            types = [element(node.inputs[place]) for place in group.inputs]
            if len(kinds := dict.fromkeys(filter(None, types))) > 1:
                problem = f"its inputs have different element types, {' and '.join(kinds)}, where ONNX wants one"
                yield Fault(name_of(node), problem, "cast them to one type, that of the products around")


@rules.add("element-type")
def element_type(subject: Subject) -> Iterator[Fault]:
    """Use element types only where the target reads them."""
    narrow, absent = subject.limits.narrow_inputs, subject.limits.absent_floats
    for node in subject.nodes:
        kinds = {element(value) for value in node.inputs if value is not None}
        if node.op_type not in _OF_ANY_TYPE and (lacking := sorted(kinds & absent)):
            problem = f"{subject.target.name} has no {node.op_type} of {lacking[0]}"
            yield Fault(name_of(node), problem, "cast its inputs to FLOAT")
        elif narrow & kinds and not (
            node.op_type in ("Cast", "QuantizeLinear", "DequantizeLinear") or _quantizes(node)
        ):
            kind = sorted(narrow & kinds)[0]
            problem = f"it reads {kind}, which {subject.target.name} takes as an input of the model alone"
            yield Fault(name_of(node), problem, f"cast the {kind} input to INT32 or a float type at once")


def _quantizes(node: Any) -> bool:
    """Return whether a node computes with codes; rules of their own are for those."""
    return is_quantized_operator(node) or any(is_quantize(maker(value)) for value in node.inputs)


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
