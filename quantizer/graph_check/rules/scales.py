"""Rules of scales: constants, positive, of the float type of the quantized tensor."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quantizer.graph_check.finding import Fault
from quantizer.graph_check.rule import rules
from quantizer.graph_check.subject import Subject
from quantizer.qdq.graph import constant, element, is_constant, name_of


@rules.add("scale-constant")
def scale_constant(subject: Subject) -> Iterator[Fault]:
    """Store scales as constants of the file."""
    for node in subject.sources:
        if not is_constant(node.inputs[1]):
            problem = f"its scale {node.inputs[1].name} is computed when the model runs"
            yield Fault(name_of(node), problem, "calibrate, and store the scale as a constant")


@rules.add("dynamic-range")
def dynamic_range(subject: Subject) -> Iterator[Fault]:
    """Take ranges at run time only where the target has kernels for them."""
    if subject.target.reads_dynamic or "DynamicQuantizeLinear" in subject.limits.refused:
        return
    for node in subject.dynamic_quantizes:
        problem = f"{subject.target.name} computes the range in floats, and the products that read the tensor too"
        yield Fault(name_of(node), problem, "calibrate, and store the scale as a constant in a QuantizeLinear")


@rules.add("scale-value")
def scale_value(subject: Subject) -> Iterator[Fault]:
    """Use finite scales above 0."""
    for node in subject.sources:
        held = constant(node.inputs[1])
        if held is None:
            continue
        scale = held.astype(np.float32).reshape(-1)
        wrong = scale[~(np.isfinite(scale) & (scale > 0))]
        if wrong.size:
            share = f"{wrong.size} of {scale.size} scales are" if scale.size > 1 else "its scale is"
            problem = f"{share} not a number above 0, such as {wrong[0]}"
            yield Fault(
                name_of(node), problem, "calibrate with data that reaches this tensor, and use 1 for a range of 0"
            )


@rules.add("scale-type")
def scale_type(subject: Subject) -> Iterator[Fault]:
    """Give a scale the float type of the tensor that is quantized."""
    for node in subject.quantizes:
        scale, tensor = element(node.inputs[1]), element(node.inputs[0])
        if scale and tensor and scale != tensor:
            problem = f"its scale is {scale} and its input {tensor}"
            yield Fault(name_of(node), problem, f"store the scale as {tensor}")
    for node in subject.dequantizes:
        before = node.inputs[0].producer()
        if before is None or before.op_type != "QuantizeLinear":
            continue
        scale, tensor = element(node.inputs[1]), element(before.inputs[1])
        if scale and tensor and scale != tensor:
            problem = f"its scale is {scale}, that of its QuantizeLinear {tensor}"
            yield Fault(name_of(node), problem, f"store both scales as {tensor}")
