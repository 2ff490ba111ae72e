"""Ranges at run time in a file: the nodes that ONNX Runtime fuses, and what its engine computes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import needs_exact_byte_products
from torch import Tensor
from torch import nn

from quantizer import Quantizer
from quantizer.engines import BuildOptions
from quantizer.engines import build_engine
from quantizer.engines import inspect_engine
from quantizer.engines import load_engine
from quantizer.engines.inspection.onnx_graph import graph_inspection
from quantizer.graph_check import check_file

onnx = pytest.importorskip("onnx", reason="exporting needs quantizer[onnx]")
pytest.importorskip("onnxscript", reason="exporting needs quantizer[onnx]")


class Readers(nn.Module):
    """Two linears that read one normalization, and one that reads a turned tensor: [rows, 32] to [32, rows]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.first, self.second = nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(32, 48)
        self.last = nn.Linear(48, 32)
        with torch.no_grad():
            self.norm.weight[5] = 30.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.last(torch.tanh(self.first(y)) * self.second(y)).t()


def exported(folder: Path, **config: Any) -> tuple[Path, nn.Module]:
    model = Readers().eval()
    activations = {"ranges": "dynamic", "smooth": 0.5}
    quantizer = Quantizer(**{"preset": "fast", "backend": "onnxruntime", "activations": activations, **config})
    quantizer.calibrate(model, [torch.randn(20, 32), torch.randn(20, 32)], progress=False)
    frozen = quantizer.quantize(model)
    return quantizer.export(frozen, folder / "m.onnx", torch.randn(8, 32)), frozen


def test_one_quantizer_a_tensor_and_no_finding(tmp_path: Path) -> None:
    path, _ = exported(tmp_path)
    kinds = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert (kinds["DynamicQuantizeLinear"], kinds["QuantizeLinear"], kinds["MatMul"]) == (2, 0, 3)
    # The factors of smoothing became part of the normalization.
    assert kinds["Mul"] <= 2
    assert check_file(path, "onnxruntime") == []


def test_a_file_asks_for_int8(tmp_path: Path) -> None:
    path, _ = exported(tmp_path)
    products = [layer for layer in graph_inspection(path, "not built").layers if layer.role == "product"]
    assert [layer.precision for layer in products] == ["int8"] * 3


@needs_exact_byte_products
def test_the_engine_computes_what_the_proxy_computes(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs quantizer[onnxruntime]")
    path, frozen = exported(tmp_path)
    built = build_engine("onnxruntime", path, tmp_path / "m.engine", BuildOptions()).path
    engine = load_engine("onnxruntime", built)
    for size in (1.0, 25.0):
        x = size * torch.randn(8, 32, generator=torch.Generator().manual_seed(4))
        with torch.no_grad():
            expected = frozen(x).double().numpy()
        (got,) = engine({engine.input_names[0]: x.numpy()}).values()
        noise = np.square(got - expected).sum() / np.square(expected).sum()
        assert -10 * np.log10(noise) > 40
    kinds = Counter(layer.type for layer in inspect_engine("onnxruntime", built).layers if layer.role == "product")
    assert kinds == {"MatMulIntegerToFloat": 2, "DynamicQuantizeMatMul": 1}
    products = [layer for layer in inspect_engine("onnxruntime", built).layers if layer.role == "product"]
    assert {layer.precision for layer in products} == {"int8"}
    # Biases are part of the products.
    assert "Add" not in {node.op_type for node in onnx.load(built).graph.node}
