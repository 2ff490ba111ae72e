"""The diagnosis of a run: within it if asked for, of its folder, and of a result in Python."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import quantizer
import quantizer.pipeline.benchmark as run_measure
from quantizer.cli.main import main
from quantizer.config import load_run
from quantizer.engines import PeakMemory
from quantizer.engines.for_this_cpu import cpu_candidates
from quantizer.errors import ConfigError, QuantizerError
from quantizer.pipeline import convert_options
from quantizer.pipeline.convert_options import conversion_configs, convert_onnx
from quantizer.pipeline.diagnose_run import wants_diagnosis
from quantizer.report import RunRecord, read_record, write_record

for _package in ("onnx", "onnxscript", "onnxruntime", "jinja2"):
    pytest.importorskip(_package, reason="a run needs enginequant[onnx,onnxruntime,report]")

ONNXRUNTIME = next(name for name in cpu_candidates()[0] if name.startswith("onnxruntime"))

pytestmark = pytest.mark.usefixtures("exact_byte_products")

CODE = """
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 16, generator=generator) for _ in range(3)]


def score(model):
    with torch.no_grad():
        return torch.cat([model(x) for x in batches()]).abs().mean()
"""
# Values are clipped, so that accuracy is lost.
RUN = {
    "model": {"source": "diagnosed_nets:build", "inputs": "diagnosed_nets:batches", "metric": "diagnosed_nets:score"},
    "quantizer": {"backend": ONNXRUNTIME, "preset": "plain", "activations": {"percentile": 50.0}},
}
STAGES = {"measure sensitivity", "diagnose", "measure memory"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module, a configuration, a finished run of it, and the same run with its diagnosis."""
    folder = tmp_path_factory.mktemp("diagnosed")
    torch.set_num_threads(1)
    (folder / "diagnosed_nets.py").write_text(CODE)
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(run_measure, "peak_memory_mib", _peak)
        assert main(["run", "run.yaml", "--output", "my run"]) == 0
        assert main(["run", "run.yaml", "report.diagnose=true", "--output", "whole"]) == 0
    return folder


@pytest.fixture
def at(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a copy of the run; the module can be imported."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(run_measure, "peak_memory_mib", _peak)
    shutil.copytree(place / "my run", tmp_path / "my run")
    return tmp_path


def _peak(*_: Any, **__: Any) -> PeakMemory:
    return PeakMemory(peak_mib=3.0, baseline_mib=1.0)


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("measured again")


def _content(folder: Path) -> Mapping[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _same_diagnosis(one: RunRecord, other: RunRecord) -> None:
    assert one.diagnoses
    assert one.diagnoses == other.diagnoses
    assert one.measure == other.measure == "gradient"
    assert [(row.group, row.error) for row in one.sensitivity] == [(row.group, row.error) for row in other.sensitivity]
    assert [entry.name for entry in one.memory] == [entry.name for entry in other.memory] == ["float", "engine"]


def test_a_run_is_diagnosed_if_it_says_so(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, whole = (read_record(place / name / "report.json") for name in ("my run", "whole"))
    assert (result.sensitivity, result.diagnoses, result.memory) == ((), (), ())
    assert not STAGES & {stage.name for stage in result.stages}
    assert {stage.name for stage in whole.stages} >= STAGES
    assert len(whole.diagnoses) == 3
    assert [score.form for score in whole.scores] == ["float", "proxy", "engine"]
    assert result.scores == (whole.scores[0], whole.scores[2])
    assert main(["show", str(place / "my run")]) == 0
    command = f"causes  quantizer diagnose '{place / 'my run'}'"
    assert command in capsys.readouterr().out.splitlines()
    assert main(["show", str(place / "whole")]) == 0
    out = capsys.readouterr().out
    assert "causes" not in out
    assert f"1. {whole.diagnoses[0].group}" in out


@pytest.mark.parametrize(
    ("settings", "diagnosed", "ranked"),
    [
        (["report.diagnose=true"], True, True),
        ([], False, False),
        (["report.diagnose=true", "quantize=false"], False, False),
        (["amp={}"], False, True),
    ],
)
def test_sensitivity_is_measured_with_its_defaults(
    place: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], diagnosed: bool, ranked: bool
) -> None:
    monkeypatch.chdir(place)
    config = load_run("run.yaml", settings)
    assert (wants_diagnosis(config), config.amp is not None) == (diagnosed, ranked)


def test_a_folder_is_diagnosed_as_within_the_run(
    place: Path, at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = at / "my run"
    before, files = read_record(folder / "report.json"), _content(folder)
    monkeypatch.setattr(quantizer.Quantizer, "calibrate", _never)
    assert main(["diagnose", str(folder)]) == 0
    after = read_record(folder / "report.json")
    _same_diagnosis(after, read_record(place / "whole" / "report.json"))
    assert after.latency_fallback is not None
    assert len(after.latency_fallback.frontier) == 1 + len(after.sensitivity)
    out = " ".join(capsys.readouterr().out.split())
    assert f"1. {after.diagnoses[0].group}: output SQNR" in out
    assert "fix: quantizer: {activations:" in out
    assert after.diagnoses[0].group in (folder / "report.html").read_text()
    # All else stays, the text on how to run the engine included.
    changed = _content(folder)
    assert {name for name in changed if changed[name] != files.get(name)} == {"report.json", "report.html"}
    assert changed.keys() == files.keys()
    assert {path.name for path in at.iterdir()} == {"my run"}
    measured = ("sensitivity", "measure", "diagnoses", "memory", "latency_fallback", "stages")
    assert replace(after, **{name: getattr(before, name) for name in measured}) == before
    # The marker lists the files, so that the next run may replace the folder.
    monkeypatch.setattr(quantizer.Quantizer, "load", _never)
    assert main(["diagnose", str(folder)]) == 0
    assert f"1. {after.diagnoses[0].group}" in capsys.readouterr().out


def test_interrupted_the_folder_stays_as_it_was(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    before = _content(at)
    monkeypatch.setattr(quantizer.Quantizer, "diagnose", interrupted)
    assert main(["diagnose", str(at / "my run")]) == 130
    assert _content(at) == before


def test_a_diagnosis_that_fails_is_in_the_report_and_can_be_repeated(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(quantizer.Quantizer, "amp", _never)
        with pytest.warns(UserWarning, match="the diagnosis failed; the result is complete without it"):
            assert main(["diagnose", str(at / "my run")]) == 1
    assert "the diagnosis failed: AssertionError: measured again" in capsys.readouterr().err
    record = read_record(at / "my run" / "report.json")
    assert record.diagnosis_error == "AssertionError: measured again"
    assert record.scores
    assert main(["diagnose", str(at / "my run")]) == 0
    after = read_record(at / "my run" / "report.json")
    assert after.diagnosis_error is None
    assert after.diagnoses


def _with(**sections: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        record = read_record(folder / "report.json")
        write_record(replace(record, config={**record.config, **sections}), folder / "report.json")

    return change


def _gone(folder: Path) -> None:
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("diagnosed_nets:batches", "diagnosed_nets:missing"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with(data={"calibration": {"name": "given in Python"}}), r"call result\.diagnose\(\) in Python"),
        (_with(quantize=False), r"quantized nothing \(quantize: false\); run it with quantize: true"),
        (_with(qat={}), r"training changed its weights \(qat\).*~qat"),
        (lambda folder: shutil.rmtree(folder / "quantizer"), r"quantizer is missing; expected the quantizer"),
        (_gone, r"the model or the data .* cannot be loaded again: .*diagnosed_nets\.py has no 'missing'"),
        (lambda folder: (folder / "report.json").unlink(), r"does not contain report\.json; expected the folder of a"),
        (shutil.rmtree, r"is not a folder; expected the folder of a finished run"),
    ],
    ids=["python", "float", "qat", "quantizer", "data", "report", "folder"],
)
def test_what_cannot_be_diagnosed_is_told(
    at: Path, change: Callable[[Path], None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(at / "my run")
    before = _content(at)
    assert main(["diagnose", str(at / "my run")]) == 1
    error = capsys.readouterr().err
    assert str(at / "my run") in error
    with pytest.raises(QuantizerError, match=message):
        raise QuantizerError(error)
    assert _content(at) == before


def test_the_runs_in_a_folder_are_named(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(at)]) == 1
    assert f"contains 1; expected one of them: `quantizer diagnose '{at / 'my run'}'`" in capsys.readouterr().err


def test_the_runs_of_a_sweep_are_diagnosed_within_them(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["quantizer.activations.percentile=50,60", "report.diagnose=true", "--output", str(at / "swept")]
    assert main(["run", "run.yaml", *words]) == 0
    records = [read_record(at / "swept" / f"percentile={value}" / "report.json") for value in (50, 60)]
    for record in records:
        assert record.diagnoses
        assert [stage.name for stage in record.stages].count("diagnose") == 1
        assert record.memory
    # Nothing is left to be done by the same command.
    monkeypatch.setattr("quantizer.pipeline.sweep.carry_out", _never)
    assert main(["run", "run.yaml", *words]) == 0


# -- in Python ---------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.relu(self.down(torch.relu(self.up(x)))))
        return result


def _batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 16, generator=generator) for _ in range(3)]


def _result(**settings: Any) -> Any:
    torch.manual_seed(0)
    given = {"backend": ONNXRUNTIME, "preset": "plain", "activations": {"percentile": 50.0}, **settings}
    return quantizer.quantize_model(Net().eval(), _batches(), **given)


def test_a_result_is_diagnosed_when_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_measure, "peak_memory_mib", _peak)
    result, whole = _result(), _result(diagnose=True)
    assert (result.record.sensitivity, result.record.diagnoses, result.record.memory) == ((), (), ())
    assert not STAGES & {stage.name for stage in result.record.stages}
    assert "causes  result.diagnose()" in result.summary().splitlines()
    with pytest.raises(QuantizerError, match=r"diagnose\(num=0\): expected the number of groups, 1 or more"):
        result.diagnose(0)
    saved = result.save(tmp_path / "saved")
    own = result.quantizer
    with monkeypatch.context() as patch:
        patch.setattr(quantizer.Quantizer, "calibrate", _never)
        found = result.diagnose()
    _same_diagnosis(result.record, whole.record)
    assert found.rows == result.record.diagnoses
    assert own.sensitivity.rows == result.record.sensitivity
    assert "causes" not in result.summary()
    for folder in (result.folder, saved):
        assert read_record(folder / "report.json") == result.record
        assert found[0].group in (folder / "report.html").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(quantizer.Quantizer, "load", _never)
        assert result.diagnose().rows == found.rows
        assert result.diagnose(1).rows == found.rows[:1]
        assert whole.diagnose().rows == found.rows


def test_only_the_folder_with_this_result_is_updated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_measure, "peak_memory_mib", _peak)
    result = _result()
    saved = result.save(tmp_path / "saved")
    other = read_record(saved / "report.json")
    write_record(replace(other, name="another run"), saved / "report.json")
    before = _content(saved)
    result.diagnose(1)
    assert len(result.record.diagnoses) == 1
    assert _content(saved) == before
    # More groups than before are measured.
    assert len(result.diagnose(2)) == 2
    shutil.rmtree(saved)
    assert len(result.diagnose(3)) == 3
    assert not saved.exists()


def test_the_diagnosis_of_a_result_that_fails_costs_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_measure, "peak_memory_mib", _peak)
    result = _result()
    with monkeypatch.context() as patch:
        patch.setattr(quantizer.Quantizer, "diagnose", _never)
        with pytest.warns(UserWarning, match="the diagnosis failed; .* AssertionError: measured again"):
            assert len(result.diagnose()) == 0
    assert result.record.diagnosis_error == "AssertionError: measured again"
    assert len(result.diagnose()) == 3
    assert result.record.diagnosis_error is None


# -- conversions -------------------------------------------------------------------------------------------------------


def test_a_conversion_is_diagnosed_with_an_option(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    given = {"model": RUN["model"]["source"], "inputs": RUN["model"]["inputs"], "output": tmp_path / "out"}
    (plain,) = conversion_configs({**given, "quantization": True}, function=True)
    assert (plain.report.diagnose, plain.amp) == (False, None)
    (config,) = conversion_configs({**given, "quantization": True, "diagnose": True}, function=True)
    assert config.report.diagnose
    assert config.amp is not None
    with pytest.raises(ConfigError, match="--diagnose is only used with --quantization; add --quantization"):
        conversion_configs({**given, "diagnose": True}, function=True)


@pytest.mark.parametrize("diagnose", [False, True])
def test_an_onnx_file_is_diagnosed_with_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, diagnose: bool
) -> None:
    def stopped(*_: Any, **settings: Any) -> Any:
        assert settings["diagnose"] is diagnose
        raise QuantizerError("far enough")

    monkeypatch.setattr(convert_options, "from_onnx", lambda *_, **__: None)
    monkeypatch.setattr(convert_options, "array_batches", lambda *_: [])
    monkeypatch.setattr(convert_options, "quantize_model", stopped)
    given = {"model": "net.onnx", "output": tmp_path / "out", "quantization": True, "calibration": "data.npz"}
    with pytest.raises(QuantizerError, match="far enough"):
        convert_onnx(given | ({"diagnose": True} if diagnose else {}), False, None)  # type: ignore[arg-type]
