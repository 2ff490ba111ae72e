"""Rules of weights: stored in codes, as the product reads them, with a scale for each output channel."""

from __future__ import annotations

from collections.abc import Iterator

from quantizer.graph_check.finding import Fault
from quantizer.graph_check.rule import rules
from quantizer.graph_check.subject import Subject
from quantizer.qdq.graph import attribute, name_of, shape
from quantizer.qdq.odd_pairs import has_odd_pairs
from quantizer.qdq.operand import Operand


def _weights(subject: Subject) -> Iterator[Operand]:
    """Yield the quantized weights of products, each once."""
    seen = set()
    for pair in subject.products:
        for operand in pair:
            if operand.is_weight and operand.quantized and operand.dequantize not in seen:
                seen.add(operand.dequantize)
                yield operand


@rules.add("float-weight")
def float_weight(subject: Subject) -> Iterator[Fault]:
    """Store weights in codes."""
    for weight in _weights(subject):
        if weight.quantize is not None:
            problem = (
                "a weight is stored as floats and quantized when the engine is built: the file is larger than needed"
            )
            yield Fault(name_of(weight.quantize), problem, "store the codes, with a DequantizeLinear alone")


@rules.add("turned-weight")
def turned_weight(subject: Subject) -> Iterator[Fault]:
    """Store a weight as the product reads it."""
    for weight in _weights(subject):
        moved = [node for node in weight.between if node.op_type != "Cast"]
        if moved:
            problem = f"stands between the DequantizeLinear of a weight and {name_of(weight.product)}"
            yield Fault(name_of(moved[0]), problem, "store the weight as the product reads it: [K, N] for MatMul")


@rules.add("odd-pairs")
def odd_pairs(subject: Subject) -> Iterator[Fault]:
    """Store a weight of 4 bits with an odd number of inputs in bytes where the target mixes up its rows."""
    for node in filter(has_odd_pairs, subject.nodes) if subject.target.even_pairs else ():
        problem = f"a weight of 4 bits with an odd number of inputs: {subject.target.name} mixes up its rows"
        yield Fault(name_of(node), problem, "store the same codes as INT8 (UINT8 for UINT4), or add an input of zeros")


@rules.add("weight-axis")
def weight_axis(subject: Subject) -> Iterator[Fault]:
    """Give a weight one scale for each output channel: axis 1 for MatMul, 0 for Gemm with transB and for Conv."""
    for weight in _weights(subject):
        scale, held = shape(weight.dequantize.inputs[1]), shape(weight.dequantize.inputs[0])
        if scale is None or held is None or scale in ((), (1,)) or attribute(weight.dequantize, "block_size", 0):
            continue
        axis = attribute(weight.dequantize, "axis", 1) % len(held)
        expected = _channels(weight, len(held))
        if expected is not None and axis != expected:
            problem = (
                f"its scales are along axis {axis} of the weight {list(held)}; the output channels of "
                f"{weight.product.op_type} {name_of(weight.product)} are on axis {expected}"
            )
            yield Fault(
                name_of(weight.dequantize), problem, f"quantize the weight with one scale for each {_index(expected)}"
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
    """Give an activation one scale."""
    for pair in subject.products:
        for operand in pair:
            if operand.is_weight or not operand.quantized:
                continue
            scale = shape(operand.dequantize.inputs[1])
            if scale is not None and scale not in ((), (1,)):
                node = operand.quantize or operand.dequantize
                problem = f"an activation with scales {list(scale)}: a product in low precision takes one scale for it"
                yield Fault(name_of(node), problem, "quantize activations per tensor, and weights per channel")
