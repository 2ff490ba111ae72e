"""Rules of pairs: a QuantizeLinear and the DequantizeLinear that reads it.

Rules of the readers of a DequantizeLinear: only operators that compute with its codes, and directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from quantizer.check.checked_file import Fault, Subject, rules
from quantizer.check.rules.operators import is_quantized_operator
from quantizer.export.qdq.graph import constant, is_constant, is_dequantize, name_of, paired, readers
from quantizer.export.qdq.operand import MOVES, PRODUCTS, Operand


@rules.add("dead-quantizer")
def dead_quantizer(subject: Subject) -> Iterator[Fault]:
    """Remove a quantizer whose result is not read."""
    for node in [*subject.quantizes, *subject.dequantizes]:
        if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            yield Fault(name_of(node), "nobody reads its output", "remove it")


@rules.add("quantize-alone")
def quantize_alone(subject: Subject) -> Iterator[Fault]:
    """Read a QuantizeLinear by DequantizeLinear only."""
    for node in subject.quantizes:
        others = [
            reader
            for reader in readers(node.outputs[0])
            if not (is_dequantize(reader) or is_quantized_operator(reader))
        ]
        if node.outputs[0].is_graph_output():
            yield Fault(name_of(node), "its codes are an output of the model", "put a DequantizeLinear behind it")
        elif others:
            problem = f"its codes are read by {others[0].op_type} {name_of(others[0])}"
            yield Fault(
                name_of(node), problem, "put a DequantizeLinear directly behind it, and the operator behind that"
            )


@rules.add("pair-differs")
def pair_differs(subject: Subject) -> Iterator[Fault]:
    """Give a DequantizeLinear the scale and zero point of its QuantizeLinear."""
    for node in subject.quantizes:
        for quantize, dequantize in paired(node):
            for index, what in ((1, "scale"), (2, "zero point")):
                one, two = _number(quantize, index), _number(dequantize, index)
                if one is not None and two is not None and not _equal(one, two):
                    problem = f"its {what} is not that of {name_of(quantize)}"
                    yield Fault(name_of(dequantize), problem, f"give both the same {what}")


def _number(node: Any, index: int) -> np.ndarray[Any, Any] | None:
    """Return the array of a scale or zero point; 0 for a zero point that is left out."""
    if index >= len(node.inputs) or node.inputs[index] is None:
        return np.zeros(1, np.float32)
    held = constant(node.inputs[index])
    return None if held is None else held.astype(np.float32)


def _equal(one: np.ndarray[Any, Any], two: np.ndarray[Any, Any]) -> bool:
    if one.size == 1 or two.size == 1:
        one, two = np.broadcast_arrays(one.reshape(-1), two.reshape(-1))
    return np.array_equal(one, two, equal_nan=True)


@rules.add("shared-input")
def shared_input(subject: Subject) -> Iterator[Fault]:
    """Quantize a tensor that several products read only once."""
    by_tensor: dict[Any, list[Any]] = {}
    for node in subject.quantizes:
        by_tensor.setdefault(node.inputs[0], []).append(node)
    for tensor, nodes in by_tensor.items():
        if len(nodes) > 1:
            others = ", ".join(name_of(node) for node in nodes[1:])
            scales = [constant(node.inputs[1]) for node in nodes]
            same = all(held is not None and scales[0] is not None and _equal(held, scales[0]) for held in scales)
            how = "with the same scale" if same else "with different scales"
            problem = f"{tensor.name} is quantized {len(nodes)} times, {how}: here and at {others}"
            yield Fault(name_of(nodes[0]), problem, "quantize it once, and let all read the one DequantizeLinear")


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
