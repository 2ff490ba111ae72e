"""Einsums and Gemms of quantized operands: those that are products of matrices become MatMul, the others stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_graphs import computed, operators
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.engines import load_engine
from quantizer.export.passes.base import run_passes
from quantizer.export.passes.einsum import EinsumToMatMul, GemmToMatMul
from quantizer.plan.targets.base import TargetProfile

onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
ir = pytest.importorskip("onnx_ir", reason="exporting needs enginequant[onnx]")

SIZES = {"b": 2, "h": 3, "m": 4, "s": 5, "k": 6, "n": 7, "c": 6, ".": 2}

pytestmark = pytest.mark.usefixtures("exact_byte_products")


def einsum(equation: str, shapes: tuple[str, str], *, quantized: bool = True) -> Any:
    """A graph of one Einsum, whose operands come through Q/DQ."""
    pair = "{0}q = QuantizeLinear ({0}, s) {0}d = DequantizeLinear ({0}q, s)"
    nodes = " ".join(pair.format(name) for name in "ab") if quantized else "ad = Identity (a) bd = Identity (b)"
    text = (
        f'<ir_version: 10, opset_import: ["" : 20]> g (float[{shapes[0]}] a, float[{shapes[1]}] b) => (float y)'
        f'{{ {nodes} y = Einsum <equation = "{equation}"> (ad, bd) }}'
    )
    proto = onnx.parser.parse_model(text)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.02, np.float32), "s"))
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def shapes_of(equation: str) -> tuple[str, str]:
    terms = equation.replace(" ", "").partition("->")[0].replace("...", "..").split(",")
    first, second = (",".join(str(SIZES[label]) for label in term) for term in terms)
    return first, second


def values_of(model: Any, shapes: tuple[str, str]) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(0)
    sizes = [[int(size) for size in shape.split(",")] for shape in shapes]
    a, b = (generator.normal(size=shape).astype(np.float32) for shape in sizes)
    return np.asarray(computed(model, a=a, b=b)[0])


@pytest.mark.parametrize(
    ("equation", "transposes"),
    [
        ("mk,kn->mn", 0),
        ("mk,nk->mn", 1),
        ("bmk,bnk->bmn", 1),
        ("bmk,bnk->bnm", 1),
        ("bhmk,bhkn->bhmn", 0),
        ("bmhk,bnhk->bhmn", 2),
        ("bhmn,bnhk->bmhk", 2),
        ("bmk,kn->bmn", 0),
        ("kn,bmk->bmn", 0),
        ("bmk,kn->nbm", 1),
        ("mk,bkn->bmn", 3),
        ("...mk,...kn->...mn", 0),
        ("...mk,...nk -> ...nm", 1),
        ("b...k,kn->b...n", 0),
    ],
)
def test_a_product_of_matrices_becomes_one(equation: str, transposes: int) -> None:
    shapes = shapes_of(equation)
    expected = values_of(einsum(equation, shapes), shapes)
    model = einsum(equation, shapes)
    assert EinsumToMatMul().run(model) == 1
    assert EinsumToMatMul().ensures(model) is None
    assert "Einsum" not in operators(model)
    assert operators(model).count("MatMul") == 1
    assert operators(model).count("Transpose") <= transposes
    found = values_of(model, shapes)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("mk,k->m", None),
        ("mk,n->mkn", None),
        ("bmk,bmk->bm", None),
        ("mck,ckn->mn", None),
        ("mk,sn->mn", None),
        ("mk,kn", None),
        ("mm,mn->mn", ("4,4", "4,7")),
        ("mk,kn->mn", ("4,6", "1,7")),
        ("mk,kn->mn", ("4,K", "L,7")),
        ("bmsk,bkn->bmsn", None),
        ("bmk,bkns->bmns", None),
        ("bmk,b...kn->b...mn", None),
    ],
)
def test_what_else_it_says_stays(equation: str, shapes: tuple[str, str] | None) -> None:
    model = einsum(equation, shapes or shapes_of(equation))
    assert EinsumToMatMul().run(model) == 0
    assert EinsumToMatMul().ensures(model) is None
    assert operators(model)[-1] == "Einsum"


def test_floats_are_left_alone() -> None:
    model = einsum("mk,kn->mn", ("4,6", "6,7"), quantized=False)
    run_passes(model, [EinsumToMatMul()])
    assert operators(model)[-1] == "Einsum"


class Heads(nn.Module):
    """Attention of two heads, written with einsums, and a projection by one."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.mix = nn.Parameter(torch.randn(32, 32) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).unflatten(-1, (2, 16)) for layer in (self.query, self.key, self.value))
        weights = (torch.einsum("bqhd,bkhd->bhqk", query, key) / 4.0).softmax(-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(2)
        return torch.einsum("bqi,oi->bqo", mixed, self.mix)


@pytest.mark.parametrize("backend", ["openvino", "tensorrt-rtx"])
def test_a_model_of_einsums_is_exported_as_products(backend: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="exporting needs enginequant[onnx]")
    pytest.importorskip("onnxruntime", reason="needs enginequant[onnxruntime]")
    from quantizer.check import check_file
    from quantizer.engines import load_engine
    from quantizer.export.exporter import export_onnx

    torch.manual_seed(0)
    model, x = Heads().eval(), torch.randn(2, 16, 32)
    quantizer = Quantizer(preset="plain", backend=backend)
    quantizer.calibrate(model, [x], progress=False)
    frozen = quantizer.quantize(model)
    path = quantizer.export(frozen, tmp_path / "model.onnx", x)
    assert "Einsum" not in operators(path)
    assert operators(path).count("MatMul") == 6
    assert list(check_file(path, backend)) == []
    exact = export_onnx(frozen, tmp_path / "exact.onnx", (x,), opset=21, dtype=torch.float32)
    engine = load_engine("onnxruntime", exact)
    (found,) = engine({engine.input_names[0]: x.numpy()}).values()
    expected = frozen(x).detach().numpy()
    assert np.square(found - expected).sum() < 1e-3 * np.square(expected).sum()


# -- Gemm --------------------------------------------------------------------------------------------------------------


def gemm(attributes: str = "", bias: str = "", *, second: str = "6,7", quantized: str = "ab") -> Any:
    """A Gemm of a [4, 6] and b, with a constant bias of the shape that is given."""
    pair = "{0}q = QuantizeLinear ({0}, s) {0}d = DequantizeLinear ({0}q, s)"
    nodes = " ".join(pair.format(name) if name in quantized else f"{name}d = Identity ({name})" for name in "ab")
    text = (
        f'<ir_version: 10, opset_import: ["" : 20]> g (float[4,6] a, float[{second}] b) => (float[4,7] y)'
        f"{{ {nodes} y = Gemm {attributes} (ad, bd{', c' if bias else ''}) }}"
    )
    proto = onnx.parser.parse_model(text)
    constants = {"s": np.array(0.02, np.float32)}
    if bias:
        constants["c"] = np.arange(7, dtype=np.float32).reshape([int(size) for size in bias.split(",")])
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in constants.items())
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


@pytest.mark.parametrize("bias", ["", "7", "1,7"])
@pytest.mark.parametrize(("attributes", "second"), [("", "6,7"), ("<transB = 1>", "7,6")])
def test_a_gemm_becomes_a_product_and_an_add(attributes: str, second: str, bias: str) -> None:
    expected = values_of(gemm(attributes, bias, second=second), ("4,6", second))
    model = gemm(attributes, bias, second=second)
    run_passes(model, [GemmToMatMul()])
    assert "Gemm" not in operators(model)
    assert operators(model).count("Add") == bool(bias)
    np.testing.assert_allclose(values_of(model, ("4,6", second)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"attributes": "<alpha = 0.5>"},
        {"attributes": "<beta = 2.0>", "bias": "7"},
        {"quantized": "a"},
        {"quantized": ""},
    ],
    ids=["alpha", "beta", "one float operand", "floats"],
)
def test_other_gemms_stay(options: dict[str, Any]) -> None:
    model = gemm(**options)
    run_passes(model, [GemmToMatMul()])
    assert operators(model)[-1] == "Gemm"


def test_a_linear_on_two_dimensions_runs_in_int8(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="exporting needs enginequant[onnx]")
    pytest.importorskip("onnxruntime", reason="needs enginequant[onnxruntime]")
    from quantizer.engines import BuildOptions, build_engine, inspect_engine

    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval(), torch.randn(8, 64)
    quantizer = Quantizer(preset="plain", backend="onnxruntime")
    quantizer.calibrate(model, [x], progress=False)
    path = quantizer.export(quantizer.quantize(model), tmp_path / "model.onnx", x)
    engine = build_engine("onnxruntime", path, tmp_path / "model.engine", BuildOptions()).path
    products = {share.precision: share.products for share in inspect_engine("onnxruntime", engine).shares}
    assert products["int8"] == 2
    assert not products.get("fp32")


class Upsampling(nn.Module):
    """A transposed convolution whose groups have one input channel each, of very different sizes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ConvTranspose2d(8, channels, 3, stride=2, groups=8, bias=False)
        with torch.no_grad():
            self.up.weight.mul_(10 ** torch.linspace(-2, 2, 8).reshape(8, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


@pytest.mark.parametrize("channels", [8, 24])
@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_engines_take_the_scales_of_a_depthwise_transposed_convolution(
    tmp_path: Path, backend: Any, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(backend, reason=f"running the engine needs enginequant[{backend}]")
    model, x = Upsampling(channels).eval(), torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(1))
    # Both compute it in float, so that no plan has it by itself; files for other engines have.
    monkeypatch.setattr(TargetProfile, "kernel_reason", lambda *_: None)
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    q.calibrate(model, [x], progress=False)
    frozen = q.quantize(model)
    path = tmp_path / "up.onnx"
    q.export(frozen, path, x)
    graph = onnx.load(path).graph
    scales = {item.name: onnx.numpy_helper.to_array(item).shape for item in graph.initializer}
    (convolution,) = (node for node in graph.node if node.op_type == "ConvTranspose")
    (weight,) = (node for node in graph.node if node.output[0] == convolution.input[1])
    assert weight.op_type == "DequantizeLinear"
    assert scales[weight.input[1]] == (8,)
    assert next(item.i for item in weight.attribute if item.name == "axis") == 0
    Quantizer(preset="plain", backend=backend).build(path, tmp_path / "up.engine")
    engine = load_engine(backend, tmp_path / "up.engine")
    (found,) = engine({engine.input_names[0]: x.numpy()}).values()
    with torch.no_grad():
        wanted, rounded = model(x), frozen(x)
    noise, signal = (value.square().sum((0, 2, 3)) for value in (torch.from_numpy(found) - wanted, wanted))
    assert bool((10 * torch.log10(signal / noise) > 35).all())
    torch.testing.assert_close(torch.from_numpy(found), rounded, rtol=1e-4, atol=1e-4)


def test_a_file_in_half_is_of_the_copy_also_where_a_forward_is_wrapped(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)).eval()
    original = model[0].forward
    model[0].forward = lambda x: original(x) * 2
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    q = Quantizer(preset="plain", backend="tensorrt")
    q.calibrate(model, [x], progress=False)
    frozen = q.quantize(model)
    path = tmp_path / "half.onnx"
    q.export(frozen, path, x)
    constants = [onnx.numpy_helper.to_array(item) for item in onnx.load(path).graph.initializer]
    assert not [value.shape for value in constants if value.dtype == np.float32]
