"""Reductions that OpenVINO would compute in the type of the next Q: files keep them apart, and engines are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_graphs import computed, operators
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.engines import BuildOptions, build_engine, load_engine
from quantizer.export.passes import UnfusedReductions, run_passes
from quantizer.plan.targets import profile

onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
ir = pytest.importorskip("onnx_ir", reason="exporting needs enginequant[onnx]")
reference = pytest.importorskip("onnx.reference", reason="exporting needs enginequant[onnx]")

KINDS = frozenset({"ReduceMax"})
X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


def graph(nodes: str, kind: str = "float", outputs: str = "float[3] y") -> Any:
    text = f'<ir_version: 10, opset_import: ["" : 20]> g ({kind}[3,4] x, int64[1] a) => ({outputs}) {{ {nodes} }}'
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


@pytest.mark.parametrize(
    ("nodes", "outputs", "after"),
    [
        ("m = ReduceMax <keepdims = 0> (x, a) y = Neg (m)", "float[3] y", ["ReduceMax", "Max", "Neg"]),
        # The result of the model keeps its name, and its readers are kept apart as well.
        ("m = ReduceMax <keepdims = 0> (x, a) y = Neg (m)", "float[3] y, float[3] m", ["ReduceMax", "Max", "Neg"]),
        ("m = ReduceMax <keepdims = 0> (x, a) y = Mul (m, m)", "float[3] y", ["ReduceMax", "Max", "Mul"]),
    ],
    ids=["one reader", "a result too", "read twice"],
)
def test_a_reduction_is_kept_apart(nodes: str, outputs: str, after: list[str]) -> None:
    model, inputs, entry = graph(nodes, outputs=outputs), {"x": X, "a": np.array([1])}, UnfusedReductions(KINDS)
    before = computed(model, **inputs)
    assert entry.ensures(model).startswith("a reduction can still be fused")
    run_passes(model, [entry])
    assert operators(model) == after
    assert all(map(np.array_equal, computed(model, **inputs), before))
    assert entry.run(model) == 0


@pytest.mark.parametrize(
    ("nodes", "kind", "outputs"),
    [
        ("m = ReduceMean <keepdims = 0> (x, a) y = Neg (m)", "float", "float[3] y"),
        ("m = ReduceMax <keepdims = 0> (x, a) y = Neg (m)", "int32", "int32[3] y"),
        ("y = ReduceMax <keepdims = 0> (x, a)", "float", "float[3] y"),
    ],
    ids=["another reduction", "integers", "no reader"],
)
def test_others_stay(nodes: str, kind: str, outputs: str) -> None:
    model = graph(nodes, kind, outputs)
    before = operators(model)
    run_passes(model, [UnfusedReductions(KINDS)])
    assert operators(model) == before


def misread_file(shape: tuple[int, ...], kind: str, axes: list[int], keeps: int, quantized: bool, joined: bool) -> Any:
    """A reduction, factors of channels along axis 1 of its result, and perhaps a Q and a DQ."""
    made = onnx.helper.make_node
    result = np.sum(np.zeros(shape), axis=tuple(axes), keepdims=bool(keeps))
    sizes = [1] * result.ndim
    sizes[1] = result.shape[1] * (2 if joined else 1)
    factors = np.exp(np.random.default_rng(1).uniform(-1, 1, sizes)).astype(np.float32)
    held = {"f": factors, "s": np.float32(0.03), "z": np.uint8(122), "a": np.array(axes), "first": np.array(0)}
    inputs = ["x"] if kind.startswith("Global") else ["x", "a"]
    nodes = [made(kind, inputs, ["r"], **({} if kind.startswith("Global") else {"keepdims": keeps}))]
    if joined:
        nodes += [made("Gather", ["x", "first"], ["c"], axis=1), made("Concat", ["c", "r"], ["k"], axis=1)]
    nodes.append(made("Mul", ["k" if joined else "r", "f"], ["m" if quantized else "y"]))
    if quantized:
        nodes += [made("QuantizeLinear", ["m", "s", "z"], ["q"]), made("DequantizeLinear", ["q", "s", "z"], ["y"])]
    floats = onnx.TensorProto.FLOAT
    given = onnx.helper.make_tensor_value_info("x", floats, ["batch", *shape[1:]])
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [given],
        [onnx.helper.make_tensor_value_info("y", floats, None)],
        [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()],
    )
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


@pytest.mark.parametrize(
    ("shape", "kind", "axes", "keeps", "quantized", "joined", "misread"),
    [
        ((4, 12, 32), "ReduceMean", [1], 0, True, False, True),
        ((4, 12, 32), "ReduceSum", [1], 0, True, True, True),
        ((4, 12, 32), "ReduceMean", [1], 0, False, False, False),
        ((4, 12, 32), "ReduceMean", [1], 1, True, False, False),
        ((4, 12, 32), "ReduceL2", [2], 0, False, False, True),
        ((4, 12, 32), "ReduceMean", [2], 1, True, False, True),
        ((4, 12, 32), "GlobalAveragePool", [2], 1, False, False, True),
        ((4, 12, 5, 6), "GlobalAveragePool", [2, 3], 1, True, False, False),
        ((4, 12, 5, 6), "ReduceMean", [2, 3], 0, True, False, False),
        ((4, 5, 6, 32), "ReduceMean", [1, 2], 0, True, False, True),
        ((4, 5, 6, 32), "ReduceMean", [1, 2], 0, False, False, False),
        ((4, 5, 6, 32), "ReduceMean", [1, 2], 1, True, False, False),
    ],
)
def test_factors_of_channels_behind_a_reduction_are_read_where_they_belong(
    shape: tuple[int, ...],
    kind: str,
    axes: list[int],
    keeps: int,
    quantized: bool,
    joined: bool,
    misread: bool,
    tmp_path: Path,
) -> None:
    pytest.importorskip("openvino", reason="install enginequant[openvino]")
    x = np.random.default_rng(2).normal(0.3, 1, shape).astype(np.float32)
    model = misread_file(shape, kind, axes, keeps, quantized, joined)
    (expected,) = reference.ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x})
    run_passes(model, [UnfusedReductions(frozenset(), profile("openvino").misread_reductions)])
    assert ("Max" in operators(model)) == misread
    path = tmp_path / "m.onnx"
    onnx.save(ir.to_proto(model), path)
    build_engine("openvino", path, tmp_path / "m.engine", BuildOptions())
    (found,) = load_engine("openvino", tmp_path / "m.engine")({"x": x}).values()
    # A value near a tie may take the next code.
    assert np.mean(np.abs(found - expected) > 1e-4) < 0.01


def existing_file(q: Quantizer, model: nn.Module, x: Tensor, folder: Path, backend: str = "openvino") -> list[str]:
    """Compare the engine of a model with its proxy, in batches of all rows and of one; return the operators."""
    q.calibrate(model, [x], progress=False)
    proxy = q.quantize(model)
    file = q.export(proxy, folder / "m.onnx", (x,))
    engine = load_engine(backend, q.build(file, folder / "m.engine").path)
    for rows in (len(x), 1):
        with torch.no_grad():
            expected = proxy(x[:rows])
        (found,) = engine({engine.input_names[0]: x[:rows]}).values()
        noise = (expected - found).square().mean() / expected.var()
        assert noise < 1e-4, f"{rows} samples: {-10 * torch.log10(noise):.1f} dB"
    return [node.op_type for node in onnx.load(file).graph.node]


class Tokens(nn.Module):
    """The first token and the mean of all, as DINOv2's classifier has them, before a linear layer."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.joined = joined
        self.head = nn.Linear(64 if joined else 32, 8)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1)
        return self.head(torch.cat([x[:, 0], mean], 1) if self.joined else mean)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.usefixtures("exact_byte_products")
def test_a_mean_of_tokens_before_a_smoothed_layer(joined: bool, tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="install enginequant[openvino]")
    torch.manual_seed(0)
    model = Tokens(joined).eval()
    x = (torch.randn(8, 12, 32) + 0.3) * torch.logspace(-1, 1, 32)
    q = Quantizer(preset="plain", backend="openvino", activations={"smoothquant_alpha": 0.5})
    assert "Max" in existing_file(q, model, x, tmp_path)


class Statistics(nn.Module):
    """A statistic of each channel over time, normalized, as networks for sound have them."""

    def __init__(self, statistic: str) -> None:
        super().__init__()
        self.statistic = statistic
        self.first, self.norm, self.head = nn.Conv1d(4, 32, 3), nn.BatchNorm1d(32), nn.Linear(32, 8)
        nn.init.uniform_(self.norm.weight, 0.2, 3)
        nn.init.uniform_(self.norm.running_mean, -1, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        if self.statistic == "transposed mean":
            found = hidden.transpose(1, 2).mean(1)
        else:
            found = hidden.std(-1) if self.statistic == "deviation" else hidden.mean(-1)
        return self.head(self.norm(found))


@pytest.mark.parametrize("quantized", [False, True], ids=["float", "int8"])
@pytest.mark.parametrize("statistic", ["mean", "transposed mean", "deviation"])
@pytest.mark.usefixtures("exact_byte_products")
def test_a_normalized_statistic_of_each_channel(statistic: str, quantized: bool, tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="install enginequant[openvino]")
    torch.manual_seed(0)
    model, x = Statistics(statistic).eval(), torch.randn(8, 4, 40)
    q = Quantizer(preset="plain", backend="openvino", exclude={"names": [] if quantized else ["*"]})
    existing_file(q, model, x, tmp_path)


class Function(nn.Module):
    """A function as a layer, with factors of 32 channels."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.factors = function, nn.Parameter(torch.rand(32) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.factors)


def over_time(*layers: nn.Module, function: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 32, 3), nn.ReLU(), *layers, Function(function), nn.Linear(32, 8))


BEFORE_AND_BEHIND = {
    "norm-mean": (lambda: over_time(nn.BatchNorm1d(32), function=lambda x, f: x.mean(-1)), (4, 42)),
    "norm-maximum": (lambda: over_time(nn.BatchNorm1d(32), function=lambda x, f: x.amax(-1)), (4, 42)),
    "norm-both": (
        lambda: over_time(nn.BatchNorm1d(32), function=lambda x, f: x.mean(-1) + x.std(-1)),
        (4, 42),
    ),
    "instances-mean": (
        lambda: over_time(nn.InstanceNorm1d(32, affine=True), function=lambda x, f: x.mean(-1)),
        (4, 42),
    ),
    "scaled-tokens": (
        lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), Function(lambda x, f: (x * f).mean(1)), nn.Linear(32, 8)),
        (12, 16),
    ),
    "silu": (lambda: over_time(function=lambda x, f: nn.functional.silu(x.mean(-1)) * f), (4, 42)),
    "gate": (
        lambda: over_time(function=lambda x, f: (x * (x.mean(-1).unsqueeze(-1) * f[:, None])).flatten(1)[:, :32]),
        (4, 42),
    ),
    "einsum": (lambda: over_time(function=lambda x, f: torch.einsum("bct->bc", x) * f), (4, 42)),
    "layers": (lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), (64,)),
    "three-layers": (
        lambda: nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)),
        (128,),
    ),
    "layers-norm": (lambda: nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)), (16,)),
}
"""Networks that OpenVINO computes wrongly as they are written, most of them with no digit right."""


@pytest.mark.parametrize("name", BEFORE_AND_BEHIND)
@pytest.mark.usefixtures("exact_byte_products")
def test_factors_of_channels_before_and_behind(name: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="install enginequant[openvino]")
    torch.manual_seed(0)
    make, shape = BEFORE_AND_BEHIND[name]
    model, x = make().eval(), torch.randn(8, *shape)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.InstanceNorm1d):
            nn.init.uniform_(module.weight, 0.2, 3)
            nn.init.uniform_(module.bias, -1, 1)
    q = Quantizer(preset="plain", backend="openvino", activations={"smoothquant_alpha": 0.5})
    assert "Max" in existing_file(q, model, x, tmp_path)


class Pooled(nn.Module):
    """Maxima and minima, each before a product: over tokens, with the axis kept, and of a convolution's pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3)
        self.gate, self.mixed = nn.Conv2d(32, 32, 1), nn.Linear(32, 32)
        self.most, self.least = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x)) - 0.3
        gated = hidden * torch.sigmoid(self.gate(nn.functional.adaptive_max_pool2d(hidden, 1)))
        tokens = self.mixed(gated.flatten(2).transpose(1, 2))
        return self.most(tokens.amax(1)) + self.least(torch.relu(tokens.amin(1) + 1))


@pytest.mark.parametrize("backend", ["openvino", pytest.param("onnxruntime", marks=pytest.mark.nightly)])
@pytest.mark.usefixtures("exact_byte_products")
def test_an_engine_is_as_near_as_without_reductions(backend: str, tmp_path: Path) -> None:
    pytest.importorskip(backend, reason=f"install enginequant[{backend}]")
    torch.manual_seed(0)
    model, x = Pooled().eval(), torch.randn(4, 3, 8, 8)
    quantizer = Quantizer(preset="plain", backend=backend)
    kinds = existing_file(quantizer, model, x, tmp_path, backend)
    assert all(row.quantized for row in quantizer.coverage if row.multiply_adds)
    assert kinds.count("Max") == (3 if backend == "openvino" else 0)
