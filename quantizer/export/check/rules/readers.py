"""Who reads a DequantizeLinear: only what computes with the steps, and directly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quantizer.export.check.finding import Fault
from quantizer.export.check.graph import is_constant
from quantizer.export.check.graph import is_dequantize
from quantizer.export.check.graph import name_of
from quantizer.export.check.graph import readers
from quantizer.export.check.operand import MOVES
from quantizer.export.check.operand import PRODUCTS
from quantizer.export.check.rule import rules
from quantizer.export.check.subject import Subject

__all__ = ["behind_dequantize", "cast_between", "float_reader"]

_STEPS = (
    *PRODUCTS,
    *MOVES,
    *("Add", "Sum", "Gather", "Concat", "MaxPool", "AveragePool", "GlobalAveragePool", "Pad", "Resize", "Relu"),
    *("QuantizeLinear", "Cast", "Mul", "Div"),
)
"""What works on steps, or hands them on. What stands between a DQ and a product is judged there, by its own rule."""


@rules.add("float-reader")
def float_reader(subject: Subject) -> Iterator[Fault]:
    """What a DequantizeLinear gives is read by operators that work on steps, and is no output of the model."""
    advice = "read the tensor before its QuantizeLinear there, or leave it float"
    for node in subject.dequantizes:
        if is_constant(node.inputs[0]) and not node.outputs[0].is_graph_output():
            continue
        others = [reader for reader in readers(node.outputs[0]) if reader.op_type not in _STEPS]
        if node.outputs[0].is_graph_output():
            problem = "its output is an output of the model: the rounded tensor is written to memory as floats"
            yield Fault(name_of(node), problem, "let the model give the tensor before its QuantizeLinear")
        elif others:
            reader = f"{others[0].op_type} {name_of(others[0])}"
            problem = f"{reader} computes with floats: the rounded tensor is written to memory for it as floats"
            yield Fault(name_of(node), problem, advice)


@rules.add("cast-between")
def cast_between(subject: Subject) -> Iterator[Fault]:
    """No Cast stands between Q, DQ and the product."""
    advice = "store the scales in the float type of the product, so that no Cast is needed"
    for pair in subject.products:
        for operand in pair:
            casts = [node for node in operand.between if node.op_type == "Cast"]
            if casts:
                problem = f"stands between {name_of(operand.dequantize)} and {name_of(operand.product)}, which then"
                yield Fault(name_of(casts[0]), f"{problem} computes with floats", advice)
    for node in subject.quantizes:
        for reader in readers(node.outputs[0]):
            if reader.op_type == "Cast" and any(is_dequantize(after) for after in readers(reader.outputs[0])):
                yield Fault(name_of(reader), f"stands between {name_of(node)} and its DequantizeLinear", "remove it")


@rules.add("behind-dequantize")
def behind_dequantize(subject: Subject) -> Iterator[Fault]:
    """Nothing moves or scales an activation between its DequantizeLinear and the product."""
    seen: set[Any] = set()
    for pair in subject.products:
        for operand in pair:
            others = [node for node in operand.between if node.op_type != "Cast"]
            if operand.is_weight or not others or others[-1] in seen:
                continue
            seen.add(others[-1])
            what = {"Transpose": "the transpose", "Mul": "the multiplication", "Div": "the division"}
            names = " and ".join(dict.fromkeys(what.get(node.op_type, node.op_type) for node in others))
            problem = (
                f"{names} between {name_of(operand.dequantize)} and {name_of(operand.product)} computes with floats"
            )
            yield Fault(name_of(others[-1]), problem, f"put {names} before the QuantizeLinear")
