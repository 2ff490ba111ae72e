"""Rules of pairs: a QuantizeLinear and the DequantizeLinear that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from quantizer.graph_check.finding import Fault
from quantizer.graph_check.rule import rules
from quantizer.graph_check.rules.operators import is_quantized_operator
from quantizer.graph_check.subject import Subject
from quantizer.qdq.graph import constant, is_dequantize, name_of, paired, readers


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
