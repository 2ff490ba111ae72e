"""The rules for Q/DQ graphs on each backend, as data: what is an error there, and what only costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import Literal

__all__ = ["ALWAYS", "OPERATOR_FORMAT", "GraphRules", "Severity"]

Severity = Literal["error", "warning"]
"""An error: the backend refuses the file, computes something else than it says, or runs a product in another precision
than the file or the target asks for. A warning: it works, and is slower, larger or less exact than it could be."""

ALWAYS: Mapping[str, Severity] = {
    "onnx-checker": "error",
    "external-data": "error",
    "opset-format": "error",
    "scale-value": "error",
    "scale-constant": "warning",
    "scale-type": "warning",
    "pair-differs": "warning",
    "format": "warning",
    "dead-quantizer": "warning",
    "quantize-alone": "warning",
    "float-reader": "warning",
    "cast-between": "warning",
    "scaled-operand": "warning",
    "moved-operand": "warning",
    "half-site": "warning",
    "quantized-bias": "warning",
    "quantized-mask": "warning",
    "weight-axis": "warning",
    "activation-channels": "warning",
    "float-weight": "warning",
    "turned-weight": "warning",
    "shared-input": "warning",
    "site-kind": "warning",
    "saturating-weight": "warning",
    "foreign-operator": "error",
    "mask-range": "warning",
}
"""Rules of Q/DQ that hold wherever such a graph runs."""

OPERATOR_FORMAT = frozenset({"QLinearMatMul", "QLinearConv", "MatMulInteger", "ConvInteger", "DynamicQuantizeLinear"})
"""Operators that quantize by themselves, without Q/DQ around float ones."""


@dataclass(frozen=True, kw_only=True)
class GraphRules:
    """The rules for the graphs of one backend.

    Attributes:
        severities: the rules that apply, by name, and how much each matters.
        opsets: the first and the last opset that the backend reads; None: its runtime says so itself.
        integer_bias: a bias of INT32 behind a DequantizeLinear is what the backend expects.
        refused: operators of ONNX that the backend cannot read.
        own_domains: domains of operators beyond ONNX's that the backend runs.
        signed_cost: what a signed activation costs where the profile asks for unsigned ones.
    """

    severities: Mapping[str, Severity] = field(default_factory=lambda: ALWAYS)
    opsets: tuple[int, int] | None = None
    integer_bias: bool = True
    refused: frozenset[str] = frozenset()
    own_domains: frozenset[str] = frozenset()
    signed_cost: str = ""
