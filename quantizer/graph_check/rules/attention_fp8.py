"""Rules of attention in FP8: all four operands, and a fixed scale for the probabilities."""

from __future__ import annotations

from collections.abc import Iterator

from quantizer.graph_check.finding import Fault
from quantizer.graph_check.rule import rules
from quantizer.graph_check.subject import Subject
from quantizer.numerics.qtype import FP8, INT8
from quantizer.qdq.graph import constant, name_of

_SCALE = 1 / FP8.qmax
_HALF_STEP = 2**-8
"""The coarsest rounding of a scale, that of bfloat16, relative to it."""


@rules.add("fp8-attention")
def fp8_attention(subject: Subject) -> Iterator[Fault]:
    """Quantize all four operands of attention in FP8, its probabilities with the scale 1/448."""
    for entry in subject.attentions:
        formats = [operand.format for operand in entry.operands]
        if FP8.name not in formats:
            continue
        if set(formats) != {FP8.name}:
            names = ("queries", "keys", "probabilities", "values")
            rest = ", ".join(what for what, kind in zip(names, formats, strict=True) if kind != FP8.name)
            problem = f"an attention in FP8 by a part: its {rest} are not in FP8"
            yield Fault(
                name_of(entry.softmax), problem, "quantize queries, keys, probabilities and values to FP8, or none"
            )
            continue
        probabilities = entry.operands[2]
        held = constant(probabilities.dequantize.inputs[1])
        if held is not None and (held.size != 1 or abs(float(held.reshape(-1)[0]) / _SCALE - 1) > _HALF_STEP):
            problem = f"the probabilities have the scale {float(held.reshape(-1)[0]):.4g}, not 1/{FP8.qmax}"
            advice = f"use 1/{FP8.qmax}: softmax gives at most 1, and the fused kernel takes this scale alone"
            yield Fault(name_of(probabilities.quantize or probabilities.dequantize), problem, advice)


@rules.add("int8-with-fp8-attention")
def int8_with_fp8_attention(subject: Subject) -> Iterator[Fault]:
    """Keep INT8 products out of a graph with attention in FP8: before Blackwell such an engine does not build."""
    if not any(operand.format == FP8.name for entry in subject.attentions for operand in entry.operands):
        return
    fused = {operand.product for entry in subject.attentions for operand in entry.operands}
    products = [pair for pair in subject.products if pair[0].product not in fused]
    found = [pair[0] for pair in products if all(operand.format == INT8.name for operand in pair)]
    if found:
        problem = f"{len(found)} products in INT8 beside attention in FP8: such an engine is built for Blackwell alone"
        yield Fault(name_of(found[0].product), problem, "quantize the linears to FP8 too, or leave attention float")
