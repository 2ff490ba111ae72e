"""Rules of attention: both products quantized or neither, in sizes that are fused.

Rules of attention in FP8: all four operands, and a fixed scale for the probabilities.

Rule of mask constants: half precision can add to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from quantizer.check.checked_file import Fault, Subject, rules
from quantizer.export.qdq.graph import constant, name_of, readers, shape
from quantizer.export.qdq.operand import Attention, masks_only
from quantizer.numerics.formats import FLOAT16_MASK, FP8, INT8


@rules.add("half-attention")
def half_attention(subject: Subject) -> Iterator[Fault]:
    """Quantize both products of an attention, or neither."""
    for entry in subject.attentions:
        scores = all(operand.quantized for operand in entry.operands[:2])
        context = all(operand.quantized for operand in entry.operands[2:])
        in_fp8 = any(operand.format == FP8.name for operand in entry.operands)
        if scores != context and not in_fp8:  # fp8-attention reports it
            low, high = (entry.scores, entry.context) if scores else (entry.context, entry.scores)
            problem = f"{name_of(low)} is quantized and {name_of(high)}, the other product of the attention, is not"
            yield Fault(
                name_of(low), f"{problem}: such an attention is not fused", "quantize all four operands, or none"
            )


@rules.add("attention-size")
def attention_size(subject: Subject) -> Iterator[Fault]:
    """Quantize attention only with a head size and a sequence length with which it is fused."""
    for entry in subject.attentions:
        formats = {operand.format for operand in entry.operands}
        if len(formats) == 1:
            reason = subject.target.attention_reason(formats.pop(), _head_size(entry), _sequence(entry))
            if reason is not None:
                yield Fault(name_of(entry.softmax), reason, "leave this attention float: then it is fused as that")


def _head_size(entry: Attention) -> int:
    """Return the size of a head; 0 if unknown."""
    queries = shape(entry.scores.inputs[0])
    return (queries[-1] or 0) if queries else 0


def _sequence(entry: Attention) -> int:
    """Return the longer of the query and key sequences; 0 if unknown."""
    scores = shape(entry.softmax.inputs[0])
    return max((size or 0 for size in (scores or ())[-2:]), default=0)


@rules.add("attention-operator")
def attention_operator(subject: Subject) -> Iterator[Fault]:
    """Spell out attention in a quantized graph: the operator has no place for a quantizer behind its softmax."""
    if not subject.quantizes and not subject.dequantizes:
        return
    for node in subject.nodes:
        if node.op_type == "Attention":
            problem = "the Attention operator has no place for the quantizer behind its softmax, so it is not quantized"
            yield Fault(name_of(node), problem, "export with eager attention: MatMul, Softmax, MatMul")


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


@rules.add("mask-range")
def mask_range(subject: Subject) -> Iterator[Fault]:
    """Keep a mask's constant within FP16, with room for the scores that are added to it."""
    for node in subject.nodes:
        for index, value in enumerate(node.inputs):
            held = constant(value)
            if held is None or not held.size or str(held.dtype) not in ("float16", "float32"):
                continue
            lowest = float(np.min(held))
            low = lowest < FLOAT16_MASK and (held.dtype == np.float16 or (lowest < _LOWEST and _becomes_half(node)))
            if low and masks_only(node, index):
                problem = (
                    f"the constant {lowest:.5g} in half precision: added to a score it is -inf, and a row of -inf is "
                    "NaN after softmax"
                )
                yield Fault(name_of(node), problem, f"use {FLOAT16_MASK:g}: exp of it is 0 too")


_LOWEST = float(np.finfo(np.float16).min)


def _becomes_half(node: Any) -> bool:
    """Return whether a node's result is FP16, directly or behind a Cast."""
    if node.op_type == "Cast":
        return str(node.outputs[0].dtype) == "FLOAT16"
    casts = [reader for reader in readers(node.outputs[0]) if reader.op_type == "Cast"]
    return any(str(cast.outputs[0].dtype) == "FLOAT16" for cast in casts)
