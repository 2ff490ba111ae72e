"""Which rules a Q/DQ graph is held to on each backend, as data: what is an error there, and what only costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace
from typing import Literal

from quantizer.registry import Registry

__all__ = ["GraphRules", "Severity", "graph_rules"]

Severity = Literal["error", "warning"]
"""An error: the backend refuses the file, computes something else than it says, or runs a product in another precision
than the file or the target asks for. A warning: it works, and is slower, larger or less exact than it could be."""


@dataclass(frozen=True, kw_only=True)
class GraphRules:
    """What a graph is checked for, for one backend.

    Attributes:
        severities: the rules that apply, by name, and how much each matters.
        opsets: the first and the last opset that the backend reads; None: its runtime says so itself.
        integer_bias: a bias of INT32 behind a DequantizeLinear is what the backend expects.
        refused: operators of ONNX that the backend cannot read.
        own_domains: domains of operators beyond ONNX's that the backend runs.
        signed_cost: what a signed activation costs where the profile asks for unsigned ones.
    """

    severities: Mapping[str, Severity]
    opsets: tuple[int, int] | None = None
    integer_bias: bool = True
    refused: frozenset[str] = frozenset()
    own_domains: frozenset[str] = frozenset()
    signed_cost: str = ""


graph_rules: Registry[GraphRules] = Registry("backend")

_ALWAYS: dict[str, Severity] = {
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

_OPERATOR_FORMAT = ("QLinearMatMul", "QLinearConv", "MatMulInteger", "ConvInteger", "DynamicQuantizeLinear")

_TENSORRT = GraphRules(
    severities={
        **_ALWAYS,
        # Types live in the graph and the build stops, or the product runs in float, where these are broken.
        "opset-range": "error",
        "zero-point": "error",
        "scale-constant": "error",
        "scale-type": "error",
        "pair-differs": "error",
        "format": "error",
        "quantize-alone": "error",
        "cast-between": "error",
        "scaled-operand": "error",
        "half-site": "error",
        "weight-axis": "error",
        "activation-channels": "error",
        "float32-rest": "error",
        "fp8-attention": "error",
        "half-attention": "warning",
        "attention-size": "warning",
        "attention-operator": "warning",
        "int8-with-fp8-attention": "warning",
        "small-product": "warning",
        "matrix-vector": "warning",
        "residual-side": "warning",
    },
    opsets=(9, 24),
    integer_bias=False,
    refused=frozenset(_OPERATOR_FORMAT),
    own_domains=frozenset({"trt"}),
)

graph_rules.add("tensorrt")(_TENSORRT)

# Its parser (1.7.1) read an opset that TensorRT is not documented for, and the engine was built.
graph_rules.add("tensorrt-rtx")(replace(_TENSORRT, severities={**_TENSORRT.severities, "opset-range": "warning"}))

_OPENVINO = GraphRules(
    severities={
        **_ALWAYS,
        "half-attention": "warning",
        "attention-operator": "warning",
        "signedness": "warning",
    },
    own_domains=frozenset({"com.microsoft"}),
    refused=frozenset({"QGemm"}),
    signed_cost="is a tenth slower",
)

_ONNXRUNTIME = GraphRules(
    severities={**_ALWAYS, "gemm-bias": "warning", "signedness": "warning"},
    own_domains=frozenset({"com.microsoft"}),
    signed_cost="leaves half of such products in float behind their DequantizeLinear",
)

for _name in ("openvino", "openvino-avx2"):
    graph_rules.add(_name)(_OPENVINO)
for _name in ("onnxruntime", "onnxruntime-avx2"):
    graph_rules.add(_name)(_ONNXRUNTIME)
