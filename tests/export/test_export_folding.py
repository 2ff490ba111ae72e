"""Factors of channels, folded into what comes before them: on small graphs, and in exported models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import batch, tiny
from onnx_graphs import computed, node_by_node
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.export.passes import FoldChannelFactors

onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
ir = pytest.importorskip("onnx_ir", reason="exporting needs enginequant[onnx]")

# Stored steps, weights, factors f, and a float type; what differs from graph to graph stands in the middle.
_TEXT = """
<ir_version: 10, opset_import: ["" : 20]>
g (float[2, 4] x, float[2, 3] u) => (float[2, 3] y{outputs})
<float[3] f = {{2.0, 0.5, 4.0}}, float[3] w = {{1.0, -2.0, 3.0}}, float[3] b = {{0.5, 0.0, -1.0}},
 int8[4, 3] q = {{1, -2, 3, 4, 5, -6, 7, 8, 9, 1, 2, 3}}, float[3] t = {{0.5, 0.25, 1.0}}, float one = {{0.5}},
 int8[3, 4] r = {{1, -2, 3, 4, 5, -6, 7, 8, 9, 1, 2, 3}}, float s = {{0.01}}, int8 z = {{0}}, int64[2] shape = {{2, 3}}>
{{
  {nodes}
  m = Mul (v, f)
  k = QuantizeLinear (m, s, z)
  y = DequantizeLinear (k, s, z)
}}
"""
_LINEAR = "d = DequantizeLinear <axis = 1> (q, t) p = MatMul (x, d)"

pytestmark = pytest.mark.usefixtures("exact_byte_products")


def graph(nodes: str, outputs: str = "") -> Any:
    proto = onnx.parser.parse_model(_TEXT.format(nodes=nodes, outputs=outputs))
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def values_of(model: Any) -> list[np.ndarray]:
    u = np.array([[0.3, -1.0, 2.0], [1.5, 0.2, -0.7]], np.float32)
    return computed(model, x=np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4), u=u)


def multiplications(model: Any) -> int:
    return sum(node.op_type == "Mul" for node in model.graph)


@pytest.mark.parametrize(
    "nodes",
    [
        "v = LayerNormalization (u, w, b)",
        "v = LayerNormalization (u, w)",
        "n = Relu (u) v = Mul (w, n)",
        "n = Relu (u) o = Mul (n, w) v = Add (o, b)",
        "n = LayerNormalization (u, w, b) v = Reshape (n, shape)",
        f"{_LINEAR} v = Add (p, b)",
        "d = DequantizeLinear <axis = 1> (q, t) v = Gemm (x, d, b)",
        "d = DequantizeLinear <axis = 0> (r, t) v = Gemm <transB = 1> (x, d)",
        f"{_LINEAR} n = Sigmoid (u) v = Mul (n, p)",
        f"{_LINEAR} n = Sigmoid (u) v = Mul (p, n)",
    ],
    ids=[
        "norm",
        "norm without bias",
        "scale",
        "scale and shift",
        "reshape",
        "linear",
        "gemm",
        "turned gemm",
        "gate",
        "gated",
    ],
)
def test_factors_that_fold(nodes: str) -> None:
    model, entry = graph(nodes), FoldChannelFactors()
    before = multiplications(model)
    assert entry.requires(model) is None
    assert entry.ensures(model) is not None
    assert entry.run(model) == 1
    assert entry.ensures(model) is None
    assert entry.run(model) == 0
    assert multiplications(model) == before - 1
    assert "f" not in model.graph.initializers
    for old, new in zip(values_of(graph(nodes)), values_of(model), strict=True):
        assert np.allclose(old, new, atol=1e-6)
        assert np.ptp(new) > 0.5


def test_two_multiplications_in_a_row_both_fold() -> None:
    nodes = f"{_LINEAR} v = Mul (p, t)"
    model = graph(nodes)
    # The first is read by a quantizer alone once the second is gone.
    assert FoldChannelFactors().run(model) == 2
    assert FoldChannelFactors().ensures(model) is None
    assert multiplications(model) == 0
    for old, new in zip(values_of(graph(nodes)), values_of(model), strict=True):
        assert np.allclose(old, new, atol=1e-6)


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        ("v = LayerNormalization (u, w, b) e = Relu (v)", ", float[2, 3] e"),
        ("v = LayerNormalization (u, w, b)", ", float[2, 3] v"),
        ("d = DequantizeLinear (q, one) v = MatMul (x, d)", ""),
        (f"{_LINEAR} v = Add (p, b) e = Neg (p)", ", float[2, 3] e"),
        (f"{_LINEAR} v = Add (p, u)", ""),
        (f"{_LINEAR} v = Tanh (p)", ""),
        (f"{_LINEAR} n = Sigmoid (d) v = Add (p, b) e = ReduceMax <keepdims = 0> (n)", ", float e"),
        ("v = Identity (u)", ""),
    ],
    ids=[
        "another reader",
        "output",
        "per tensor",
        "product read twice",
        "sum",
        "nonlinear",
        "weight read twice",
        "none",
    ],
)
def test_factors_that_stay(nodes: str, outputs: str) -> None:
    model = graph(nodes, outputs)
    before = ir.to_proto(model).SerializeToString()
    assert FoldChannelFactors().run(model) == 0
    assert FoldChannelFactors().ensures(model) is None
    assert ir.to_proto(model).SerializeToString() == before


def test_scales_that_would_lose_precision_stay() -> None:
    model = graph(f"{_LINEAR} v = Add (p, b)")
    model.graph.initializers["t"].const_value = ir.tensor(np.full(3, 1e-38, np.float32), name="t")
    assert FoldChannelFactors().run(model) == 0


def test_constants_that_others_read_stay_theirs() -> None:
    nodes = "v = LayerNormalization (u, w, b) e = Mul (u, w)"
    model = graph(nodes, ", float[2, 3] e")
    assert FoldChannelFactors().run(model) == 1
    assert np.allclose(values_of(model)[1], values_of(graph(nodes, ", float[2, 3] e"))[1])


# -- exported models -----------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """A block whose normalization is a scale, with a gate: [rows, 32] to [rows, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(32) + 0.5)
        self.gate, self.up = nn.Linear(32, 64, bias=False), nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def exported(model: nn.Module, inputs: Any, folder: Path) -> tuple[Any, Any, float]:
    """The exported graph, the frozen proxy's output, and the SQNR in dB of the file's first output against it."""
    q = Quantizer(
        preset="plain",
        backend="onnxruntime",
        activations={"calibrator": "max", "smoothquant_alpha": 0.5},
        sites={"residual_add": False},
    )
    q.calibrate(model, [inputs])
    frozen = q.quantize(model)
    path = q.export(frozen, folder / "model.onnx", inputs)
    with torch.no_grad():
        output = frozen(**inputs)[0] if isinstance(inputs, Mapping) else frozen(inputs)
    # Node by node, as what is tested is the file: an integer kernel may round a tie the other way.
    values = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
    found = torch.from_numpy(node_by_node(path, *values)[0])
    noise = (found - output).double().square().sum().clamp(min=1e-30)
    return onnx.load(path).graph, frozen, float(10 * torch.log10(output.double().square().sum() / noise))


def explicit(graph: Any) -> list[str]:
    """Multiplications by factors that stand in the graph."""
    return [node.name for node in graph.node if node.op_type == "Mul" and "_input_quantizer" in node.name]


def test_a_normalization_before_its_readers_takes_the_factors(tmp_path: Path) -> None:
    graph, _, sqnr_db = exported(tiny("vit"), batch("vit"), tmp_path)
    left = explicit(graph)
    assert not [name for name in left if "q_proj" in name or "k_proj" in name or "fc1" in name]
    assert len([name for name in left if "o_proj" in name or "fc2" in name]) == 4
    assert sqnr_db > 60


def test_a_normalization_that_a_residual_reads_does_not(tmp_path: Path) -> None:
    graph, _, sqnr_db = exported(tiny("bert"), batch("bert"), tmp_path)
    left = explicit(graph)
    assert len([name for name in left if "attention.self" in name]) == 2
    assert len([name for name in left if "intermediate" in name]) == 2
    assert sqnr_db > 60


def test_a_gate_and_a_scale_leave_no_multiplication(tmp_path: Path) -> None:
    torch.manual_seed(0)
    graph, _, sqnr_db = exported(Gated().eval(), torch.randn(8, 32), tmp_path)
    assert explicit(graph) == []
    assert sqnr_db > 60
