"""A calibrator from outside the package: the one of the guide."""

from __future__ import annotations

from pathlib import Path

import pytest
from outside import run_outside, write_guide_module

PRELUDE = """
import pytest
import torch

import four_sigma
from quantizer import Quantizer

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)).eval()
data = [torch.randn(256, 16) for _ in range(4)]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the guide's module lies."""
    write_guide_module(tmp_path, "add-a-calibrator.md", "four_sigma")
    return tmp_path


def test_its_ranges_are_planned_saved_and_loaded(folder: Path) -> None:
    run_outside(
        folder,
        PRELUDE
        + """
q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "four-sigma"})
q.calibrate(net, data)
first, second = (entry.operands[0].largest_amax for entry in q.plan.values())
assert first == pytest.approx(4 * float(torch.cat(data).square().mean().sqrt()), rel=0.01)
hidden = torch.relu(net[0](torch.cat(data)))
assert second == pytest.approx(min(4 * float(hidden.square().mean().sqrt()), float(hidden.max())), rel=0.01)
expected = q.quantize(net)(data[0])
q.save("saved")
again = Quantizer.load("saved")
assert again.config.activations.calibrator == "four-sigma"
assert torch.equal(again.quantize(net)(data[0]), expected)
assert again.for_backend("tensorrt-rtx").plan["0.forward.linear_0"].operands[0].largest_amax == pytest.approx(first)
""",
    )


def test_exported(folder: Path) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    run_outside(
        folder,
        PRELUDE
        + """
import onnx
from onnx.reference import ReferenceEvaluator

q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "four-sigma"})
q.calibrate(net, data)
int8 = q.quantize(net)
q.export(int8, "net.onnx", (data[0],))
evaluator = ReferenceEvaluator(onnx.load("net.onnx"))
(output,) = evaluator.run(None, {evaluator.input_names[0]: data[0].numpy()})
torch.testing.assert_close(torch.from_numpy(output), int8(data[0]), atol=1e-4, rtol=0)
""",
    )


def test_a_file_may_name_it_once_it_is_there(folder: Path) -> None:
    run_outside(
        folder,
        """
from pathlib import Path

import pytest

from quantizer.config import quantizer_config
from quantizer.errors import ConfigError

Path("own.yaml").write_text("activations: {calibrator: four-sigma}")
with pytest.raises(ConfigError, match="expected 'percentile', 'max', 'mse', 'entropy', 'auto' or 'output'"):
    quantizer_config("own.yaml")
import four_sigma
assert quantizer_config("own.yaml").activations.calibrator == "four-sigma"
Path("own.yaml").write_text("activations: {calibrator: four-sigme}")
with pytest.raises(ConfigError, match="'auto', 'output' or 'four-sigma'; did you mean 'four-sigma'"):
    quantizer_config("own.yaml")
""",
    )


def test_a_name_is_registered_once(folder: Path) -> None:
    run_outside(
        folder,
        PRELUDE
        + """
from quantizer.observe.calibrators import CALIBRATORS

for name in ("four-sigma", "max"):
    with pytest.raises(ValueError, match=f"calibrator '{name}' is registered twice"):
        CALIBRATORS.add(name)(four_sigma.FourSigmaCalibrator)
with pytest.raises(ValueError, match="calibrator 'auto': the name is reserved"):
    CALIBRATORS.add("auto")(four_sigma.FourSigmaCalibrator)
""",
    )


def test_its_errors_name_it(folder: Path) -> None:
    run_outside(
        folder,
        PRELUDE
        + """
from quantizer.errors import CalibrationError
from quantizer.observe.calibrators import CALIBRATORS, Calibrator

def raises(*_, **__):
    raise KeyError("boom")

def with_calibrator(name, **members):
    if members:
        CALIBRATORS.add(name)(type("Own", (Calibrator,), members))
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": name})
    q.calibrate(net, data)
    return q.plan

for number, (members, kind, note) in enumerate([
    ({"__init__": raises}, KeyError, "in calibrator 'own-0'"),
    ({"__init__": lambda self: None}, TypeError, "in calibrator 'own-1'"),
    ({"estimate": raises}, KeyError, "in calibrator Own"),
    ({"unused": None}, NotImplementedError, "in calibrator Own"),
]):
    with pytest.raises(kind) as caught:
        with_calibrator(f"own-{number}", **members)
    assert caught.value.__notes__ == [note], number
for value in (None, "1.0", torch.tensor(1.0), float("nan"), -1.0):
    four_sigma.FourSigmaCalibrator.estimate = lambda self, value=value: value
    with pytest.raises(CalibrationError, match="calibrator FourSigmaCalibrator: estimate.. returned .*; expected"):
        with_calibrator("four-sigma")
with pytest.raises(ValueError, match="calibrator 'made' is an object of FourSigmaCalibrator; expected a class"):
    CALIBRATORS.add("made")(four_sigma.FourSigmaCalibrator())
with pytest.raises(ValueError, match="calibrator 'other' is Linear, which has no observe, amax, estimate"):
    CALIBRATORS.add("other")(torch.nn.Linear)
""",
    )
