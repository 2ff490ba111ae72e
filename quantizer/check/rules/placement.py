"""Rules of placement: the sites that are quantized, and their operands.

Rule of residual adds: reading the operand that skips the block is what costs time.
"""

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
    steps_type,
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
    """Quantize both operands of a product, or neither; weights alone only to save memory on purpose."""
    weights_alone = all(is_constant(node.inputs[0]) for node in [*subject.quantizes, *subject.dynamic_quantizes])
    for pair in subject.products:
        if pair[0].quantized == pair[1].quantized:
            continue
        low, high = sorted(pair, key=lambda operand: not operand.quantized)
        if low.is_weight and (weights_alone or _for_memory(low)):
            continue
        problem = f"{_role(low)} is quantized and {_role(high)} is not: the product computes with floats"
        yield Fault(name_of(low.product), problem, f"quantize {_short(high)} too, or leave {_short(low)} float")


def _for_memory(weight: Operand) -> bool:
    return weight.format == INT4.name or attribute(weight.dequantize, "block_size", 0) > 0


def _role(operand: Operand) -> str:
    name = operand.product.inputs[operand.index].name
    return _short(operand) if operand.is_weight else f"{_short(operand)} ({name})"


def _short(operand: Operand) -> str:
    return "the weight" if operand.is_weight else f"input {operand.index}"


@rules.add("site-kind")
def site_kind(subject: Subject) -> Iterator[Fault]:
    """Quantize only kinds of sites that gain on the target."""
    advice = "leave it float"
    kinds = subject.target.site_kinds
    for pair in subject.products:
        weighted = any(operand.is_weight for operand in pair)
        if "matmul" not in kinds and not weighted and all(operand.quantized for operand in pair):
            problem = f"a product of two activations gains nothing from integer codes on {subject.target.name}"
            yield Fault(name_of(pair[0].product), problem, advice)
    if "residual_add" in kinds:
        return
    integer = set(subject.results.values())
    for node in subject.nodes:
        if node in integer:
            continue
        activations = [value for value in node.inputs if not is_constant(value)] if node.op_type == "Add" else []
        if len(activations) == 2 and any(map(_rounded, activations)):
            problem = f"an add gains nothing from integer codes on {subject.target.name}"
            yield Fault(name_of(node), problem, advice)


def _rounded(value: Any) -> bool:
    """Return whether a value comes from a Q and its DQ; values of a table stored in codes are not rounded in a run."""
    node = maker(value)
    return is_dequantize(node) and is_quantize(maker(node.inputs[0]))


@rules.add("quantized-bias")
def quantized_bias(subject: Subject) -> Iterator[Fault]:
    """Keep a bias in float."""
    for node in subject.nodes:
        for value in _biases(node):
            before = maker(value)
            if not is_dequantize(before) or (subject.limits.integer_bias and steps_type(before) == "INT32"):
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
            yield Fault(name_of(node), f"with its float bias {subject.target.name} computes it in floats", advice)


def _biases(node: Any) -> list[Any]:
    """Return the constants that a node adds to a product."""
    if node.op_type in PRODUCTS:
        return [value for value in node.inputs[2:] if value is not None]
    if node.op_type == "Add" and any(getattr(maker(value), "op_type", "") in PRODUCTS for value in node.inputs):
        return [value for value in node.inputs if is_constant(value)]
    return []


@rules.add("fused-reduction")
def fused_reduction(subject: Subject) -> Iterator[Fault]:
    """Keep a reduction apart from what follows it where the target would fuse the two, and wrongly."""
    advice = "read its result twice, which keeps its values and the two apart: Max(y, y)"
    reported = set()
    for operand in (operand for pair in subject.products for operand in pair if all(entry.quantized for entry in pair)):
        node = None if operand.quantize is None else _fused_with(operand.quantize)
        if node is not None and node.op_type in subject.target.unfused_reductions and node not in reported:
            reported.add(node)
            problem = f"{subject.target.name} keeps its result in the bytes of {name_of(operand.quantize)}, unscaled"
            yield Fault(name_of(node), problem, advice)
    quantized = any(map(is_quantize, subject.nodes))
    for node in subject.nodes:
        if node.op_type not in subject.target.misread_reductions or node in reported:
            continue
        if misreads_channels(node) or (quantized and misreads_channels_before(node)):
            problem = f"{subject.target.name} would multiply its result by the factors of other channels"
            yield Fault(name_of(node), problem, advice)


@rules.add("fused-product")
def fused_product(subject: Subject) -> Iterator[Fault]:
    """Keep factors of channels apart from the QuantizeLinear behind them where the target would fuse them wrongly."""
    advice = "read the input of the Q twice, which keeps its values and the two apart: Max(y, y)"
    for node in subject.nodes if subject.target.unfused_products else ():
        if scales_flat_product(node):
            problem = f"where sizes are fixed and small, {subject.target.name} computes what it rounds wrongly"
            yield Fault(name_of(node), problem, advice)
        elif scales_by_negatives(node):
            problem = f"factors of channels before it are not all positive: {subject.target.name} can mistake them"
            yield Fault(name_of(node), problem, advice)


@rules.add("misread-numbers")
def misread_numbers(subject: Subject) -> Iterator[Fault]:
    """Keep matrix products apart from numbers, and weights from their transposes, that the target would misread."""
    for node in subject.nodes if subject.target.unfused_products else ():
        if misplaces_numbers(node):
            problem = f"{subject.target.name} would apply its numbers along another axis of the product before it"
            yield Fault(name_of(node), problem, "read the product twice, which keeps its values: Max(y, y)")
        elif is_read_both_ways(node):
            problem = f"a product reads its square weight as it is, and {subject.target.name} would mix the two up"
            yield Fault(name_of(node), problem, "give it a copy of the weight")


@rules.add("shared-product")
def shared_product(subject: Subject) -> Iterator[Fault]:
    """Keep the scales of a quantized product apart from its readers where the target would misplace them."""
    advice = "pass its result through a Clip that changes no value and that the others read, or give it a bias"
    for node in subject.nodes if subject.target.unshared_products else ():
        if is_shared_product(node):
            problem = f"several nodes read it, and it has no bias: {subject.target.name} can scale twice what they read"
            yield Fault(name_of(node), problem, advice)
    for node in sized_biases(subject.nodes) if subject.target.unshared_products else ():
        problem = f"{subject.target.name} may lose its bias where the file computes with sizes (Shape, Size, Resize)"
        yield Fault(name_of(node), problem, "write the bias as an Add behind it")


@rules.add("gathered-axis")
def gathered_axis(subject: Subject) -> Iterator[Fault]:
    """Keep the axis that an index takes out behind a quantized product, and zero points out of a concatenation."""
    for node in subject.nodes if subject.target.kept_axes else ():
        if gathers_zero_points(node):
            problem = f"{subject.target.name} moves the zero point of the product that it reads behind it, and crashes"
            yield Fault(name_of(node), problem, "read the product twice, which keeps its values: Max(y, y)")
        elif gathers_axis(node):
            problem = f"{subject.target.name} gives its result one axis too many, and refuses it or crashes"
            yield Fault(name_of(node), problem, "give it an index of one element, and a Squeeze of that axis behind it")
        elif joins_before(node):
            problem = (
                f"{subject.target.name} joins its zero point along the axis of the Concat before it, and refuses it"
            )
            yield Fault(name_of(node), problem, "read the input of the Q twice, which keeps the two apart: Max(y, y)")


def _fused_with(quantize: Any) -> Any:
    """Return the node before a Q and before all that is computed number by number; None where others read it too."""
    value = quantize.inputs[0]
    while len(value.uses()) == 1 and (node := maker(value)) is not None:
        varying = varying_inputs(node)
        if node.op_type not in BY_NUMBER or len(varying) != 1:
            return node
        value = varying[0]
    return None


@rules.add("quantized-mask")
def quantized_mask(subject: Subject) -> Iterator[Fault]:
    """Keep the add of an attention's mask in float."""
    for add in mask_adds(subject.nodes):
        before = next((maker(value) for value in add.inputs if is_dequantize(maker(value))), None)
        if before is not None:
            problem = (
                f"rounds an operand of {name_of(add)}, which adds the attention's mask: its range is that of the mask"
            )
            yield Fault(name_of(before), problem, "leave scores and mask float")


@rules.add("residual-side")
def residual_side(subject: Subject) -> Iterator[Fault]:
    """Quantize the operand that skips the block if only one operand of a residual add is quantized."""
    masks = set(mask_adds(subject.nodes))
    for node in subject.nodes:
        if node.op_type != "Add" or node in masks or any(is_constant(value) for value in node.inputs):
            continue
        low = [value for value in node.inputs if is_dequantize(maker(value))]
        if len(low) != 1:
            continue
        high = next(value for value in node.inputs if value is not low[0])
        if _from_product(low[0]) and not _from_product(high):
            problem = (
                f"adds the rounded output of a product to {high.name}, which is not quantized: "
                "the product's output is rounded for nothing, and the skipped operand is read as floats"
            )
            yield Fault(name_of(node), problem, f"quantize {high.name} (and the other too, or not), or neither")


def _from_product(value: Any) -> bool:
    """Return whether a value is the result of a product, with its bias, requantized or not."""
    node = maker(value)
    while node is not None:
        if node.op_type in PRODUCTS:
            return True
        bias = node.op_type == "Add" and any(is_constant(read) for read in node.inputs)
        if not (bias or is_dequantize(node) or is_quantize(node) or node.op_type in ("Identity", "Dropout", "Reshape")):
            return False
        node = maker(next((read for read in node.inputs if not is_constant(read)), None))
    return False
