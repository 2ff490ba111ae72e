"""The torch engine: what it computes beside another library, its files, and what it refuses."""

from __future__ import annotations

import json
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import batch, tiny
from quick_start import quick_compiler
from torch import nn

from quantizer import Quantizer
from quantizer.engines import BuildOptions, InputSizes, build_engine, inspect_engine, load_engine
from quantizer.errors import EngineError
from quantizer.export.exporter import export_onnx

onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
pytest.importorskip("onnxruntime", reason="the other library is enginequant[onnxruntime]")

pytestmark = pytest.mark.usefixtures("exact_byte_products")

EAGER = BuildOptions(compiled=False)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A quantized and a float file of a tiny encoder."""
    folder, model, inputs = tmp_path_factory.mktemp("torch"), tiny("bert"), batch("bert")
    q = Quantizer(preset="plain", backend="torch")
    q.calibrate(model, [inputs])
    return {
        "int8": q.export(q.quantize(model), folder / "low.onnx", inputs),
        "float": export_onnx(model, folder / "float.onnx", inputs, opset=20, dtype=torch.float32),
    }


def _inputs(engine: Any, rows: int, tokens: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(rows * tokens)
    shapes = {spec.name: spec.dtype for spec in engine.inputs}
    return {
        name: (np.ones((rows, tokens)) if "mask" in name else draw.integers(0, 2, (rows, tokens))).astype(dtype)
        for name, dtype in shapes.items()
    }


def _sqnr_db(found: np.ndarray, expected: np.ndarray) -> float:
    noise = np.square(found.astype(np.float64) - expected).sum()
    return float(10 * np.log10(np.square(expected.astype(np.float64)).sum() / max(noise, 1e-30)))


def _db_to_proxy(model: nn.Module, x: torch.Tensor, folder: Path, **settings: Any) -> float:
    """The SQNR of the eager engine of a model to its frozen proxy."""
    q = Quantizer(preset="plain", backend="torch", **settings)
    q.calibrate(model, [x])
    frozen = q.quantize(model)
    q.export(frozen, folder / "m.onnx", x)
    build_engine("torch", folder / "m.onnx", folder / "m.engine", EAGER)
    engine = load_engine("torch", folder / "m.engine")
    (found,) = engine(x.numpy()).values()
    with torch.no_grad():
        return _sqnr_db(found, frozen(x).numpy())


@pytest.mark.parametrize(("kind", "least_db"), [("int8", 40), ("float", 100)])
def test_eager_kernels_compute_what_another_library_does(
    files: dict[str, Path], tmp_path: Path, kind: str, least_db: float
) -> None:
    build_engine("torch", files[kind], tmp_path / "m.engine", EAGER)
    engine, other = load_engine("torch", tmp_path / "m.engine"), load_engine("onnxruntime", files[kind])
    assert engine.input_names == other.input_names
    for rows, tokens in ((1, 5), (3, 12)):
        given = _inputs(other, rows, tokens)
        found, expected = engine(given), other(given)
        assert list(found) == list(expected)
        for name, values in expected.items():
            assert _sqnr_db(found[name], values) > least_db, name


def test_products_run_in_integers(files: dict[str, Path], tmp_path: Path) -> None:
    build_engine("torch", files["int8"], tmp_path / "m.engine", EAGER)
    seen = inspect_engine("torch", tmp_path / "m.engine", sizes=InputSizes(2, 8))
    low = [layer for layer in seen.layers if layer.precision == "int8" and layer.role == "product"]
    graph = onnx.load(files["int8"]).graph
    asked = sum(node.op_type in ("MatMul", "Gemm") and _has_weight(graph, node) for node in graph.node)
    # Query, key and value read the same input, and are one product.
    assert asked - 2 * 2 <= len(low) <= asked
    assert len(low) > 0
    assert seen.verified


def _has_weight(graph: Any, node: Any) -> bool:
    stored = {tensor.name for tensor in graph.initializer}
    made = {name: entry for entry in graph.node for name in entry.output}
    entry = made.get(node.input[1])
    return entry is not None and entry.op_type == "DequantizeLinear" and entry.input[0] in stored


class Convolutions(nn.Module):
    """Convolutions with activations, a depthwise one, and a residual add: [rows, 3, size, size] to [rows, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide = nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.last, self.head = nn.Conv2d(8, 8, 1), nn.Linear(8, 10)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x_BCHW))
        y = y + self.last(nn.functional.hardswish(self.wide(y)))
        return self.head(y.mean((2, 3)))


def test_convolutions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Convolutions().eval(), torch.randn(2, 3, 16, 16)
    assert _db_to_proxy(model, x, tmp_path) > 35


class ReadTwice(nn.Module):
    """Products whose result is read twice by one operation: doubled, and as query, key and value of one attention."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y = self.b(y + y)
        return self.c((y @ y.mT * 0.1).softmax(-1) @ y)


def test_a_value_that_one_operation_reads_twice(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert _db_to_proxy(ReadTwice().eval(), torch.randn(2, 5, 16), tmp_path) > 40
    layers = inspect_engine("torch", tmp_path / "m.engine", sizes=InputSizes(2)).layers
    (attention,) = (layer for layer in layers if layer.role == "attention")
    assert attention.multiply_adds == 2 * 5 * 5 * (16 + 16)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized file of two linears and what is between them."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).eval(), torch.randn(4, 16)
    q = Quantizer(preset="plain", backend="torch")
    q.calibrate(model, [x])
    return q.export(q.quantize(model), tmp_path_factory.mktemp("small") / "m.onnx", x)


# The C++ compiler takes nearly a minute for an encoder.
@pytest.mark.parametrize("kind", ["small", pytest.param("encoder", marks=pytest.mark.nightly)])
def test_the_compiled_road_computes_the_same(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantizer.engines.torch_engine.compiled import _SETTINGS, missing_compiler

    if (reason := missing_compiler()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    if kind == "small":
        monkeypatch.setitem(_SETTINGS, "aot_inductor.debug_compile", True)
    file = request.getfixturevalue("small_file") if kind == "small" else request.getfixturevalue("files")["int8"]
    with quick_compiler() if kind == "small" else nullcontext():
        build_engine("torch", file, tmp_path / "m.engine", BuildOptions(compiled=True))
    engine, other = load_engine("torch", tmp_path / "m.engine"), load_engine("onnxruntime", file)
    draw = np.random.default_rng(0)
    for rows, tokens in ((1, 5), (3, 12)):
        given = (
            {other.input_names[0]: draw.standard_normal((rows, 16)).astype(np.float32)}
            if kind == "small"
            else _inputs(other, rows, tokens)
        )
        for name, values in other(given).items():
            assert _sqnr_db(engine(given)[name], values) > 40


def test_files_hold_json_and_tensors(files: dict[str, Path], tmp_path: Path) -> None:
    path = build_engine("torch", files["int8"], tmp_path / "m.engine", EAGER).path
    with zipfile.ZipFile(path) as archive:
        assert sorted(archive.namelist()) == ["engine.json", "weights.safetensors"]
        assert json.loads(archive.read("engine.json"))["format"] == 1
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(EngineError, match="damaged"):
        load_engine("torch", path)


def test_an_operator_that_it_lacks_is_named(tmp_path: Path) -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 20]> g (float[2, 4] x) => (float[2, 4] y) { y = Hardmax (x) }
    """
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    with pytest.raises(EngineError, match="Hardmax"):
        build_engine("torch", tmp_path / "m.onnx", tmp_path / "m.engine", EAGER)
    assert not (tmp_path / "m.engine").exists()


class OneBias(nn.Module):
    """A linear whose bias something else reads, too: exporters share tensors that are alike, such as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)
        self.norm.bias = self.linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def test_a_tensor_with_two_readers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = OneBias().eval(), torch.randn(4, 32)
    assert _db_to_proxy(model, x, tmp_path, bias_correction=False) > 35


def test_a_weight_in_fp8_keeps_its_fractions(tmp_path: Path) -> None:
    """Only weights: quantized activations in FP8 are refused."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    draw = np.random.default_rng(0)
    stored, x = draw.standard_normal((8, 8)).astype(ml_dtypes.float8_e4m3fn), draw.standard_normal((2, 8))
    nodes = [
        onnx.helper.make_node("DequantizeLinear", ["w", "s"], ["dw"]),
        onnx.helper.make_node("MatMul", ["x", "dw"], ["y"]),
    ]
    values = [onnx.helper.make_tensor_value_info(name, 1, ["batch", 8]) for name in "xy"]
    constants = [
        onnx.numpy_helper.from_array(np.float32(0.5), "s"),
        onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT8E4M3FN, [8, 8], stored.tobytes(), raw=True),
    ]
    graph = onnx.helper.make_graph(nodes, "g", values[:1], values[1:], constants)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)]), tmp_path / "m.onnx")
    (found,) = load_engine("torch", tmp_path / "m.onnx")({"x": x.astype(np.float32)}).values()
    np.testing.assert_allclose(found, x @ (stored.astype(np.float32) * 0.5), rtol=1e-4, atol=1e-4)

    q, model = Quantizer(backend="tensorrt", dtype="fp8", preset="plain"), nn.Linear(32, 32).eval()
    q.calibrate(model, [torch.randn(4, 32)])
    q.export(q.quantize(model), tmp_path / "fp8.onnx", torch.randn(4, 32))
    with pytest.raises(EngineError, match="float8_e4m3fn are not supported; use INT8 or UINT8"):
        load_engine("torch", tmp_path / "fp8.onnx")
