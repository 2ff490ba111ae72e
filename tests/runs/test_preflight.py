"""What a run and a conversion check before they start: all at once, and with nothing written."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("transformers", reason="makes a transformers model: install enginequant[hf]")
pytest.importorskip("openvino", reason="install enginequant[openvino]")

from tiny_run import tiny_run

from quantizer.cli.main import main
from quantizer.config import RunConfig, load_run
from quantizer.config.sweep import SweepRun
from quantizer.engines.for_this_cpu import cpu_candidates
from quantizer.errors import MissingDependencyError, QuantizerError, TaskError, install_command
from quantizer.pipeline import preflight as run_ready
from quantizer.pipeline.context import RunExamples
from quantizer.pipeline.preflight import ready_to_run, run_estimate, sample_passes
from quantizer.pipeline.preflight_checks import Faults
from quantizer.pipeline.sweep import ready_to_sweep
from quantizer.utils.files import begun_in, temporary
from quantizer.utils.files.temporary import new_name


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    run = {**tiny_run(tmp_path), "output": str(tmp_path / "done")}
    # Of the two for OpenVINO the one for this CPU, of which nothing has to be said.
    (backend,), _ = cpu_candidates(("openvino",))
    return {**run, "quantizer": {**run["quantizer"], "preset": "balanced", "backend": backend}}


def _config(values: dict[str, Any], folder: Path) -> RunConfig:
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return load_run(folder / "run.yaml")


def _ready(values: dict[str, Any], folder: Path) -> Any:
    return ready_to_run(_config(values, folder), Path(values["output"]), "run", force=None)


def _without(*packages: str) -> Callable[..., Any]:
    find = importlib.util.find_spec
    return lambda name, *rest: None if name in packages else find(name, *rest)


def test_a_run_that_can_start(values: dict[str, Any], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    ready = _ready(values, tmp_path)
    assert not ready.notes
    assert ready.estimate.startswith("time: unknown before a first run; at least 256 samples of about ")
    assert " GiB, for 5 copies of 0.0 M parameters in float32" in ready.estimate
    # The same each time: no measurement is in it.
    assert _ready(values, tmp_path).estimate == ready.estimate
    assert {*tmp_path.rglob("*")} - {*before} == {tmp_path / "run.yaml"}


def test_everything_that_is_wrong_is_told_at_once(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evaluation.csv").write_text("text,label\na film,7\n")
    values["data"]["calibration"]["path"] = str(tmp_path / "none.csv")
    (tmp_path / "taken").write_text("")
    values["output"] = str(tmp_path / "taken" / "done")
    monkeypatch.setattr("quantizer.pipeline.preflight_checks.find_spec", _without("onnxscript", "jinja2"))
    with pytest.raises(QuantizerError, match="for 4 reasons") as told:
        _ready(values, tmp_path)
    first, *lines = str(told.value).splitlines()
    assert first == "the run cannot start, for 4 reasons:"
    assert lines[0] == f"  - onnxscript, jinja2 are not installed: run  {install_command('onnx,report')}"
    assert lines[1].startswith("  - data.calibration: data set 'text-csv': there is no file")
    assert "data.evaluation: the samples have label 7, but the model has 2 classes (0 to 1)" in lines[2]
    assert "taken is not a folder; choose another folder" in lines[3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("words,label\na,1\n", "data.evaluation: .*text"),
        ("text,label\na film,x\n", "data.evaluation: .*label"),
        ("", "data.evaluation: "),
    ],
)
def test_columns_and_labels(values: dict[str, Any], tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "evaluation.csv").write_text(text)
    with pytest.raises(TaskError, match=message):
        _ready(values, tmp_path)


def test_a_checkpoint_that_is_missing(values: dict[str, Any], tmp_path: Path) -> None:
    values["model"]["source"] = str(tmp_path / "nothing")
    with pytest.raises(TaskError, match="there is no folder"):
        _ready(values, tmp_path)


def test_a_gpu_that_is_missing(values: dict[str, Any], tmp_path: Path) -> None:
    values["quantizer"]["backend"] = "tensorrt"
    with pytest.raises(QuantizerError, match=r"tensorrt|GPU"):
        _ready(values, tmp_path)


def test_a_speed_goal_without_the_gpu_that_it_is_timed_on(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_ready, "runs_here", lambda name: False)
    values["fallback"] = {"min_speedup": 2.0}
    with pytest.raises(QuantizerError, match=r"min_speedup needs measured latencies.*expected num, ratio, names or"):
        _ready(values, tmp_path)
    values["fallback"] = {"num": 1}
    _ready(values, tmp_path)


def test_one_missing_package_is_the_error_that_it_always_was() -> None:
    faults = Faults()

    def missing() -> None:
        raise MissingDependencyError("scipy", "hf")

    faults.of(missing)
    with pytest.raises(
        MissingDependencyError, match=re.escape(f"'scipy' is not installed: run  {install_command('hf')}")
    ):
        faults.raise_all("nothing can start")
    faults.of(missing)
    with pytest.raises(QuantizerError, match=re.escape(f"scipy is not installed: run  {install_command('hf')}")):
        faults.raise_all("nothing can start")
    Faults().raise_all("nothing can start")


def test_a_folder_that_holds_something_else(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "done").mkdir()
    assert "already exists: use --force to replace it" in _ready(values, tmp_path).notes[0]
    (tmp_path / "done" / "thesis.tex").write_text("")
    with pytest.raises(QuantizerError, match=r"done .*nothing was changed: choose another folder"):
        _ready(values, tmp_path)


def test_a_name_too_long_for_the_files_beside_it(values: dict[str, Any], tmp_path: Path) -> None:
    values["output"] = str(tmp_path / ("n" * 247))
    with pytest.raises(QuantizerError, match=r"its name has 247 bytes, .*; use a name of at most 246 bytes"):
        _ready(values, tmp_path)
    values["output"] = str(tmp_path / ("n" * 256))
    with pytest.raises(QuantizerError, match=r"n cannot be written: File name too long; choose another path$"):
        _ready(values, tmp_path)


def test_a_sweep_looks_into_its_folder_once(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(values, tmp_path)
    folders: list[Path] = []
    monkeypatch.setattr(run_ready, "begun_in", lambda folder: folders.append(folder) or begun_in(folder))
    place = tmp_path / "swept"
    runs = [SweepRun(name, config.model_copy(update={"output": str(place / name)})) for name in ("a", "b", "c")]
    place.mkdir()
    assert not ready_to_sweep(runs).faults
    assert folders == [place]
    # One of them is written by another process now.
    written = new_name(place / "b")
    parts = written.name.split("-")
    parent = os.getppid()
    (place / "-".join([parts[0], str(parent), str(temporary._started(parent)), *parts[3:]])).mkdir()
    assert [*ready_to_sweep(runs).faults] == ["b"]


def test_passes_are_counted_by_what_a_run_does(values: dict[str, Any], tmp_path: Path) -> None:
    config = _config(values, tmp_path)
    rows = {"calibration": [1] * 16, "evaluation": [1] * 24}
    assert sample_passes(config, rows) == (1 + 12) * 16 + 2 * 24  # type: ignore[arg-type]
    diagnosed = _config({**values, "report": {"diagnose": True}}, tmp_path)
    assert sample_passes(diagnosed, rows) == 13 * 16 + 3 * 24  # type: ignore[arg-type]
    values |= {"amp": {}, "fallback": {"max_drop": 0.01, "max_evaluations": 5}}
    values["data"]["tuning"] = {"name": "text-csv", "path": str(tmp_path / "tuning.csv")}
    searched = _config(values, tmp_path)
    assert sample_passes(searched, {**rows, "tuning": [1] * 10}) == 13 * 16 + 2 * 24 + 50  # type: ignore[arg-type]


def test_no_estimate_without_weights(values: dict[str, Any], tmp_path: Path) -> None:
    config = _config(values, tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"cut")
    assert run_estimate(config, {"evaluation": RunExamples.of(config.data).evaluation}) is None


@pytest.mark.parametrize(
    ("change", "known"), [({}, True), ({"amp": {}}, False), ({"quantizer": {"backend": "torch"}}, False)]
)
def test_the_time_is_that_of_an_earlier_run_of_the_same_work(
    values: dict[str, Any], tmp_path: Path, change: dict[str, Any], known: bool
) -> None:
    config = _config(values, tmp_path).model_dump(mode="json")
    stages = [{"name": "export", "seconds": 61.0}, {"name": "check", "seconds": 30.0, "parent": "export"}]
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "report.json").write_text(json.dumps({"config": config, "choice": None, "stages": stages}))
    estimate = _ready(values | change, tmp_path).estimate
    assert estimate.startswith("time: about 1 min, as in an earlier run; memory: about ") is known
    assert estimate.startswith("time: unknown before a first run; at least ") is not known


def test_validate_tells_all_of_it(values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "run.yaml")
    _config(values, tmp_path)
    assert main(["validate", path]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"ok: {path}\n  time: unknown before a first run; at least ")
    (tmp_path / "calibration.csv").unlink()
    (tmp_path / "evaluation.csv").unlink()
    assert main(["validate", path]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {path}: the run cannot start, for 2 reasons:\n")
    assert main(["validate", "--file-only", path]) == 0


def test_a_mistake_in_the_file_hides_no_other(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values["data"]["evaluation"]["rowz"] = 3
    values["engine"] = {"inference_precision": "bf16"}
    values["quantizer"] = {"backend": "openvino", "dtype": "fp8"}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    (tmp_path / "calibration.csv").unlink()
    (tmp_path / "model" / "config.json").unlink()
    assert main(["validate", str(path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: 6 problems in the configuration:\n")
    for told in ("data.evaluation.rowz: unknown key", "did you mean 'bfloat16'", "does not support weights in fp8"):
        assert told in err
    assert f"{path}: data.calibration: " in err
    assert main(["validate", "--file-only", str(path)]) == 1
    assert capsys.readouterr().err.startswith("error: 2 problems in the configuration:\n")


def test_a_run_begins_with_it(values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _config(values, tmp_path)
    (tmp_path / "calibration.csv").unlink()
    (tmp_path / "evaluation.csv").unlink()
    assert main(["run", str(tmp_path / "run.yaml")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "the run cannot start, for 2 reasons" in err
    assert not (tmp_path / "done").exists()


def test_a_conversion_begins_with_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["convert", "-m", str(tmp_path / "none"), "--quantization", "--backend", "openvino"]
    words += ["--calibration", str(tmp_path / "none.txt"), "-o", str(tmp_path / "done")]
    assert main(words) == 1
    err = capsys.readouterr().err
    assert "the conversion cannot start, for 2 reasons" in err
    assert not (tmp_path / "done").exists()


def test_a_conversion_refuses_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(["convert", "-m", "any"]) == 1
    assert "quantizer convert runs in one process, and this is rank 1 of 2" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "1")
    main(["convert", "-m", "any"])
    assert "is one process" not in capsys.readouterr().err
