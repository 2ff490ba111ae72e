"""The rules for Q/DQ graphs on each backend, as data, with their severities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning"]
"""An error: the backend refuses the file, computes other results than the file describes, or runs a product in another
precision than the file or the target demands. A warning: the file works, but slower, larger or less exactly."""

ALWAYS: Mapping[str, Severity] = {
    "onnx-checker": "error",
    "external-data": "error",
    "opset-format": "error",
    "scale-value": "error",
    "scale-constant": "warning",
    "dynamic-range": "warning",
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
    "mixed-types": "error",
    "element-type": "error",
    "mask-range": "warning",
}
"""The rules for Q/DQ graphs of every backend."""

OPERATOR_FORMAT = frozenset({"QLinearMatMul", "QLinearConv", "MatMulInteger", "ConvInteger", "DynamicQuantizeLinear"})
"""Operators that compute in quantized types themselves, instead of Q/DQ around float operators."""


@dataclass(frozen=True, kw_only=True)
class GraphRules:
    """The rules for the graphs of one backend.

    Attributes:
        severities: the severity of each rule that applies, by its name.
        opsets: the first and the last opset that the backend reads; None: its runtime reports an unknown opset itself.
        integer_bias: the backend expects an INT32 bias with a DequantizeLinear.
        refused: operators of ONNX that the backend cannot read.
        own_domains: domains of operators outside ONNX that the backend runs.
        narrow_inputs: element types that only a Cast may read.
        absent_floats: float types that the backend does not compute in.
        signed_cost: the cost of a signed activation, for messages, if the profile prefers unsigned activations.
    """

    severities: Mapping[str, Severity] = field(default_factory=lambda: ALWAYS)
    opsets: tuple[int, int] | None = None
    integer_bias: bool = True
    refused: frozenset[str] = frozenset()
    own_domains: frozenset[str] = frozenset()
    narrow_inputs: frozenset[str] = frozenset()
    absent_floats: frozenset[str] = frozenset()
    signed_cost: str = ""
