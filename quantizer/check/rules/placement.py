"""Rules of which sites and operands to quantize, and of patterns that a target fuses wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quantizer.check.checked_file import Fault, Subject, rules
from quantizer.export.qdq.graph import (
    attribute,
    is_constant,
    is_dequantize,
    is_quantize,
    maker,
    name_of,
    quantized_type,
    varying_inputs,
)
from quantizer.export.qdq.openvino import (
    BY_NUMBER,
    gathers_axis,
    gathers_zero_points,
    is_read_both_ways,
    is_shared_product,
    joins_before,
    misplaces_numbers,
    misreads_channels,
    misreads_channels_before,
    scales_by_negatives,
    scales_flat_product,
    sized_biases,
)
from quantizer.export.qdq.operand import PRODUCTS, Operand, mask_adds
from quantizer.numerics.formats import INT4


@rules.add("half-site")
def half_site(subject: Subject) -> Iterator[Fault]:
    """Quantize both operands of a MatMul, Gemm or Conv, or neither; weights alone only to save memory on purpose."""
    weights_alone = all(is_constant(node.inputs[0]) for node in [*subject.quantizes, *subject.dynamic_quantizes])
    for pair in subject.products:
        if pair[0].quantized == pair[1].quantized:
            continue
        quantized, other = sorted(pair, key=lambda operand: not operand.quantized)
        if quantized.is_weight and (weights_alone or _for_memory(quantized)):
            continue
        problem = f"{_role(quantized)} is quantized and {_role(other)} is not: the operation computes in floating point"
        yield Fault(
            name_of(quantized.product), problem, f"quantize {_short(other)}, or keep {_short(quantized)} in float"
        )


def _for_memory(weight: Operand) -> bool:
    return weight.format == INT4.name or attribute(weight.dequantize, "block_size", 0) > 0


def _role(operand: Operand) -> str:
    name = operand.product.inputs[operand.index].name
    return _short(operand) if operand.is_weight else f"{_short(operand)} ({name})"


def _short(operand: Operand) -> str:
    return "the weight" if operand.is_weight else f"input {operand.index}"


@rules.add("site-kind")
def site_kind(subject: Subject) -> Iterator[Fault]:
    """Quantize only the kinds of sites that gain on the target."""
    advice = "keep it in float"
    kinds = subject.target.site_kinds
    for pair in subject.products:
        weighted = any(operand.is_weight for operand in pair)
        if "matmul" not in kinds and not weighted and all(operand.quantized for operand in pair):
            problem = f"a MatMul of two activations gains nothing from quantization on {subject.target.name}"
            yield Fault(name_of(pair[0].product), problem, advice)
    if "residual_add" in kinds:
        return
    integer = set(subject.results.values())
    for node in subject.nodes:
        if node in integer:
            continue
        activations = [value for value in node.inputs if not is_constant(value)] if node.op_type == "Add" else []
        if len(activations) == 2 and any(map(_rounded, activations)):
            problem = f"an Add gains nothing from quantization on {subject.target.name}"
            yield Fault(name_of(node), problem, advice)


def _rounded(value: Any) -> bool:
    """Return whether a value is rounded at run time; stored quantized constants are not."""
    node = maker(value)
    return is_dequantize(node) and is_quantize(maker(node.inputs[0]))


@rules.add("quantized-bias")
def quantized_bias(subject: Subject) -> Iterator[Fault]:
    """Keep a bias in float."""
    for node in subject.nodes:
        for value in _biases(node):
            before = maker(value)
            if not is_dequantize(before) or (subject.limits.integer_bias and quantized_type(before) == "INT32"):
                continue
            problem = f"the bias of {name_of(node)} is rounded, which gains nothing"
            yield Fault(name_of(before), problem, "add the float bias")


@rules.add("gemm-bias")
def gemm_bias(subject: Subject) -> Iterator[Fault]:
    """Keep float biases out of a quantized Gemm."""
    advice = "write it as MatMul and Add, or give it an INT32 bias behind a DequantizeLinear"
    for pair in subject.products:
        node = pair[0].product
        quantized = node.op_type == "Gemm" and all(operand.quantized for operand in pair)
        if quantized and not all(is_dequantize(maker(value)) for value in _biases(node)):
            yield Fault(
                name_of(node),
                f"{subject.target.name} computes it in floating point, because its bias is a float",
                advice,
            )


def _biases(node: Any) -> list[Any]:
    """Return the constants that a node adds to the result of a matrix multiplication."""
    if node.op_type in PRODUCTS:
        return [value for value in node.inputs[2:] if value is not None]
    if node.op_type == "Add" and any(getattr(maker(value), "op_type", "") in PRODUCTS for value in node.inputs):
        return [value for value in node.inputs if is_constant(value)]
    return []


@rules.add("fused-reduction")
def fused_reduction(subject: Subject) -> Iterator[Fault]:
    """Separate a reduction from the operators behind it that the target would fuse wrongly."""
    advice = "insert Max(y, y) behind it, which separates the two and changes no value"
    reported = set()
    for operand in (operand for pair in subject.products for operand in pair if all(entry.quantized for entry in pair)):
        node = None if operand.quantize is None else _fused_with(operand.quantize)
        if node is not None and node.op_type in subject.target.unfused_reductions and node not in reported:
            reported.add(node)
            problem = (
                f"{subject.target.name} stores its result in the integers of {name_of(operand.quantize)}, unscaled"
            )
            yield Fault(name_of(node), problem, advice)
    quantized = any(map(is_quantize, subject.nodes))
    for node in subject.nodes:
        if node.op_type not in subject.target.misread_reductions or node in reported:
            continue
        if misreads_channels(node) or (quantized and misreads_channels_before(node)):
            problem = f"{subject.target.name} multiplies its result by the factors of other channels"
            yield Fault(name_of(node), problem, advice)


@rules.add("fused-product")
def fused_product(subject: Subject) -> Iterator[Fault]:
    """Separate per-channel factors from the QuantizeLinear behind them where the target would fuse them wrongly."""
    advice = "insert Max(x, x) before the QuantizeLinear, which separates the two and changes no value"
    for node in subject.nodes if subject.target.unfused_products else ():
        if scales_flat_product(node):
            problem = f"with small fixed sizes, {subject.target.name} computes its input wrongly"
            yield Fault(name_of(node), problem, advice)
        elif scales_by_negatives(node):
            problem = (
                f"the per-channel factors before it are not all positive: {subject.target.name} can apply wrong ones"
            )
            yield Fault(name_of(node), problem, advice)


@rules.add("misread-numbers")
def misread_numbers(subject: Subject) -> Iterator[Fault]:
    """Separate matrix multiplications from constants, and weights from their transposes, that it would misread."""
    for node in subject.nodes if subject.target.unfused_products else ():
        if misplaces_numbers(node):
            problem = (
                f"{subject.target.name} applies its constant along another axis of the matrix multiplication before it"
            )
            yield Fault(name_of(node), problem, "insert Max(y, y) before it, which changes no value")
        elif is_read_both_ways(node):
            problem = f"another operation reads its square weight directly, and {subject.target.name} confuses the two"
            yield Fault(name_of(node), problem, "give it a copy of the weight")


@rules.add("shared-product")
def shared_product(subject: Subject) -> Iterator[Fault]:
    """Share no result of a quantized MatMul or Conv where the target would misplace its scales or bias."""
    advice = "let the others read its result through a Clip that changes no value, or give it a bias"
    for node in subject.nodes if subject.target.unshared_products else ():
        if is_shared_product(node):
            problem = f"several nodes read it, and it has no bias: {subject.target.name} can apply its scale twice"
            yield Fault(name_of(node), problem, advice)
    for node in sized_biases(subject.nodes) if subject.target.unshared_products else ():
        problem = f"{subject.target.name} can lose its bias because the file computes sizes (Shape, Size, Resize)"
        yield Fault(name_of(node), problem, "write the bias as an Add behind it")


@rules.add("gathered-axis")
def gathered_axis(subject: Subject) -> Iterator[Fault]:
    """Keep the axis that a Gather indexes behind a quantized result, and zero points away from Concat."""
    for node in subject.nodes if subject.target.kept_axes else ():
        if gathers_zero_points(node):
            problem = f"{subject.target.name} moves the zero point of the operation before it behind it, and crashes"
            yield Fault(name_of(node), problem, "insert Max(y, y) before it, which changes no value")
        elif gathers_axis(node):
            problem = f"{subject.target.name} gives its result one axis too many, and refuses the file or crashes"
            yield Fault(name_of(node), problem, "use an index of one element, and a Squeeze of that axis behind it")
        elif joins_before(node):
            problem = f"{subject.target.name} joins its zero point along the axis of its Concat, and refuses the file"
            yield Fault(name_of(node), problem, "insert Max(x, x) before the QuantizeLinear, which changes no value")


def _fused_with(quantize: Any) -> Any:
    """Return the node before a Q and the elementwise operators in front of it; None if others read its result."""
    value = quantize.inputs[0]
    while len(value.uses()) == 1 and (node := maker(value)) is not None:
        varying = varying_inputs(node)
        if node.op_type not in BY_NUMBER or len(varying) != 1:
            return node
        value = varying[0]
    return None


@rules.add("quantized-mask")
def quantized_mask(subject: Subject) -> Iterator[Fault]:
    """Keep the Add of an attention mask in float."""
    for add in mask_adds(subject.nodes):
        before = next((maker(value) for value in add.inputs if is_dequantize(maker(value))), None)
        if before is not None:
            problem = (
                f"it rounds an operand of {name_of(add)}, which adds the attention mask: the mask dominates its range"
            )
            yield Fault(name_of(before), problem, "keep scores and mask in float")


@rules.add("residual-side")
def residual_side(subject: Subject) -> Iterator[Fault]:
    """Quantize the skip connection if only one operand of a residual Add is quantized."""
    masks = set(mask_adds(subject.nodes))
    for node in subject.nodes:
        if node.op_type != "Add" or node in masks or any(is_constant(value) for value in node.inputs):
            continue
        quantized = [value for value in node.inputs if is_dequantize(maker(value))]
        if len(quantized) != 1:
            continue
        other = next(value for value in node.inputs if value is not quantized[0])
        if _from_product(quantized[0]) and not _from_product(other):
            problem = (
                f"it adds a rounded operation result to {other.name}, which is not quantized: "
                "the rounding gains nothing, and the skip connection is read in float"
            )
            yield Fault(name_of(node), problem, f"quantize {other.name}, or neither operand")


def _from_product(value: Any) -> bool:
    """Return whether a value is the result of a MatMul, Gemm or Conv, with its bias, requantized or not."""
    node = maker(value)
    while node is not None:
        if node.op_type in PRODUCTS:
            return True
        bias = node.op_type == "Add" and any(is_constant(read) for read in node.inputs)
        if not (bias or is_dequantize(node) or is_quantize(node) or node.op_type in ("Identity", "Dropout", "Reshape")):
            return False
        node = maker(next((read for read in node.inputs if not is_constant(read)), None))
    return False
