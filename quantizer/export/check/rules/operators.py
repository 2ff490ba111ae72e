"""Operators that compute in low precision by themselves, and quantizers that are not ONNX's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from quantizer.export.check.finding import Fault
from quantizer.export.check.graph import name_of
from quantizer.export.check.rule import rules
from quantizer.export.check.subject import Subject

__all__ = ["foreign_operator"]


@rules.add("foreign-operator")
def foreign_operator(subject: Subject) -> Iterator[Fault]:
    """Low precision is said with QuantizeLinear and DequantizeLinear of ONNX, and the target knows the operators."""
    counts: Counter[tuple[str, str]] = Counter()
    first = {}
    for node in subject.nodes:
        quantizes = any(word in node.op_type for word in ("Quantize", "QLinear", "QGemm", "QAttention"))
        if node.op_type in subject.limits.refused or (node.domain not in _ONNX and quantizes):
            key = (node.domain, node.op_type)
            first.setdefault(key, node)
            counts[key] += 1
    for (domain, kind), count in counts.items():
        shown = f"{domain}.{kind}" if domain not in _ONNX else kind
        problem = f"{shown} ({count} in the file) is not an operator that {subject.target.name} runs in low precision"
        yield Fault(
            name_of(first[domain, kind]), problem, "quantize in the QDQ format: QuantizeLinear and DequantizeLinear"
        )


_ONNX = ("", "ai.onnx")
