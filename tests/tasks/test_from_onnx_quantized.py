"""ONNX files on the road to an engine: the plan is that of the source, and both commands take a file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quantizer
from quantizer import Quantizer
from quantizer.cli.main import main
from quantizer.errors import CalibrationError, ConfigError
from quantizer.export.exporter import export_onnx
from quantizer.plan.site_plan import Plan

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


class Net(nn.Module):
    """A convnet with a residual sum, a batch normalization and attention over its places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, stride=2)
        self.deep = nn.Conv2d(32, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores [N, 10] of images [N, 3, H, W]."""
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.norm(self.deep(x)))
        places = x.flatten(2).transpose(1, 2)
        scores = torch.matmul(self.query(places), self.key(places).transpose(1, 2))
        mixed = torch.matmul(torch.softmax(scores / 32, -1), places)
        logits: Tensor = self.head(mixed.mean(1))
        return logits


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def file(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    return export_onnx(net, path, {"x": torch.randn(2, 3, 18, 18)}, opset=20, dtype=torch.float32)


@pytest.fixture(scope="module")
def batches() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"x": torch.randn(8, 3, 18, 18)} for _ in range(3)]


def _scales(plan: Plan) -> list[tuple[str, str, list[float]]]:
    """Return kind, operand and scales of all quantized operands, in order of their values, as names differ."""
    return sorted(
        (entry.kind, operand.name, torch.as_tensor(operand.scale, dtype=torch.float64).flatten().tolist())
        for entry in plan.values()
        for operand in entry.operands
        if entry.quantized and operand.quantized
    )


def test_the_plan_is_that_of_the_source(net: Net, file: Path, batches: list[dict[str, Tensor]]) -> None:
    plans = []
    for model in (net, quantizer.from_onnx(file)):
        chosen = Quantizer(backend="openvino", preset="plain")
        chosen.calibrate(model, batches)
        plans.append(chosen.plan)
    kinds = [Counter(entry.kind for entry in plan.values() if entry.quantized) for plan in plans]
    assert kinds[0] == kinds[1]
    assert kinds[0]["conv"] == 2
    assert kinds[0]["linear"] == 3
    assert kinds[0]["matmul"] == 2
    for mine, theirs in zip(*map(_scales, plans), strict=True):
        assert mine[:2] == theirs[:2]
        assert mine[2] == pytest.approx(theirs[2], rel=1e-4)


@pytest.mark.usefixtures("exact_byte_products")
def test_a_file_is_quantized_as_a_module(file: Path, net: Net, batches: list[dict[str, Tensor]]) -> None:
    result = quantizer.quantize_model(file, batches, backend="onnxruntime", preset="plain")
    assert result.record.engine is not None
    made, expected = result.engine(batches[0]["x"][:3]), net(batches[0]["x"][:3])
    assert made.shape == expected.shape
    signal, noise = expected.square().sum(), (made - expected).square().sum()
    assert 10 * torch.log10(signal / noise) > 20


@pytest.mark.usefixtures("exact_byte_products")
def test_the_command(file: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(32, 3, 18, 18)).astype(np.float32))
    line = ["convert", "-m", str(file), "--quantization", "--calibration", str(tmp_path / "data.npz")]
    assert main([*line, "--samples", "16", "--backend", "onnxruntime", "-o", str(tmp_path / "out")]) == 0
    assert {"model.onnx", "model.engine", "report.json"} <= {path.name for path in (tmp_path / "out").iterdir()}


BRANCH = """
<ir_version: 8, opset_import: ["" : 18]>
g (float[N, 64] x, int64 rate) => (float[N, 32] y) {
    c = Equal (rate, sixteen)
    s = If (c) <
        then_branch = a () => (float[N, 64] p) { p = Relu (x) },
        else_branch = b () => (float[N, 64] q) { q = Neg (x) }
    >
    y = MatMul (s, w)
}
"""


@pytest.mark.usefixtures("exact_byte_products")
def test_the_command_fixes_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import onnx

    model = onnx.parser.parse_model(BRANCH)
    random = np.random.default_rng(0)
    weights = {"sixteen": np.array(16), "w": random.normal(size=(64, 32)).astype(np.float32)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    onnx.save(model, tmp_path / "m.onnx")
    x = random.normal(size=(32, 64)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x)
    line = ["convert", "-m", str(tmp_path / "m.onnx"), "--quantization", "--calibration", str(tmp_path / "data.npz")]
    line += ["--backend", "onnxruntime", "-o", str(tmp_path / "out"), "--fixed"]
    assert main([*line, "rate=16"]) == 0
    engine = quantizer.load(tmp_path / "out")
    expected = np.maximum(x, 0) @ weights["w"]
    noise = np.asarray(engine(x=torch.from_numpy(x))) - expected
    assert np.square(noise).sum() < 1e-3 * np.square(expected).sum()
    capsys.readouterr()
    for text in ("rate", "=16", "rate=16k"):
        assert main([*line, text, "--force"]) == 1
        assert f"--fixed {text}: expected NAME=NUMBER" in capsys.readouterr().err
    assert main([*line, "rate=16", "rate=8", "--force"]) == 1
    assert "--fixed rate: got 2 numbers; expected one" in capsys.readouterr().err
    assert main([*line, "speed=16", "--force"]) == 1
    assert "fixed names unknown inputs or axes 'speed'; the model has the inputs x, rate" in capsys.readouterr().err
    assert main(["convert", "-m", "my-model", "--fixed", "rate=16"]) == 1
    assert "--fixed is only for .onnx files, and my-model is not one; remove it" in capsys.readouterr().err


def test_options_of_checkpoints_do_not_fit(file: Path, tmp_path: Path) -> None:
    from rich.console import Console

    from quantizer.pipeline.convert_options import convert_onnx

    options = {"model": str(file), "output": tmp_path / "out", "backend": ["auto", "openvino"], "seq_len": [16, 32, 64]}
    with pytest.raises(ConfigError, match="--seq-len is only for checkpoints") as raised:
        convert_onnx(options, False, Console(quiet=True))
    text = str(raised.value)
    assert "add --quantization" in text
    assert "--calibration is missing" in text
    assert "--backend auto openvino: expected one backend, or auto" in text
    np.savez(tmp_path / "data.npz", y=np.zeros((4, 3)))
    options = {"model": str(file), "output": tmp_path / "out", "backend": ["auto"], "quantization": True}
    with pytest.raises(CalibrationError, match=r"has the arrays y, but net.onnx has the inputs x"):
        convert_onnx({**options, "calibration": str(tmp_path / "data.npz")}, False, Console(quiet=True))
    assert not (tmp_path / "out").exists()
