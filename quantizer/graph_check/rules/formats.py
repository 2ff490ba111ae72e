"""Rules of formats: those that the target computes with, their zero points and their signedness."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quantizer.graph_check.finding import Fault
from quantizer.graph_check.rule import rules
from quantizer.graph_check.subject import Subject
from quantizer.numerics.qtype import INT8, UINT8
from quantizer.qdq.graph import constant, format_name, is_constant, name_of


@rules.add("zero-point")
def zero_point(subject: Subject) -> Iterator[Fault]:
    """Leave out zero points, or store zeros."""
    for node in subject.sources:
        if len(node.inputs) < 3 or node.inputs[2] is None:
            continue
        if not is_constant(node.inputs[2]):
            yield Fault(name_of(node), "its zero point is computed when the model runs", "quantize symmetrically")
            continue
        held = constant(node.inputs[2])
        if held is not None and np.any(held.astype(np.float32)):
            numbers = held.astype(np.float32).reshape(-1)
            problem = (
                f"its zero point is {numbers[np.flatnonzero(numbers)[0]]:g}, and {subject.target.name} takes 0 alone"
            )
            yield Fault(
                name_of(node), problem, f"quantize symmetrically: zero point 0, scale = largest magnitude / {INT8.qmax}"
            )


@rules.add("format")
def format_taken(subject: Subject) -> Iterator[Fault]:
    """Use an activation format that the target computes with, and a weight format that it reads."""
    for node in subject.sources:
        weight = is_constant(node.inputs[0])
        taken = subject.target.weight_dtypes if weight else subject.target.activation_dtypes
        name = format_name(node)
        bias = name == "int32" and weight and subject.limits.integer_bias
        if name and name not in taken and not bias:
            what = "constants" if weight else "activations"
            expected = " or ".join(sorted(kind.upper() for kind in taken))
            problem = f"{name.upper()} {what}: {subject.target.name} computes with {expected}"
            yield Fault(name_of(node), problem, f"quantize it to {expected}, or leave it float")


@rules.add("signedness")
def signedness(subject: Subject) -> Iterator[Fault]:
    """Use unsigned activations where the target's byte product takes unsigned ones, and signed elsewhere."""
    where = subject.target.unsigned_activations
    for pair in subject.products:
        weighted = any(operand.is_weight for operand in pair)
        if not all(operand.quantized for operand in pair):
            continue
        for operand in pair:
            if operand.is_weight:
                continue
            unsigned = where == "all" or (where == "weighted" and weighted)
            name = name_of(operand.quantize or operand.dequantize)
            if unsigned and operand.format == INT8.name:
                problem = f"a signed activation {subject.limits.signed_cost} on {subject.target.name}"
                yield Fault(name, problem, f"store the same values as UINT8, its zero point larger by {-INT8.qmin}")
            elif where == "weighted" and not weighted and operand.format == UINT8.name:
                problem = f"an unsigned operand of a product of activations: {subject.target.name} fuses signed ones"
                yield Fault(name, problem, "store it as INT8 with zero point 0")


@rules.add("saturating-weight")
def saturating_weight(subject: Subject) -> Iterator[Fault]:
    """Keep weights within the codes that the target's byte product can add up."""
    most = subject.target.weight_qmax
    if most is None:
        return
    for pair in subject.products:
        for operand in pair:
            codes = constant(operand.dequantize.inputs[0]) if operand.is_weight and operand.quantized else None
            if codes is None or operand.format != INT8.name:
                continue
            largest = int(np.abs(codes.astype(np.int16)).max())
            if largest > most:
                problem = (
                    f"a weight with codes up to {largest}: {subject.target.name} adds pairs of products in 16 bits, "
                    f"which hold weights up to {most}"
                )
                yield Fault(
                    name_of(operand.dequantize), problem, f"quantize the weights to codes up to {most} (reduce_range)"
                )
