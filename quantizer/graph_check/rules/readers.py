"""Rules of the readers of a DequantizeLinear: only operators that compute with its codes, and directly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quantizer.graph_check.finding import Fault
from quantizer.graph_check.rule import rules
from quantizer.graph_check.subject import Subject
from quantizer.qdq.graph import is_constant, is_dequantize, name_of, readers
from quantizer.qdq.operand import MOVES, PRODUCTS, Operand

_STEPS = (
    *PRODUCTS,
    *MOVES,
    *("Add", "Sum", "Gather", "Concat", "MaxPool", "AveragePool", "GlobalAveragePool", "Pad", "Resize", "Relu"),
    *("QuantizeLinear", "Cast", "Mul", "Div"),
)
"""What works on steps, or hands them on. What stands between a DQ and a product is judged there, by its own rule."""


@rules.add("float-reader")
def float_reader(subject: Subject) -> Iterator[Fault]:
    """Read a DequantizeLinear only by operators that compute with codes; it is no output of the model."""
    advice = "read the tensor before its QuantizeLinear there, or leave it float"
    for node in subject.dequantizes:
        if is_constant(node.inputs[0]) and not node.outputs[0].is_graph_output():
            continue
        if node in subject.results:
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
    """Put no Cast between Q, DQ and the product."""
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


@rules.add("scaled-operand")
def scaled_operand(subject: Subject) -> Iterator[Fault]:
    """Scale no activation between its DequantizeLinear and the product."""
    for operand, nodes in _behind(subject):
        scaling = [node for node in nodes if node.op_type in ("Mul", "Div")]
        if scaling:
            what = "multiplication" if scaling[-1].op_type == "Mul" else "division"
            problem = f"a {what} between {_ends(operand)} computes with floats, and so does the product behind it"
            yield Fault(name_of(scaling[-1]), problem, f"put the {what} before the QuantizeLinear")


@rules.add("moved-operand")
def moved_operand(subject: Subject) -> Iterator[Fault]:
    """Move no activation between its DequantizeLinear and the product."""
    for operand, nodes in _behind(subject):
        moves = [node for node in reversed(nodes) if node.op_type in MOVES]
        if moves:
            names = " and ".join(dict.fromkeys(node.op_type for node in moves))
            problem = f"{names} between {_ends(operand)}: it moves floats unless the builder finds a way around it"
            yield Fault(name_of(moves[0]), problem, f"put {names} before the QuantizeLinear")


def _behind(subject: Subject) -> Iterator[tuple[Operand, list[Any]]]:
    """Yield each operand with nodes between its DQ and its product, and those nodes; each place once."""
    seen: set[Any] = set()
    for pair in subject.products:
        for operand in pair:
            if not operand.is_weight and operand.between and operand.between[-1] not in seen:
                seen.add(operand.between[-1])
                yield operand, list(operand.between)


def _ends(operand: Operand) -> str:
    return f"{name_of(operand.dequantize)} and {name_of(operand.product)}"
