"""Prices of groups by a model of a GPU: kernels, bytes and multiply-adds, and runs for engines that are not here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from quantizer import Quantizer, estimated_prices, measured_prices
from quantizer.cli.main import main
from quantizer.engines.estimate import estimated_inspection, gpu_of, least
from quantizer.engines.estimate.kernels import kernels
from quantizer.errors import EngineError
from quantizer.report import read_record

onnx = pytest.importorskip("onnx", reason="reading a graph needs enginequant[onnx]")

from quantizer.engines.inspection.onnx_graph import SizedGraph

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU engines are timed")

_ATTENTION = """
<ir_version: 10, opset_import: ["" : 20]>
g (float[2, 4, 8] q, float[2, 8, 4] k, float[2, 4, 8] v) => (float[2, 4, 8] y) <float[8] b = {1,2,3,4,5,6,7,8}>
{
  s = MatMul (q, k)
  p = Softmax (s)
  a = MatMul (p, v)
  m = Add (a, b)
  n = LayerNormalization (m, b)
  y = Add (n, q)
}
"""

_LINEAR = """
<ir_version: 10, opset_import: ["" : 20]>
g (float[1024, 512] x) => (float[1024, 512] y) <float one = {1.0}, int8 zero = {0}>
{
  h = MatMul (x, w)
  r = Relu (h)
  rq = QuantizeLinear (r, one, zero)
  rd = DequantizeLinear (rq, one, zero)
  wd = DequantizeLinear (c, one, zero)
  y = MatMul (rd, wd)
}
"""


def _model(text: str) -> Any:
    model = onnx.parser.parse_model(text)
    for node in model.graph.node:
        node.name = f"{node.output[0]}/{node.op_type}"
    return model


def _saved(text: str, path: Path) -> Path:
    """Write a graph with its weights: ``w`` in floats, ``c`` in bytes."""
    model = _model(text)
    for name, kind in (("w", onnx.TensorProto.FLOAT), ("c", onnx.TensorProto.INT8)):
        size = 512 * 512 * (4 if kind == onnx.TensorProto.FLOAT else 1)
        model.graph.initializer.append(onnx.helper.make_tensor(name, kind, [512, 512], bytes(size), raw=True))
    onnx.save(model, path)
    return path


def test_attention_is_one_kernel_and_pointwise_operators_join_what_they_read() -> None:
    found = list(kernels(SizedGraph(_model(_ATTENTION), {"batch": 1, "sequence": 1})))
    assert [[node.op_type for node in kernel.nodes] for kernel in found] == [
        ["MatMul", "Softmax", "MatMul", "Add"],
        ["LayerNormalization", "Add"],
    ]
    assert [kernel.read for kernel in found] == [{"q", "k", "v", "b"}, {"m", "b", "q"}]
    assert [set(kernel.written) for kernel in found] == [{"m"}, {"y"}]


@pytest.mark.parametrize(("capability", "bound"), [("sm89", "memory"), ("sm75", "math")])
def test_a_linear_takes_its_bytes_or_its_work(capability: str, bound: str, tmp_path: Path) -> None:
    gpu = gpu_of(capability)
    layers = estimated_inspection(_saved(_LINEAR, tmp_path / "m.onnx"), gpu).layers
    work, rows, weights = 1024 * 512 * 512, 1024 * 512, 512 * 512
    scales = 4 + 1
    math_us = [2 * work / (tera * 1e6 * gpu.math_share) for tera in (gpu.half_tera, gpu.low_tera)]
    # The first reads and multiplies floats of 2 bytes, and writes what the second reads: bytes.
    sizes = [2 * rows + 2 * weights + rows, rows + weights + 2 * rows]
    memory_us = [size / (gpu.gigabytes * 1e3 * gpu.memory_share) for size in sizes]
    total = sum(max(pair) + gpu.kernel_us for pair in zip(math_us, memory_us, strict=True))
    assert sum(layer.time_us or 0 for layer in layers) == pytest.approx(total, rel=scales / rows)
    assert [math_us[0] > memory_us[0], bound] in ([True, "math"], [False, "memory"])
    # Who reads a tensor pays for its being written, where that takes time.
    written = [layer.time_us for layer in layers if layer.name == "y/MatMul of rq"]
    assert written == ([] if bound == "math" else [pytest.approx(rows / (gpu.gigabytes * 1e3 * gpu.memory_share))])


def test_the_gpu_of_a_compute_capability() -> None:
    assert gpu_of("sm87").name == gpu_of("sm86").name == "A10"
    assert gpu_of("sm121") == gpu_of("sm120")
    assert least(("sm120", "sm89")) == "sm89"
    for wrong in ("sm70", "ampere", "sm"):
        with pytest.raises(EngineError, match=f"no figures of a GPU with '{wrong}'; expected sm75 or later"):
            gpu_of(wrong)


class _Block(nn.Module):
    """Two linears, of which the second reads four times as much."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(512, 2048)
        self.second = nn.Linear(2048, 512)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))


@pytest.fixture(scope="module")
def block() -> tuple[Quantizer, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = _Block().eval(), torch.randn(16, 512)
    q = Quantizer(preset="plain", backend="tensorrt-rtx")
    q.calibrate(model, [x], progress=False)
    return q, model, x


def test_a_plan_with_groups_put_back_is_predicted(block: tuple[Quantizer, nn.Module, Tensor], tmp_path: Path) -> None:
    q, model, x = block
    prices = estimated_prices(q, model, x, capability="sm80", batch=4096)
    amp = q.amp(model)
    amp(x)
    assert prices.estimated
    assert prices.where == "sm80 (A100), batch 4096, floats in 16 bits"
    gains = {name: price.gain_us for name, price in prices.groups.items()}
    assert gains["second.forward.linear_0"] > gains["first.forward.linear_0"] > 0
    assert prices.slower() == {}
    assert prices.least_loss_us == math.inf
    try:
        q.fallback(amp, names=["second.forward.linear_0"], prices=prices)
        q.export(q.quantize(model), tmp_path / "back.onnx", x)
    finally:
        q.clear_fallback()
    layers = estimated_inspection(tmp_path / "back.onnx", gpu_of("sm80"), batch=4096).layers
    built = sum(layer.time_us or 0 for layer in layers)
    assert prices.time_us(["second.forward.linear_0"]) == pytest.approx(built, rel=0.1)


def test_bad_calls(block: tuple[Quantizer, nn.Module, Tensor]) -> None:
    q, model, x = block
    with pytest.raises(EngineError, match="expected sm75 or later"):
        estimated_prices(q, model, x, capability="sm61")
    amp = q.amp(model)
    amp(x)
    try:
        q.fallback(amp, num=1)
        with pytest.raises(EngineError, match=r"some fell back: call clear_fallback\(\) first"):
            estimated_prices(q, model, x)
    finally:
        q.clear_fallback()


@needs_no_gpu
def test_measured_prices_name_what_does_without_a_gpu(block: tuple[Quantizer, nn.Module, Tensor]) -> None:
    q, model, x = block
    with pytest.raises(EngineError, match=r"this machine has no GPU for them: estimated_prices\(\) goes by a model"):
        measured_prices(q, model, x)


@needs_no_gpu
@pytest.mark.parametrize(
    ("speedup", "code"),
    [(0.9, 0), (50.0, 1)],
    ids=["reached", "not reached"],
)
@pytest.mark.nightly
def test_a_run_for_a_gpu_that_is_not_here(
    speedup: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("transformers", "sklearn", "tensorrt_rtx_bindings"):
        pytest.importorskip(package, reason="needs enginequant[hf,report,tensorrt-rtx]")
    from tiny_run import tiny_run

    monkeypatch.chdir(tmp_path)
    run: dict[str, Any] = tiny_run(tmp_path)
    run["quantizer"] = {"backend": "tensorrt-rtx", "preset": "plain"}
    run |= {"amp": {"batches": 1}, "fallback": {"min_speedup": speedup}, "engine": {"compute_capability": "sm89"}}
    run["report"] |= {"formats": ["json"]}
    Path("tiny.yaml").write_text(yaml.safe_dump(run))
    assert main(["run", "tiny.yaml", "--output", "out"]) == code
    said = capsys.readouterr()
    placement = read_record(Path("out/report.json")).placement
    assert placement is not None
    assert placement.estimated
    assert placement.where.startswith("sm89 (L4), ")
    assert len(placement.frontier) == len(placement.groups) + 1
    assert placement.checks == ()
    reached = placement.float_ms / placement.predicted_ms
    met = "reached" if code == 0 else "not reached"
    assert f"estimated for {placement.where}" in " ".join(said.out.split())
    assert f"the engine is estimated to have {reached:.2f}x, {met}" in " ".join(said.out.split())
    assert (placement.back > 0) == (code == 0)
    if code:
        assert "fallback.min_speedup: 50 is not reached on sm89 (L4)" in " ".join(said.err.split())
