"""What is interrupted or killed goes on: the same call runs no calibration again, and its files are equal."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

for _package in ("onnx", "onnxscript", "onnxruntime", "openvino", "jinja2"):
    pytest.importorskip(_package, reason="needs enginequant[onnx,onnxruntime,openvino,report]")

import fixed_times
from daily import some_daily
from outside import begin_script

import quantizer
from quantizer.cli.main import main
from quantizer.engines.for_this_cpu import cpu_candidates
from quantizer.errors import QuantizerError
from quantizer.utils.fingerprint import tensors_digest

OPENVINO, ONNXRUNTIME = (next(one for one in cpu_candidates()[0] if one.startswith(name)) for name in ("open", "onnx"))

pytestmark = pytest.mark.usefixtures("exact_byte_products")

# A module of the user, which counts the passes of its model in a file, and whose score of an engine can be stopped.
SOURCE = """
import os
import time

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, counted=True):
        super().__init__()
        self.counted = counted
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        if self.counted:
            with open("passes", "a") as file:
                file.write(".")
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def net(counted=True):
    torch.manual_seed(3)
    return Net(counted).eval()


def calibration():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 16, generator=generator) for _ in range(40)]


FLOAT = net(counted=False)


def score(model):
    if type(model).__name__ == "EngineModule" and os.path.exists("stop"):
        if os.path.exists("interrupt"):
            raise KeyboardInterrupt
        open("waits", "w").close()
        time.sleep(60)
    with torch.no_grad():
        return -torch.cat([(model(x) - FLOAT(x)).abs() for x in calibration()[:4]]).mean().item()
"""
BATCHES = 40
BUDGET = {"fallback": {"max_drop": 0.0002}}


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The user's module, imported from the current folder."""
    torch.set_num_threads(1)
    (tmp_path / "of_user.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    # They are those of the process that is killed, and those of the next call.
    fixed_times.fix(monkeypatch.setattr)
    yield importlib.import_module("of_user")
    del sys.modules["of_user"]


def _passes() -> int:
    """The number of passes of the model since the last call."""
    file = Path("passes")
    count = len(file.read_text()) if file.exists() else 0
    file.write_text("")
    return count


def _files(folder: Path) -> dict[str, bytes]:
    names = ("model.onnx", "quantizer/quantizer.yaml", "quantizer/ranges.safetensors", "quantizer/observed.safetensors")
    return {name: (folder / name).read_bytes() for name in names}


def _contents(result: Any, net: nn.Module) -> dict[str, object]:
    """What must not depend on an interrupt: the files, and the frozen proxy."""
    return {**_files(result.folder), "proxy": tensors_digest(result.quantizer.quantize(net).state_dict())}


def _quantize(user: Any, net: nn.Module | None = None, **settings: Any) -> Any:
    model = user.net() if net is None else net
    return quantizer.quantize_model(model, user.calibration(), score=user.score, **{"backend": ONNXRUNTIME, **settings})


def _killed(settings: dict[str, Any]) -> None:
    """Kill a process that makes the same call, when it scores an engine."""
    Path("stop").touch()
    code = "import fixed_times, of_user, torch, quantizer as q; torch.set_num_threads(1); fixed_times.fix(setattr); "
    code += f"q.quantize_model(of_user.net(), of_user.calibration(), **{settings!r}, score=of_user.score)"
    Path("killed.py").write_text(code)
    process, output = begin_script(Path.cwd(), "killed.py")
    try:
        for _ in range(3000):
            if Path("waits").exists() or not process.is_alive():
                break
            time.sleep(0.1)
    finally:
        process.kill()
        process.join()
    assert Path("waits").exists(), output.read_text()
    Path("stop").unlink()
    _passes()


def test_what_is_killed_goes_on(user: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With a search, which corrects biases again for each choice of groups."""
    model = user.net()
    expected, passes = _contents(_quantize(user, model, **BUDGET), model), _passes()
    _killed({"backend": ONNXRUNTIME, **BUDGET, "store": "kept"})
    capsys.readouterr()
    model = user.net()
    result = _quantize(user, model, progress=True, store="kept", **BUDGET)
    fewer = passes - _passes()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "resumes: " in line]
    assert line.startswith("  resumes: calibration, 1 plan, ")
    assert line.endswith(f" from {Path('kept').absolute()}")
    # Neither the calibration nor the passes for its plan.
    assert fewer > BATCHES
    assert 0 < len(result.quantizer.chosen_fallback.groups) < len(model.layers)
    assert _contents(result, model) == expected
    assert not Path("kept").exists()


def test_an_interrupted_choice_goes_on(user: Any) -> None:
    """With two backends, each with a plan of its own from one calibration."""
    settings = {"backend": [ONNXRUNTIME, OPENVINO], "time_budget": None}
    whole = _quantize(user, **settings).record.choice
    passes = _passes()
    for name in ("stop", "interrupt"):
        Path(name).touch()
    with pytest.raises(KeyboardInterrupt, match=r"are kept in .*/kept; make the same call again to resume"):
        _quantize(user, store="kept", **settings)
    Path("stop").unlink()
    _passes()
    choice = _quantize(user, store="kept", **settings).record.choice
    assert passes - _passes() > BATCHES
    assert {one.name: one.sqnr_db for one in choice.candidates} == {one.name: one.sqnr_db for one in whole.candidates}


def test_without_a_store_the_interrupt_says_that_there_is_one(user: Any) -> None:
    for name in ("stop", "interrupt"):
        Path(name).touch()
    with pytest.raises(KeyboardInterrupt, match="nothing is kept; with store=FOLDER, the same call resumes"):
        _quantize(user, backend=[ONNXRUNTIME])


def _other_weight(user: Any) -> dict[str, Any]:
    net = user.net()
    with torch.no_grad():
        net.layers[1].weight[3, 3] += 1e-6
    return {"net": net}


def _other_setting(user: Any) -> dict[str, Any]:
    return {"exclude": {"names": ["layers.0"]}}


def _other_sample(user: Any) -> dict[str, Any]:
    batches = user.calibration()
    batches[7][0, 0] += 1e-6
    user.calibration = lambda: batches
    return {}


def _other_attribute(user: Any) -> dict[str, Any]:
    net = user.net()
    net.layers[2].eps = 3
    return {"net": net}


def _other_code(user: Any) -> dict[str, Any]:
    class Net(user.Net):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) * 2

    torch.manual_seed(3)
    return {"net": Net().eval()}


@pytest.mark.parametrize("change", [_other_weight, _other_setting, _other_sample, _other_attribute, _other_code])
def test_what_changed_is_calibrated_again(user: Any, change: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is another key; that an equal one is found is tested above."""
    q = quantizer.Quantizer(backend=ONNXRUNTIME)
    told: list[str] = []
    q.calibrate(user.net(), user.calibration(), cache="kept", tell=told.append)
    settings = change(user)
    net = settings.pop("net", None) or user.net()
    other = quantizer.Quantizer(backend=ONNXRUNTIME, **settings)
    _passes()
    other.calibrate(net, user.calibration(), cache="kept", tell=told.append)
    assert _passes() == BATCHES
    assert not told
    again = quantizer.Quantizer(backend=ONNXRUNTIME, **settings)
    again.calibrate(net, user.calibration(), cache="kept", tell=told.append)
    assert told == ["calibration, 0 plans"]
    assert _passes() == 0


def _a_file(folder: Path) -> None:
    folder.touch()


def _a_folder_of_others(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.tex").touch()


def _read_only(folder: Path) -> None:
    folder.mkdir(0o500)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_a_file, "kept cannot be written: .*kept is not a folder"),
        (_a_folder_of_others, "kept contains 'thesis.tex', which quantizer did not write"),
        pytest.param(
            _read_only,
            "kept cannot be written: .*read-only",
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere"),
        ),
    ],
)
def test_a_store_that_cannot_be_one(user: Any, make: Any, message: str) -> None:
    make(Path("kept"))
    with pytest.raises(QuantizerError, match=message):
        _quantize(user, store="kept")
    assert not Path("passes").exists()


def test_a_damaged_entry_is_made_again(user: Any, caplog: pytest.LogCaptureFixture) -> None:
    first = quantizer.Quantizer(backend=ONNXRUNTIME)
    first.calibrate(user.net(), user.calibration(), cache="kept")
    (file,) = Path("kept").glob("*/*/file")
    file.write_bytes(file.read_bytes()[:-1])
    _passes()
    second = quantizer.Quantizer(backend=ONNXRUNTIME)
    second.calibrate(user.net(), user.calibration(), cache="kept")
    assert _passes() == BATCHES
    assert "a stored result is damaged, so it is made again" in caplog.text


def test_an_error_keeps_what_the_user_stores(user: Any) -> None:
    def fails(model: nn.Module) -> float:
        if type(model).__name__ == "EngineModule":
            raise RuntimeError("of the user")
        return 1.0

    with pytest.raises(RuntimeError, match="of the user"):
        quantizer.quantize_model(user.net(), user.calibration(), score=fails, backend=ONNXRUNTIME, store="kept")
    before = _passes()
    _quantize(user, store="kept")
    assert _passes() < before - BATCHES
    assert not Path("kept").exists()


FUNCTIONS = {"source": "of_user:net", "inputs": "of_user:calibration", "metric": "of_user:score"}
RUN = ("run", "run.yaml")
CONVERT = ("convert", "-m", "of_user:net", "--inputs", "of_user:calibration", "--score", "of_user:score")
COMMANDS = {
    "run": (*RUN,),
    "convert": (*CONVERT, "--quantization", "--backend", "auto", ONNXRUNTIME),
    "sweep": (*RUN, "engine.threads=1,2"),
}


# A sweep that is killed goes on in test_sweep.py.
@pytest.mark.parametrize("command", some_daily([*COMMANDS], 2))
def test_commands_go_on(user: Any, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"model": FUNCTIONS, "quantizer": {"backend": ONNXRUNTIME}}
    Path("run.yaml").write_text(yaml.safe_dump(run))
    assert main([*COMMANDS[command], "--output", "whole"]) == 0
    passes = _passes()
    for name in ("stop", "interrupt"):
        Path(name).touch()
    assert main([*COMMANDS[command], "--output", "out"]) == 130
    Path("stop").unlink()
    _passes()
    capsys.readouterr()
    assert main([*COMMANDS[command], "--output", "out"]) == 0
    place = Path("out/resume" if command == "sweep" else "out.resume").absolute()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "resumes: " in line]
    assert line.startswith("  resumes: calibration, 1 plan")
    assert line.endswith(f" from {place}")
    assert _passes() < passes - BATCHES
    assert not place.exists()
    for file in Path("whole").rglob("model.onnx"):
        assert file.read_bytes() == (Path("out") / file.relative_to("whole")).read_bytes()
