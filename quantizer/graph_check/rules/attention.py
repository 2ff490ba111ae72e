"""Rules of attention: both products quantized or neither, in sizes that are fused."""

from __future__ import annotations

from collections.abc import Iterator

from quantizer.graph_check.finding import Fault
from quantizer.graph_check.rule import rules
from quantizer.graph_check.subject import Subject
from quantizer.numerics.qtype import FP8
from quantizer.qdq.attention import Attention
from quantizer.qdq.graph import name_of, shape


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
            problem = "the Attention operator has no place for the quantizer behind its softmax, so it stays float"
            yield Fault(name_of(node), problem, "export with eager attention: MatMul, Softmax, MatMul")
