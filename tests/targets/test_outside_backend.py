"""A backend from outside the package: the one of the guide, as its whole code stands there, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from outside import run_outside, write_guide_module

for _package in ("transformers", "scipy", "onnx", "onnxscript"):
    pytest.importorskip(_package, reason="the backend of the guide needs enginequant[hf,onnx]")

from tiny_run import tiny_run

PRELUDE = """
import sys
from pathlib import Path

import reference_backend
import torch

from quantizer import Quantizer
from quantizer.errors import ConfigError, EngineError
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the guide's module lies, with a tiny classifier and its rows."""
    path = tmp_path_factory.mktemp("outside")
    write_guide_module(path, "add-a-backend.md", "reference_backend")
    tiny_run(path)
    return path


def run(folder: Path, text: str) -> str:
    """Run a script after the import of the module; what it printed."""
    return run_outside(folder, PRELUDE + text)


def test_by_class(folder: Path) -> None:
    run(
        folder,
        """
from quantizer.engines import inspect_engine, inspect_file, load_engine, peak_memory_mib
from quantizer.check import check_file

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)).eval()
data = [torch.randn(4, 16) for _ in range(4)]
q = Quantizer(preset="plain", backend="reference")
q.calibrate(net, data)
int8 = q.quantize(net)
assert "linear 2 of 2" in str(q.coverage), q.coverage
q.export(int8, "net.onnx", (data[0],))
assert check_file("net.onnx", "reference") == []
built = q.build("net.onnx", "net.engine")
engine = load_engine("reference", built.path)
(output,) = engine({engine.input_names[0]: data[0]}).values()
torch.testing.assert_close(output, int8(data[0]), atol=1e-4, rtol=0)
assert (output - net(data[0])).abs().max() > 1e-4
assert inspect_engine("reference", built.path).low_share() == 1.0
assert inspect_file(Path("net.engine"), "reference").backend == "reference"
assert peak_memory_mib(built.path, "reference").peak_mib > 0
q.save("saved")
assert Quantizer.load("saved").config.backend == "reference"
other = q.for_backend("openvino").for_backend("reference")
assert str(other.coverage) == str(q.coverage)
""",
    )


def test_what_it_cannot_do_is_refused_in_the_usual_words(folder: Path) -> None:
    run(
        folder,
        """
import pytest

from quantizer.engines import BuildOptions, backend

net = torch.nn.Linear(4, 4)
fp8 = Quantizer(preset="plain", backend="reference", dtype="fp8")
fp8.calibrate(net, [torch.ones(1, 4)])
with pytest.raises(ConfigError, match="reference does not support activations in fp8; use int8, uint8"):
    fp8.quantize(net)
with pytest.raises(ConfigError, match="'torch-cuda' or 'reference'; did you mean 'reference'"):
    Quantizer(preset="plain", backend="referense")
with pytest.raises(EngineError, match="reference uses the types of the ONNX file"):
    backend("reference").check(BuildOptions(inference_precision="bfloat16"))
""",
    )


def test_its_errors_name_it(folder: Path) -> None:
    run(
        folder,
        """
import pytest

from quantizer.engines import backends, build_engine, inspect_engine, load_engine

net, data = torch.nn.Linear(16, 16).eval(), [torch.randn(4, 16) for _ in range(2)]
q = Quantizer(preset="plain", backend="reference")
q.calibrate(net, data)
q.export(q.quantize(net), "errors.onnx", (data[0],))
onnx, engine = Path("errors.onnx"), Path("errors.engine")

def raises(*_, **__):
    raise KeyError("boom")

Backend = reference_backend.ReferenceBackend
keep, nothing = Backend.build, lambda *_, **__: None
Backend.build = nothing
with pytest.raises(EngineError, match="backend 'reference': build.* returned None; expected a list of warnings"):
    build_engine("reference", onnx, engine)
Backend.build = lambda *_: []
with pytest.raises(EngineError, match="backend 'reference': build.* did not write errors.engine"):
    build_engine("reference", onnx, engine)
Backend.build = raises
with pytest.raises(EngineError, match="KeyError: 'boom', in backend 'reference'"):
    build_engine("reference", onnx, engine)
Backend.build = keep
build_engine("reference", onnx, engine)
Backend.load = Backend.inspect = nothing
with pytest.raises(EngineError, match="'reference': load.* returned an object of NoneType, which has no name,"):
    load_engine("reference", engine)
with pytest.raises(EngineError, match="'reference': inspect.* returned None; expected an Inspection"):
    inspect_engine("reference", engine)
Backend.load = Backend.inspect = raises
for function in (load_engine, inspect_engine):
    with pytest.raises(KeyError) as caught:
        function("reference", engine)
    assert caught.value.__notes__ == ["in backend 'reference'"]
with pytest.raises(ValueError, match="backend 'own' is the class ReferenceBackend; expected an object"):
    backends.add("own")(Backend)
""",
    )


@pytest.mark.nightly
def test_by_configuration(folder: Path) -> None:
    words = ["run", "run.yaml", "quantizer.backend=reference", "output=done"]
    (folder / "run.yaml").write_text(yaml.safe_dump(tiny_run(folder)), encoding="utf-8")
    run(folder, f"from quantizer.cli.main import main\nsys.exit(main({words}))")
    record = json.loads((folder / "done" / "report.json").read_text(encoding="utf-8"))
    assert record["engine"]["backend"] == record["inspection"]["backend"] == "reference"
    assert record["engine"]["verified"] == "ran on this machine and was scored"
    assert record["memory"]
    assert "onnx" in record["versions"]


@pytest.mark.nightly
def test_converted_beside_another(folder: Path) -> None:
    pytest.importorskip("openvino", reason="install enginequant[openvino]")
    words = ["convert", "-m", "model", "--quantization", "--calibration", "text-csv:calibration.csv", "--samples", "12"]
    words += ["--backend", "openvino", "reference", "--batch-size", "1", "2", "4", "--seq-len", "16", "24", "32"]
    # The guide's engine is slow, and its times are not looked at.
    fast = "import quantizer.pipeline.benchmark as measure\nmeasure._LATENCY_SECONDS = 0.1\n"
    run(folder, f"{fast}from quantizer.cli.main import main\nsys.exit(main({[*words, '-o', 'converted']}))")
    for name in ("openvino", "reference"):
        entry = json.loads((folder / "converted" / name / "config.json").read_text(encoding="utf-8"))
        assert entry["backend"] == name
        assert entry["quantization"] is not None
        assert entry["checks"]
