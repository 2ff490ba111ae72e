"""Rules of Q/DQ pairs, and of the operators between a DequantizeLinear and the operation that it feeds."""

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
    """Remove a quantizer whose output is not read."""
    for node in [*subject.quantizes, *subject.dequantizes]:
        if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            yield Fault(name_of(node), "its output is not read", "remove it")


@rules.add("quantize-alone")
def quantize_alone(subject: Subject) -> Iterator[Fault]:
    """Let only DequantizeLinear read the output of a QuantizeLinear."""
    for node in subject.quantizes:
        other_readers = [
            reader
            for reader in readers(node.outputs[0])
            if not (is_dequantize(reader) or is_quantized_operator(reader))
        ]
        if node.outputs[0].is_graph_output():
            yield Fault(name_of(node), "its quantized values are a model output", "put a DequantizeLinear behind it")
        elif other_readers:
            problem = f"its quantized values are read by {other_readers[0].op_type} {name_of(other_readers[0])}"
            yield Fault(name_of(node), problem, "put a DequantizeLinear between it and the operator")


@rules.add("pair-differs")
def pair_differs(subject: Subject) -> Iterator[Fault]:
    """Give a DequantizeLinear the scale and zero point of its QuantizeLinear."""
    for node in subject.quantizes:
        for quantize, dequantize in paired(node):
            for index, parameter in ((1, "scale"), (2, "zero point")):
                of_q, of_dq = _as_array(quantize, index), _as_array(dequantize, index)
                if of_q is not None and of_dq is not None and not _equal(of_q, of_dq):
                    problem = f"its {parameter} differs from the {parameter} of {name_of(quantize)}"
                    yield Fault(name_of(dequantize), problem, f"give both nodes the same {parameter}")


def _as_array(node: Any, index: int) -> np.ndarray[Any, Any] | None:
    """Return a scale or zero point as float32 array: 0 if omitted, None if computed."""
    if index >= len(node.inputs) or node.inputs[index] is None:
        return np.zeros(1, np.float32)
    array = constant(node.inputs[index])
    return None if array is None else array.astype(np.float32)


def _equal(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> bool:
    if first.size == 1 or second.size == 1:
        first, second = np.broadcast_arrays(first.reshape(-1), second.reshape(-1))
    return np.array_equal(first, second, equal_nan=True)


@rules.add("shared-input")
def shared_input(subject: Subject) -> Iterator[Fault]:
    """Quantize a tensor once, even if several operations read it."""
    by_tensor: dict[Any, list[Any]] = {}
    for node in subject.quantizes:
        by_tensor.setdefault(node.inputs[0], []).append(node)
    for tensor, nodes in by_tensor.items():
        if len(nodes) > 1:
            other_names = ", ".join(name_of(node) for node in nodes[1:])
            scales = [constant(node.inputs[1]) for node in nodes]
            same = all(scale is not None and scales[0] is not None and _equal(scale, scales[0]) for scale in scales)
            comparison = "with the same scale" if same else "with different scales"
            problem = f"{tensor.name} is quantized {len(nodes)} times, {comparison}: here and at {other_names}"
            yield Fault(
                name_of(nodes[0]), problem, "quantize it once, and let all operations read one DequantizeLinear"
            )


_QUANTIZED_READERS = (
    *PRODUCTS,
    *MOVES,
    *("Add", "Sum", "Gather", "Concat", "MaxPool", "AveragePool", "GlobalAveragePool", "Pad", "Resize", "Relu"),
    *("QuantizeLinear", "Cast", "Mul", "Div"),
)
"""Operators that compute with quantized values or pass them on, and operators that other rules check."""


@rules.add("float-reader")
def float_reader(subject: Subject) -> Iterator[Fault]:
    """Let only operators that compute with quantized values read a DequantizeLinear, which is not a model output."""
    advice = "let this operator read the tensor before its QuantizeLinear, or keep the tensor in float"
    for node in subject.dequantizes:
        if is_constant(node.inputs[0]) and not node.outputs[0].is_graph_output():
            continue
        if node in subject.results:
            continue
        float_readers = [reader for reader in readers(node.outputs[0]) if reader.op_type not in _QUANTIZED_READERS]
        if node.outputs[0].is_graph_output():
            problem = "its output is a model output: the rounded tensor is written to memory in float"
            yield Fault(name_of(node), problem, "return the tensor before its QuantizeLinear")
        elif float_readers:
            reader = f"{float_readers[0].op_type} {name_of(float_readers[0])}"
            problem = f"{reader} computes in floating point: the rounded tensor is written to memory in float"
            yield Fault(name_of(node), problem, advice)


@rules.add("cast-between")
def cast_between(subject: Subject) -> Iterator[Fault]:
    """Put no Cast between Q, DQ and the operation."""
    advice = "store the scales in the float type of the operation, so that no Cast is needed"
    for pair in subject.products:
        for operand in pair:
            casts = [node for node in operand.between if node.op_type == "Cast"]
            if casts:
                problem = f"it is between {name_of(operand.dequantize)} and {name_of(operand.product)}, which then"
                yield Fault(name_of(casts[0]), f"{problem} computes in floating point", advice)
    for node in subject.quantizes:
        for reader in readers(node.outputs[0]):
            if reader.op_type == "Cast" and any(is_dequantize(after) for after in readers(reader.outputs[0])):
                yield Fault(name_of(reader), f"it is between {name_of(node)} and its DequantizeLinear", "remove it")


@rules.add("scaled-operand")
def scaled_operand(subject: Subject) -> Iterator[Fault]:
    """Scale no activation between its DequantizeLinear and the operation."""
    for operand, nodes in _separated(subject):
        scaling = [node for node in nodes if node.op_type in ("Mul", "Div")]
        if scaling:
            operation = "multiplication" if scaling[-1].op_type == "Mul" else "division"
            problem = f"a {operation} between {_ends(operand)} makes both compute in floating point"
            yield Fault(name_of(scaling[-1]), problem, f"put the {operation} before the QuantizeLinear")


@rules.add("moved-operand")
def moved_operand(subject: Subject) -> Iterator[Fault]:
    """Transpose or reshape no activation between its DequantizeLinear and the operation."""
    for operand, nodes in _separated(subject):
        moves = [node for node in reversed(nodes) if node.op_type in MOVES]
        if moves:
            names = " and ".join(dict.fromkeys(node.op_type for node in moves))
            problem = f"{names} between {_ends(operand)}: it moves floats unless the builder folds it"
            yield Fault(name_of(moves[0]), problem, f"put {names} before the QuantizeLinear")


def _separated(subject: Subject) -> Iterator[tuple[Operand, list[Any]]]:
    """Yield each activation operand with nodes between its DequantizeLinear and its operation, and those nodes."""
    reported: set[Any] = set()
    for pair in subject.products:
        for operand in pair:
            if not operand.is_weight and operand.between and operand.between[-1] not in reported:
                reported.add(operand.between[-1])
                yield operand, list(operand.between)


def _ends(operand: Operand) -> str:
    return f"{name_of(operand.dequantize)} and {name_of(operand.product)}"
