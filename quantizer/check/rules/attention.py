"""Rules of attention: which operands to quantize, sizes that targets fuse, FP8, and constants of masks."""

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
    """Quantize both MatMuls of an attention, or neither."""
    for entry in subject.attentions:
        scores = all(operand.quantized for operand in entry.operands[:2])
        context = all(operand.quantized for operand in entry.operands[2:])
        in_fp8 = any(operand.format == FP8.name for operand in entry.operands)
        if scores != context and not in_fp8:  # fp8-attention reports it
            quantized, other = (entry.scores, entry.context) if scores else (entry.context, entry.scores)
            problem = (
                f"{name_of(quantized)} is quantized and {name_of(other)}, the other MatMul of the attention, is not"
            )
            yield Fault(
                name_of(quantized), f"{problem}; the target does not fuse it", "quantize all four operands, or none"
            )


@rules.add("attention-size")
def attention_size(subject: Subject) -> Iterator[Fault]:
    """Quantize attention only with a head size and a sequence length that the target fuses."""
    for entry in subject.attentions:
        formats = {operand.format for operand in entry.operands}
        if len(formats) == 1:
            reason = subject.target.attention_reason(formats.pop(), _head_size(entry), _sequence(entry))
            if reason is not None:
                yield Fault(name_of(entry.softmax), reason, "keep this attention in float: the target fuses it then")


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
    """Write attention as MatMul, Softmax, MatMul: the Attention operator cannot quantize its probabilities."""
    if not subject.quantizes and not subject.dequantizes:
        return
    for node in subject.nodes:
        if node.op_type == "Attention":
            problem = "the Attention operator has no output for its probabilities, so they are not quantized"
            yield Fault(name_of(node), problem, "export with eager attention: MatMul, Softmax, MatMul")


_SCALE = 1 / FP8.qmax
_SCALE_TOLERANCE = 2**-8
"""Relative rounding error of a scale in bfloat16, the coarsest type."""


@rules.add("fp8-attention")
def fp8_attention(subject: Subject) -> Iterator[Fault]:
    """Quantize all four operands of an FP8 attention, its probabilities with the scale 1/448."""
    for entry in subject.attentions:
        formats = [operand.format for operand in entry.operands]
        if FP8.name not in formats:
            continue
        if set(formats) != {FP8.name}:
            names = ("queries", "keys", "probabilities", "values")
            not_fp8 = ", ".join(name for name, format_ in zip(names, formats, strict=True) if format_ != FP8.name)
            problem = f"the attention is only partly in FP8: its {not_fp8} are not"
            yield Fault(
                name_of(entry.softmax), problem, "quantize queries, keys, probabilities and values to FP8, or none"
            )
            continue
        probabilities = entry.operands[2]
        scale = constant(probabilities.dequantize.inputs[1])
        if scale is not None and (scale.size != 1 or abs(float(scale.reshape(-1)[0]) / _SCALE - 1) > _SCALE_TOLERANCE):
            problem = f"the probabilities have the scale {float(scale.reshape(-1)[0]):.4g}, not 1/{FP8.qmax}"
            advice = f"use 1/{FP8.qmax}: softmax returns at most 1, and the fused kernel accepts only this scale"
            yield Fault(name_of(probabilities.quantize or probabilities.dequantize), problem, advice)


@rules.add("int8-with-fp8-attention")
def int8_with_fp8_attention(subject: Subject) -> Iterator[Fault]:
    """Use no INT8 MatMul or Conv beside FP8 attention: before Blackwell such an engine does not build."""
    if not any(operand.format == FP8.name for entry in subject.attentions for operand in entry.operands):
        return
    fused = {operand.product for entry in subject.attentions for operand in entry.operands}
    products = [pair for pair in subject.products if pair[0].product not in fused]
    in_int8 = [pair[0] for pair in products if all(operand.format == INT8.name for operand in pair)]
    if in_int8:
        problem = f"{len(in_int8)} INT8 operations beside FP8 attention: only Blackwell GPUs can build such an engine"
        yield Fault(
            name_of(in_int8[0].product), problem, "quantize the linear layers to FP8, or keep attention in float"
        )


@rules.add("mask-range")
def mask_range(subject: Subject) -> Iterator[Fault]:
    """Keep a mask constant within FP16, and leave room for the attention scores."""
    for node in subject.nodes:
        for index, value in enumerate(node.inputs):
            array = constant(value)
            if array is None or not array.size or str(array.dtype) not in ("float16", "float32"):
                continue
            lowest = float(np.min(array))
            overflows = lowest < FLOAT16_MASK and (
                array.dtype == np.float16 or (lowest < _LOWEST and _becomes_half(node))
            )
            if overflows and masks_only(node, index):
                problem = (
                    f"the mask constant {lowest:.5g} overflows FP16: added to a score it is -inf, and a row of -inf "
                    "is NaN after softmax"
                )
                yield Fault(name_of(node), problem, f"use {FLOAT16_MASK:g}: its exponential is also 0")


_LOWEST = float(np.finfo(np.float16).min)


def _becomes_half(node: Any) -> bool:
    """Return whether the output of a node is FP16, directly or behind a Cast."""
    if node.op_type == "Cast":
        return str(node.outputs[0].dtype) == "FLOAT16"
    casts = [reader for reader in readers(node.outputs[0]) if reader.op_type == "Cast"]
    return any(str(cast.outputs[0].dtype) == "FLOAT16" for cast in casts)
