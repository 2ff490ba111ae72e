"""Rules of operators that compute in low precision by themselves, and of quantizers that are not ONNX's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quantizer.graph_check.finding import Fault
from quantizer.graph_check.rule import rules
from quantizer.graph_check.subject import Subject
from quantizer.qdq.graph import is_dequantize, is_quantize, name_of

_ONNX = ("", "ai.onnx")
_WORDS = ("QLinear", "Integer", "Quantize", "QGemm", "QAttention")


def is_quantized_operator(node: Any) -> bool:
    """Return whether a node computes with quantized codes, or quantizes with an operator other than ONNX's Q/DQ."""
    plain = is_quantize(node) or is_dequantize(node)  # com.microsoft's are read everywhere as ONNX's
    return not plain and any(word in node.op_type for word in _WORDS)


@rules.add("foreign-operator")
def foreign_operator(subject: Subject) -> Iterator[Fault]:
    """Express low precision with ONNX's QuantizeLinear and DequantizeLinear, or with operators that the target runs."""
    nodes: dict[tuple[str, str], list[Any]] = {}
    for node in filter(is_quantized_operator, subject.nodes):
        foreign = node.domain not in (*_ONNX, *subject.limits.own_domains)
        if foreign or node.op_type in subject.limits.refused:
            nodes.setdefault((node.domain, node.op_type), []).append(node)
    for (domain, kind), found in nodes.items():
        shown = kind if domain in _ONNX else f"{domain}.{kind}"
        problem = f"{shown} ({len(found)} in the file) is not read by {subject.target.name}"
        yield Fault(name_of(found[0]), problem, "quantize in the QDQ format: QuantizeLinear and DequantizeLinear")
