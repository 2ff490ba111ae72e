"""Results of convolutions are quantized where the target runs a convolution in integers only between DQ and Q."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from toy_nets import net

from quantizer import Quantizer
from quantizer.errors import CalibrationWarning
from quantizer.plan.site_plan import with_fallback

onnxruntime = pytest.importorskip("onnxruntime")


class _Net(nn.Module):
    """A residual block with normalizations, in place, and a branch with SiLU, squeeze-and-excitation and a cat."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0, self.bn0 = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.conv1, self.bn1 = nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.conv3 = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
        self.gate, self.last = nn.Conv2d(16, 16, 1), nn.Conv2d(32, 8, 1)
        self.relu, self.silu, self.pool = nn.ReLU(inplace=True), nn.SiLU(inplace=True), nn.MaxPool2d(2)
        self.up = nn.Upsample(scale_factor=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.bn0(self.conv0(x))))
        y = self.bn1(self.conv1(x))
        y += x
        y = self.silu(self.conv2(self.relu(y)))
        y = y * torch.sigmoid(self.gate(y))
        return self.last(torch.cat([self.up(y), self.up(self.conv3(x))], 1))


@pytest.fixture(scope="module")
def calibrated() -> tuple[nn.Module, Quantizer, list[Tensor]]:
    torch.manual_seed(0)
    model, data = _Net(), [torch.randn(4, 3, 16, 16) for _ in range(4)]
    with torch.no_grad():
        for batch in data:
            model(batch)
    q = Quantizer(backend="onnxruntime", preset="plain")
    q.calibrate(model.eval(), data, progress=False)
    return model, q, data


def test_every_convolution_runs_in_integers_as_the_proxy_rounds(
    calibrated: tuple[nn.Module, Quantizer, list[Tensor]], tmp_path: Path
) -> None:
    model, q, data = calibrated
    frozen = q.quantize(model)
    file = q.export(frozen, tmp_path / "model.onnx", data[0])
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 3, str(tmp_path / "optimized.onnx")
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: data[0].numpy()})
    expected = frozen(data[0]).detach()
    error = (torch.from_numpy(found) - expected).square().sum() / expected.square().sum()
    assert float(error) < 1e-4
    onnx = pytest.importorskip("onnx")
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert kinds["QLinearConv"] == 6
    assert kinds["QLinearAdd"] == kinds["QLinearConcat"] == 1
    assert kinds["QLinearMul"] == kinds["QLinearSigmoid"] == 2
    assert not {"Conv", "FusedConv", "Add", "Relu", "Concat", "Mul"} & set(kinds)


_SHARES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hardswish": (nn.Hardswish, "HardSigmoid"),
    "mish": (nn.Mish, "Tanh"),
    "silu in place": (lambda: nn.SiLU(inplace=True), "QLinearSigmoid"),
    "hardswish in place": (lambda: nn.Hardswish(inplace=True), "HardSigmoid"),
}


def _gate() -> nn.Module:
    """A tensor times its hard sigmoid, as MobileNetV3 has it."""
    return net("x * F.hardsigmoid(x)")


_SHARES["gate"] = _gate, "HardSigmoid"


def test_a_gate_that_nothing_multiplies_by_is_not_rounded(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model, data = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Hardsigmoid()).eval(), [torch.randn(4, 3, 12, 12)]
    q = Quantizer(backend="onnxruntime", preset="plain")
    q.calibrate(model, data, progress=False)
    file = q.export(q.quantize(model), tmp_path / "model.onnx", data[0])
    # It reads the codes of the convolution, and its own result stays as it is.
    kinds = [node.op_type for node in onnx.load(file).graph.node]
    assert kinds[-2:] == ["DequantizeLinear", "HardSigmoid"]


@pytest.mark.parametrize(("made", "share"), _SHARES.values(), ids=_SHARES)
def test_an_activation_that_scales_its_input_multiplies_integers(
    made: Callable[[], nn.Module], share: str, tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), made(), nn.Conv2d(8, 8, 3), made(), nn.Conv2d(8, 8, 1)).eval()
    data = [torch.randn(4, 3, 12, 12) for _ in range(4)]
    q = Quantizer(backend="onnxruntime", preset="plain")
    q.calibrate(model, data, progress=False)
    frozen = q.quantize(model)
    file = q.export(frozen, tmp_path / "model.onnx", data[0])
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 3, str(tmp_path / "optimized.onnx")
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert kinds["QLinearConv"] == 3
    assert kinds["QLinearMul"] == kinds[share] == 2
    # One DQ before each share that is no kernel of integers, and one at the end.
    assert kinds["DequantizeLinear"] == (1 if share.startswith("QLinear") else 3)
    assert not {"Mul", "HardSwish", "Where", "Greater"} & set(kinds)
    (found,) = session.run(None, {session.get_inputs()[0].name: data[0].numpy()})
    expected = frozen(data[0]).detach()
    assert (torch.from_numpy(found) - expected).square().sum() < 1e-4 * expected.square().sum()


def test_a_result_goes_back_with_its_convolution(calibrated: tuple[nn.Module, Quantizer, list[Tensor]]) -> None:
    _, q, _ = calibrated
    plan = q.plan
    (conv,) = (
        path for path in plan if path.startswith("conv2.") and plan[path].quantized and plan[path].kind == "conv"
    )
    (group,) = {operand.group for operand in plan[conv].operands}
    left = with_fallback(plan, {str(group): "asked for"})
    assert plan[f"{conv}.output"].quantized
    assert not left[conv].quantized
    assert not left[f"{conv}.output"].quantized
    assert not any(entry.quantized for path, entry in left.items() if path.startswith("silu."))


def test_a_result_of_two_convolutions_goes_back_with_one_of_them() -> None:
    parts = {"a": nn.Conv2d(3, 8, 3), "b": nn.Conv2d(3, 8, 3), "last": nn.Conv2d(16, 8, 1)}
    model = net("self.last(torch.cat([self.a(x), self.b(x.relu())], 1))", **parts).eval()
    q = Quantizer(backend="onnxruntime", preset="plain")
    q.calibrate(model, [torch.randn(32, 3, 8, 8)], progress=False)
    assert q.plan["forward.cat_0.output"].quantized
    group = q.plan["b._conv_forward.conv2d_1"].operands[0].group
    left = with_fallback(q.plan, {str(group): "asked for"})
    assert left["a._conv_forward.conv2d_1.output"].quantized
    assert not left["forward.cat_0.output"].quantized
    assert left["forward.cat_0.output"].reason == "it is not the output of a quantized convolution"


class _Written(nn.Module):
    """A result that an operation overwrites before another convolution reads it."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.a, self.b, self.write = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1), write

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.write(y)
        return self.b(y)


_WRITES: dict[str, Callable[[Tensor], object]] = {
    "scale": lambda y: y.mul_(0.1),
    "part": lambda y: y[:, :8].mul_(8),
    "view": lambda y: y.flatten(2).mul_(8),
    "out": lambda y: torch.mul(y, 3, out=y),
    "copy": lambda y: y.copy_(y * 3),
}


@pytest.mark.parametrize("name", _WRITES)
def test_a_result_has_the_range_it_has_before_it_is_overwritten(name: str) -> None:
    torch.manual_seed(0)
    model, data = _Written(_WRITES[name]), [torch.randn(32, 16, 4, 4)]
    q = Quantizer(backend="onnxruntime", preset="plain", activations={"calibrator": "max"})
    q.calibrate(model, data, progress=False)
    with torch.no_grad():
        result = model.a(data[0])
        before = float(result.abs().max())
        model.write(result)
    found = {path: entry.operands[0].amax for path, entry in q.plan.items() if entry.quantized}
    assert float(found["a._conv_forward.conv2d_1.output"]) == pytest.approx(before)
    assert float(found["b._conv_forward.conv2d_1"]) == pytest.approx(float(result.abs().max()))


def test_an_overwritten_result_leaves_calls_their_own_ranges() -> None:
    class Levels(_Written):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x).mul_(0.5)
            return sum((torch.tanh(self.b(level)) for level in (x, x * 3, x / 3)), start=x)

    torch.manual_seed(0)
    model, data = Levels(torch.relu_), [torch.randn(32, 16, 4, 4)]
    q, own = (Quantizer(backend=backend, preset="plain") for backend in ("onnxruntime", "tensorrt"))
    for each in (q, own):
        each.calibrate(model, data, progress=False)
    path = "b._conv_forward.conv2d_1"
    calls = own.plan[path].operands[0].calls
    assert len(calls) == 3
    assert q.for_backend("tensorrt").plan[path].operands[0].calls == calls


def test_a_saved_plan_and_other_targets(calibrated: tuple[nn.Module, Quantizer, list[Tensor]], tmp_path: Path) -> None:
    model, q, data = calibrated
    q.save(tmp_path / "saved")
    again = Quantizer.load(tmp_path / "saved")
    assert torch.equal(again.quantize(model)(data[0]), q.quantize(model)(data[0]))
    other = q.for_backend("openvino")
    assert {entry.kind for entry in other.plan.values()} <= {"conv", "residual_add"}
    assert any(entry.quantized for entry in other.plan.values())


def test_a_calibration_without_results_warns_before_it_serves_a_target_that_needs_them() -> None:
    model, data = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU()).eval(), [torch.randn(32, 3, 8, 8)]
    q = Quantizer(backend="openvino", preset="plain")
    q.calibrate(model, data, progress=False)
    with pytest.warns(CalibrationWarning, match="observes no results, so most of the 1 convolutions"):
        q.for_backend("onnxruntime")


def test_linears_alone_serve_every_target(recwarn: pytest.WarningsRecorder) -> None:
    q = Quantizer(backend="openvino", preset="plain")
    q.calibrate(nn.Sequential(nn.Linear(16, 16)), [torch.randn(32, 16)], progress=False)
    q.for_backend("onnxruntime")
    assert not [found for found in recwarn if found.category is CalibrationWarning]
