"""Rules of number formats, element types, scales and stored weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from quantizer.check.checked_file import Fault, Subject, rules
from quantizer.check.rules.operators import is_quantized_operator, opset_format
from quantizer.export.qdq.graph import (
    HALVES,
    WIDTHS,
    attribute,
    constant,
    element,
    format_name,
    has_odd_pairs,
    is_constant,
    is_dequantize,
    is_quantize,
    maker,
    name_of,
    shape,
    type_groups,
)
from quantizer.export.qdq.operand import Operand
from quantizer.numerics.formats import INT8, UINT8


@rules.add("zero-point")
def zero_point(subject: Subject) -> Iterator[Fault]:
    """Leave out zero points, or store zeros."""
    for node in subject.sources:
        if len(node.inputs) < 3 or node.inputs[2] is None:
            continue
        if not is_constant(node.inputs[2]):
            yield Fault(name_of(node), "its zero point is computed when the model runs", "quantize symmetrically")
            continue
        zeros = constant(node.inputs[2])
        if zeros is not None and np.any(zeros.astype(np.float32)):
            numbers = zeros.astype(np.float32).reshape(-1)
            problem = (
                f"its zero point is {numbers[np.flatnonzero(numbers)[0]]:g}, and {subject.target.name} accepts only 0"
            )
            yield Fault(
                name_of(node), problem, f"quantize symmetrically: zero point 0, scale = largest magnitude / {INT8.qmax}"
            )


@rules.add("format")
def number_format(subject: Subject) -> Iterator[Fault]:
    """Use an activation format that the target computes with, and a weight format that it reads."""
    for node in subject.sources:
        weight = is_constant(node.inputs[0])
        accepted = subject.target.weight_dtypes if weight else subject.target.activation_dtypes
        name = format_name(node)
        bias = name == "int32" and weight and subject.limits.integer_bias
        if name and name not in accepted and not bias:
            role = "constants" if weight else "activations"
            expected = " or ".join(sorted(kind.upper() for kind in accepted))
            problem = f"{name.upper()} {role}: {subject.target.name} computes with {expected}"
            yield Fault(name_of(node), problem, f"quantize it to {expected}, or keep it in float")


@rules.add("signedness")
def signedness(subject: Subject) -> Iterator[Fault]:
    """Use unsigned activations where the target's INT8 instruction expects them, and signed ones elsewhere."""
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
                yield Fault(name, problem, f"store it as UINT8 and add {-INT8.qmin} to its zero point")
            elif where == "weighted" and not weighted and operand.format == UINT8.name:
                problem = (
                    f"an unsigned operand of a MatMul of two activations: {subject.target.name} fuses only signed ones"
                )
                yield Fault(name, problem, "store it as INT8 with zero point 0")


@rules.add("saturating-weight")
def saturating_weight(subject: Subject) -> Iterator[Fault]:
    """Keep INT8 weights within the range that the target can accumulate without overflow."""
    limit = subject.target.weight_qmax
    if limit is None:
        return
    for pair in subject.products:
        for operand in pair:
            values = constant(operand.dequantize.inputs[0]) if operand.is_weight and operand.quantized else None
            if values is None or operand.format != INT8.name:
                continue
            largest = int(np.abs(values.astype(np.int16)).max())
            if largest > limit:
                problem = (
                    f"the weight has quantized values up to {largest}: {subject.target.name} adds two products in 16 "
                    f"bits, which overflows for weights above {limit}"
                )
                yield Fault(name_of(operand.dequantize), problem, f"limit quantized weights to {limit} (reduce_range)")


_OF_ANY_TYPE = frozenset({"Cast", "CastLike", "QuantizeLinear", "DequantizeLinear", "Identity", "Reshape", "Transpose"})


@rules.add("mixed-types")
def mixed_types(subject: Subject) -> Iterator[Fault]:
    """Give all inputs that share a type parameter in ONNX the same element type."""
    if any(opset_format(subject)):
        return  # in an older opset a DequantizeLinear returns float32, which the rule opset-format reports
    for node in subject.nodes:
        if is_quantize(node) or is_dequantize(node):
            continue  # the rule scale-type checks them
        for group in type_groups(node, subject.opset):
            types = [element(node.inputs[place]) for place in group.inputs]
            if len(kinds := dict.fromkeys(filter(None, types))) > 1:
                problem = f"its inputs have different element types, {' and '.join(kinds)}, where ONNX requires one"
                yield Fault(name_of(node), problem, "cast them to the type of the neighboring operations")


@rules.add("element-type")
def element_type(subject: Subject) -> Iterator[Fault]:
    """Use only element types that the target's operators accept."""
    narrow, absent = subject.limits.narrow_inputs, subject.limits.absent_floats
    for node in subject.nodes:
        kinds = {element(value) for value in node.inputs if value is not None}
        if node.op_type not in _OF_ANY_TYPE and (unsupported := sorted(kinds & absent)):
            problem = f"{subject.target.name} has no {node.op_type} of {unsupported[0]}"
            yield Fault(name_of(node), problem, "cast its inputs to FLOAT")
        elif narrow & kinds and not (
            node.op_type in ("Cast", "QuantizeLinear", "DequantizeLinear") or _quantizes(node)
        ):
            kind = sorted(narrow & kinds)[0]
            problem = f"it reads {kind}, which {subject.target.name} accepts only as a model input"
            yield Fault(name_of(node), problem, f"cast the {kind} input to INT32 or a float type first")


def _quantizes(node: Any) -> bool:
    """Return whether a node computes with quantized values, which other rules check."""
    return is_quantized_operator(node) or any(is_quantize(maker(value)) for value in node.inputs)


@rules.add("unconverted-float32")
def unconverted_float32(subject: Subject) -> Iterator[Fault]:
    """Use half precision where the target is strongly typed: FP32 tensors make an FP32 engine."""
    halves = {name for name, ours in WIDTHS.items() if name in HALVES and ours == subject.target.float_dtype}
    if not halves:
        return
    types = [_float_type(pair[0]) for pair in subject.products]
    if "FLOAT" in types and not set(HALVES) & set(types):
        problem = (
            f"all {types.count('FLOAT')} MatMul, Gemm and Conv nodes have float32 tensors: {subject.target.name} uses "
            "the types of the graph, so non-quantized operations run in float32"
        )
        yield Fault("", problem, f"convert the model to {subject.target.float_dtype} before export, scales included")


def _float_type(operand: Operand) -> str:
    """Return the float type in which an operation computes without quantization."""
    if operand.quantized and not operand.between:
        return element(operand.dequantize.inputs[1])
    return element(operand.product.inputs[operand.index])


@rules.add("scale-constant")
def scale_constant(subject: Subject) -> Iterator[Fault]:
    """Store scales as constants of the file."""
    for node in subject.sources:
        if not is_constant(node.inputs[1]):
            problem = f"its scale {node.inputs[1].name} is computed when the model runs"
            yield Fault(name_of(node), problem, "calibrate, and store the scale as a constant")


@rules.add("dynamic-range")
def dynamic_range(subject: Subject) -> Iterator[Fault]:
    """Compute ranges at run time only where the target has kernels for it."""
    if subject.target.reads_dynamic or "DynamicQuantizeLinear" in subject.limits.refused:
        return
    for node in subject.dynamic_quantizes:
        problem = (
            f"{subject.target.name} computes the range, and the operations that read the tensor, in floating point"
        )
        yield Fault(name_of(node), problem, "calibrate, and store the scale as a constant in a QuantizeLinear")


@rules.add("scale-value")
def scale_value(subject: Subject) -> Iterator[Fault]:
    """Use finite scales above 0."""
    for node in subject.sources:
        array = constant(node.inputs[1])
        if array is None:
            continue
        scale = array.astype(np.float32).reshape(-1)
        wrong = scale[~(np.isfinite(scale) & (scale > 0))]
        if wrong.size:
            count = f"{wrong.size} of {scale.size} scales are" if scale.size > 1 else "its scale is"
            problem = f"{count} not a finite number above 0, such as {wrong[0]}"
            yield Fault(
                name_of(node),
                problem,
                "calibrate with samples that reach this tensor, and use scale 1 for a range of 0",
            )


@rules.add("scale-type")
def scale_type(subject: Subject) -> Iterator[Fault]:
    """Give a scale the float type of the tensor that it quantizes."""
    for node in subject.quantizes:
        scale, tensor = element(node.inputs[1]), element(node.inputs[0])
        if scale and tensor and scale != tensor:
            problem = f"its scale is {scale} and its input is {tensor}"
            yield Fault(name_of(node), problem, f"store the scale as {tensor}")
    for node in subject.dequantizes:
        before = node.inputs[0].producer()
        if before is None or before.op_type != "QuantizeLinear":
            continue
        scale, tensor = element(node.inputs[1]), element(before.inputs[1])
        if scale and tensor and scale != tensor:
            problem = f"its scale is {scale}, and the scale of its QuantizeLinear is {tensor}"
            yield Fault(name_of(node), problem, f"store both scales as {tensor}")


def _weights(subject: Subject) -> Iterator[Operand]:
    """Yield each quantized weight once."""
    reported = set()
    for pair in subject.products:
        for operand in pair:
            if operand.is_weight and operand.quantized and operand.dequantize not in reported:
                reported.add(operand.dequantize)
                yield operand


@rules.add("float-weight")
def float_weight(subject: Subject) -> Iterator[Fault]:
    """Store weights as quantized values."""
    for weight in _weights(subject):
        if weight.quantize is not None:
            problem = (
                "a weight is stored in float and quantized when the engine is built: the file is larger than needed"
            )
            yield Fault(
                name_of(weight.quantize), problem, "store the quantized values, and only a DequantizeLinear behind them"
            )


@rules.add("turned-weight")
def turned_weight(subject: Subject) -> Iterator[Fault]:
    """Store a weight in the layout that the operation reads."""
    for weight in _weights(subject):
        moved = [node for node in weight.between if node.op_type != "Cast"]
        if moved:
            problem = f"it is between the DequantizeLinear of a weight and {name_of(weight.product)}"
            yield Fault(
                name_of(moved[0]), problem, "store the weight in the layout that the operation reads: [K, N] for MatMul"
            )


@rules.add("odd-pairs")
def odd_pairs(subject: Subject) -> Iterator[Fault]:
    """Store a 4-bit weight with an odd number of inputs as bytes where the target mixes up its rows."""
    for node in filter(has_odd_pairs, subject.nodes) if subject.target.even_pairs else ():
        problem = f"a 4-bit weight with an odd number of inputs: {subject.target.name} mixes up its rows"
        yield Fault(name_of(node), problem, "store the same values as INT8 (UINT8 for UINT4), or add an input of zeros")


@rules.add("weight-axis")
def weight_axis(subject: Subject) -> Iterator[Fault]:
    """Give a weight one scale per output channel: axis 1 for MatMul, 0 for Gemm with transB and for Conv."""
    for weight in _weights(subject):
        scale, stored = shape(weight.dequantize.inputs[1]), shape(weight.dequantize.inputs[0])
        if scale is None or stored is None or scale in ((), (1,)) or attribute(weight.dequantize, "block_size", 0):
            continue
        axis = attribute(weight.dequantize, "axis", 1) % len(stored)
        expected = _channels(weight, len(stored))
        if expected is not None and axis != expected:
            problem = (
                f"its scales are along axis {axis} of the weight {list(stored)}; the output channels of "
                f"{weight.product.op_type} {name_of(weight.product)} are on axis {expected}"
            )
            yield Fault(
                name_of(weight.dequantize), problem, f"quantize the weight with one scale per {_index(expected)}"
            )


def _index(axis: int) -> str:
    return "row" if axis == 0 else f"index of axis {axis}"


def _channels(weight: Operand, rank: int) -> int | None:
    """Return the axis of the output channels in the stored weight; None if nodes in between hide it."""
    moves = [node for node in weight.between if node.op_type not in ("Cast", "Identity")]
    turned = len(moves) == 1 and moves[0].op_type == "Transpose" and rank == 2
    if moves and not turned:
        return None
    kind = weight.product.op_type
    if kind == "Conv":
        return 0
    if kind == "ConvTranspose":
        return 1 if attribute(weight.product, "group", 1) == 1 else None
    last = weight.index == 1
    if kind == "Gemm" and attribute(weight.product, "transB" if last else "transA", 0):
        last = not last
    if rank == 1:
        return None
    axis = rank - 1 if last else rank - 2
    return 1 - axis if turned else axis


@rules.add("activation-channels")
def activation_channels(subject: Subject) -> Iterator[Fault]:
    """Quantize activations per tensor: one scale for the whole tensor."""
    for pair in subject.products:
        for operand in pair:
            if operand.is_weight or not operand.quantized:
                continue
            scale = shape(operand.dequantize.inputs[1])
            if scale is not None and scale not in ((), (1,)):
                node = operand.quantize or operand.dequantize
                problem = (
                    f"an activation with scales {list(scale)}: a quantized MatMul, Gemm or Conv needs one scale for it"
                )
                yield Fault(name_of(node), problem, "quantize activations per tensor, and weights per channel")
