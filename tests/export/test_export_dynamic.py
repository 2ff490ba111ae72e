"""Ranges at run time in a file: the nodes that ONNX Runtime fuses, and what its engine computes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import needs_exact_byte_products, openvino_core
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.check import check_file
from quantizer.engines import BuildOptions, build_engine, inspect_engine, load_engine
from quantizer.engines.onnx_graph import graph_inspection

onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
pytest.importorskip("onnxscript", reason="exporting needs enginequant[onnx]")


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
    activations = {"ranges": "dynamic", "smoothquant_alpha": 0.5}
    quantizer = Quantizer(**{"preset": "plain", "backend": "onnxruntime", "activations": activations, **config})
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
    pytest.importorskip("onnxruntime", reason="needs enginequant[onnxruntime]")
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


def wide() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 128), nn.Linear(128, 48)).eval()
    return model, torch.randn(10, 256) * torch.linspace(0.1, 4, 256)


@needs_exact_byte_products
def test_openvino_rounds_in_blocks_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="needs enginequant[openvino]")
    model, x = wide()
    quantizer = Quantizer(backend="openvino", preset="plain", activations={"ranges": "dynamic"})
    quantizer.calibrate(model, [x], progress=False)
    frozen = quantizer.quantize(model)
    path = quantizer.export(frozen, tmp_path / "m.onnx", x)
    kinds = Counter(node.op_type for node in onnx.load(path).graph.node)
    # The weights of 256 and of 128 input channels, and nothing about activations.
    assert (kinds["DequantizeLinear"], kinds["QuantizeLinear"], kinds["Identity"]) == (2, 0, 0)
    assert check_file(path, "openvino") == []
    with torch.no_grad():
        expected, plain = frozen(x).double().numpy(), model(x).double().numpy()
    built = build_engine("openvino", path, tmp_path / "m.engine", BuildOptions()).path
    for source in (path, built):
        engine = load_engine("openvino", source)
        (got,) = engine({engine.input_names[0]: x.numpy()}).values()
        noise, rounding = (np.square(got - other).sum() / np.square(other).sum() for other in (expected, plain))
        assert -10 * np.log10(noise) > 60
        # It does round.
        assert -10 * np.log10(rounding) < 50


@needs_exact_byte_products
def test_small_blocks_of_weights_keep_the_kernels_of_openvino(tmp_path: Path) -> None:
    core = openvino_core()
    model, x = wide()
    rule = {"activations": "float", "weights": "int4", "block_size": 32}
    quantizer = Quantizer(backend="openvino", preset="plain", formats=[rule])
    quantizer.calibrate(model, [x], progress=False)
    path = quantizer.export(quantizer.quantize(model), tmp_path / "m.onnx", x)
    settings = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    usual = core.compile_model(path, "CPU", settings)(x.numpy())[0]
    engine = load_engine("openvino", path)
    (got,) = engine({engine.input_names[0]: x.numpy()}).values()
    np.testing.assert_array_equal(got, usual)
