"""Sweeps of a tiny classifier: what runs share, what is left of one that fails or is killed, and what is refused."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

for _package in ("transformers", "sklearn", "onnx", "onnxscript", "onnxruntime", "jinja2"):
    pytest.importorskip(_package, reason="a sweep needs enginequant[hf,onnx,onnxruntime,report]")

import transformers
from pydantic import BaseModel
from tiny_run import tiny_run
from transformers import AutoTokenizer

import quantizer.pipeline.benchmark as run_measure
import quantizer.pipeline.run_engines as run_engines
import quantizer.pipeline.sweep as one_run
from quantizer import Quantizer
from quantizer.cli.main import main
from quantizer.config import load_run
from quantizer.config.sweep import SweepRun
from quantizer.engines import PeakMemory
from quantizer.pipeline import sweep as launchers
from quantizer.pipeline.load_workload import shared_work
from quantizer.pipeline.sweep import Outcome, Pace, config_of, plain_config, ready_to_sweep, time_left
from quantizer.report import read_record
from quantizer.tasks.classification import EmbeddingClassification

pytestmark = pytest.mark.usefixtures("exact_byte_products")

CONFIGS = Path(__file__).parents[2] / "configs"
PERCENTILES = "quantizer.activations.percentile=99.9,60"
FIRST, SECOND = "percentile=99.9", "percentile=60"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data and a configuration."""
    folder = tmp_path_factory.mktemp("sweep")
    torch.set_num_threads(1)
    settings = tiny_run(folder)
    settings["quantizer"] |= {"backend": "onnxruntime", "preset": "plain"}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.fixture
def at(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with the configuration; memory is not measured."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(place / "tiny.yaml", tmp_path)
    monkeypatch.setattr(run_measure, "peak_memory_mib", lambda *_, **__: PeakMemory(peak_mib=3.0, baseline_mib=1.0))
    return tmp_path


@pytest.fixture(scope="module")
def done(place: Path) -> Path:
    """The folder of a sweep of two percentiles and two exclusions, one of which matches nothing; its calibrations."""
    calibrations: list[Any] = []
    calibrate = Quantizer.calibrate

    def counted(self: Quantizer, *given: Any, **more: Any) -> Any:
        calibrations.append(self.config)
        return calibrate(self, *given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(Quantizer, "calibrate", counted)
        patch.setattr(run_measure, "peak_memory_mib", lambda *_, **__: PeakMemory(peak_mib=3.0, baseline_mib=1.0))
        excluded = "quantizer.exclude.names=[classifier],[nothing.like.it]"
        assert main(["run", "tiny.yaml", PERCENTILES, excluded, "--output", "swept"]) == 1
    right = [config for config in calibrations if config.exclude.names == ("classifier",)]
    assert len(right) == 1
    return place / "swept"


GOOD = tuple(f"{name},names=classifier" for name in (FIRST, SECOND))
BAD = tuple(f"{name},names=nothing.like.it" for name in (FIRST, SECOND))


def test_what_runs_share_is_made_once(done: Path) -> None:
    stages = [[stage.name for stage in read_record(done / name / "report.json").stages] for name in GOOD]
    assert [names.count("score the float") for names in stages] == [1, 0]
    first, second = ((done / name / "float.engine").read_bytes() for name in GOOD)
    assert first == second
    # Nothing that was shared is left over.
    assert {path.name for path in done.iterdir()} == {*GOOD, "comparison.html", "comparison.csv", "times"}


def test_failures_are_rows(done: Path) -> None:
    page = (done / "comparison.html").read_text()
    with (done / "comparison.csv").open() as stream:
        rows = {row["run"]: row for row in csv.DictReader(stream)}
    assert set(rows) == {*GOOD, *BAD}
    for name in BAD:
        assert not (done / name).exists()
        assert name in page
        assert "nothing.like.it" in rows[name]["error"]
        assert rows[name]["score"] == ""
    assert "2 runs failed" in page


def test_a_run_of_a_sweep_equals_the_run_alone(done: Path, at: Path) -> None:
    assert main(["run", "tiny.yaml", "quantizer.activations.percentile=60", "--output", "alone"]) == 0
    alone, swept = Quantizer.load(at / "alone" / "quantizer"), Quantizer.load(done / GOOD[1] / "quantizer")
    assert alone.config == swept.config
    scales, others = alone.scales(), swept.scales()
    assert scales.keys() == others.keys()
    assert all(torch.equal(scale, others[name]) for name, scale in scales.items())
    one, other = read_record(at / "alone" / "report.json"), read_record(done / GOOD[1] / "report.json")
    assert [score.value for score in one.scores] == [score.value for score in other.scores]
    assert (at / "alone" / "resamples.json").read_text() == (done / GOOD[1] / "resamples.json").read_text()


def test_killed_and_started_again(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    carry_out = one_run.carry_out

    def killed(config: Any, folder: Path, *more: Any) -> Any:
        if folder.name == SECOND:
            raise KeyboardInterrupt
        return carry_out(config, folder, *more)

    command = ["run", "tiny.yaml", PERCENTILES, "--output", "swept"]
    monkeypatch.setattr(one_run, "carry_out", killed)
    add = Pace.add
    monkeypatch.setattr(Pace, "add", lambda pace, place, _: add(pace, place, 60.0))
    assert main(command) == 130
    said = capsys.readouterr()
    assert f"1 of 2 runs complete, in {at / 'swept'}; run the same command again to continue" in said.err
    assert f"run 1 of 2: {FIRST}\n" in said.out
    assert f"run 2 of 2: {SECOND}, at most about 1 min left\n" in said.out
    before = (at / "swept" / FIRST / "report.json").read_bytes()
    monkeypatch.setattr(one_run, "carry_out", carry_out)
    assert main(command) == 0
    assert "1 of 2 runs are already complete" in capsys.readouterr().out
    assert (at / "swept" / FIRST / "report.json").read_bytes() == before
    page = (at / "swept" / "comparison.html").read_bytes()
    # All are complete: nothing is carried out, and the page is the same.
    monkeypatch.setattr(one_run, "carry_out", killed)
    (at / "swept" / "comparison.html").unlink()
    assert main(command) == 0
    assert (at / "swept" / "comparison.html").read_bytes() == page
    # Runs of another configuration are not replaced unasked.
    assert main([*command, "report.bootstrap=60"]) == 1
    assert "contains a run of another configuration; choose another folder with --output, or" in capsys.readouterr().err
    assert (at / "swept" / FIRST / "report.json").read_bytes() == before


def test_what_a_killed_sweep_shared_goes_with_the_next_one(tmp_path: Path) -> None:
    left = (
        "import sys; from pathlib import Path; from quantizer.utils.files.temporary import new_name; "
        "place = new_name(Path(sys.argv[1]) / 'shared'); place.mkdir(); (place / 'float.engine').touch(); print(place)"
    )
    command = [sys.executable, "-c", left, str(tmp_path)]
    killed = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    assert killed.is_dir()
    with shared_work(tmp_path):
        assert not killed.exists()
        assert len(list(tmp_path.iterdir())) == 1
    assert not list(tmp_path.iterdir())


def test_other_files_of_the_folder_are_left_alone(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (at / "swept" / FIRST).mkdir(parents=True)
    assert main(["run", "tiny.yaml", PERCENTILES, "--output", "swept"]) == 1
    assert f"{FIRST} is not a run of this sweep" in capsys.readouterr().err
    (at / "done").mkdir()
    (at / "done" / ".quantizer.json").write_text('{"format": 1, "kind": "run", "holds": []}')
    assert main(["run", "tiny.yaml", PERCENTILES, "--output", "done"]) == 1
    assert "contains a run, but a sweep needs its own folder" in capsys.readouterr().err
    assert main(["run", "tiny.yaml", PERCENTILES, "report.formats=[html]", "--output", "x"]) == 1
    assert "report.formats: json is missing" in capsys.readouterr().err


def test_thousands_of_runs(at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    many = f"engine.threads={','.join(map(str, range(1, 2001)))}"
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert main(["run", "tiny.yaml", many]) == 1
    assert "this sweep has 2,000 runs, more than 50; use fewer values, or confirm with --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda *_: "n")
    assert main(["run", "tiny.yaml", many]) == 1
    assert "nothing was started" in capsys.readouterr().err
    assert main(["run", "tiny.yaml", many, "quantizer.bakend=a,b", "--yes"]) == 1
    assert capsys.readouterr().err.count("unknown key") == 1
    assert main(["run", "tiny.yaml", PERCENTILES, "--jobs", "0"]) == 1
    assert "--jobs 0: expected at least 1 process" in capsys.readouterr().err
    assert not (at / "runs").exists()


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_process_gets_the_same_configuration(file: Path) -> None:
    """With the same fields set: what a file leaves open is chosen by the run."""

    def compare(one: Any, other: Any) -> None:
        assert one == other
        if isinstance(one, BaseModel):
            assert one.model_fields_set == other.model_fields_set
            for name in type(one).model_fields:
                compare(getattr(one, name), getattr(other, name))

    config = load_run(file)
    compare(config, config_of(json.loads(json.dumps(plain_config(config)))))


@pytest.mark.nightly
def test_in_several_processes(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = "quantizer.exclude.names=[classifier],[nothing.like.it]"
    assert main(["run", "tiny.yaml", values, "--output", "swept", "--jobs", "2"]) == 1
    said = capsys.readouterr().out
    assert "names=classifier: done" in said
    assert "names=nothing.like.it: failed: " in said
    assert "calibrate" in (at / "swept" / "logs" / "names=classifier.log").read_text()
    assert (at / "swept" / "names=classifier" / "report.json").exists()
    assert "1 run failed" in (at / "swept" / "comparison.html").read_text()


@pytest.mark.filterwarnings("ignore:Exception ignored .*logs/DEBUG_:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("cluster", ["debug", pytest.param("local", marks=pytest.mark.nightly)])
def test_in_jobs_of_a_launcher(
    cluster: str, at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Without Slurm submitit starts its jobs on this machine; those of "debug" in this process, their logs left open.
    submitit = pytest.importorskip("submitit", reason="pip install 'enginequant[submitit]'")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if cluster == "debug":
        monkeypatch.setattr(submitit, "AutoExecutor", partial(submitit.AutoExecutor, cluster="debug"))
    assert main(["run", "tiny.yaml", "--launcher", "submitit"]) == 1
    assert "--launcher is only for a sweep" in capsys.readouterr().err
    values = "quantizer.exclude.names=[classifier],[nothing.like.it]"
    assert main(["run", "tiny.yaml", values, "--output", "swept", "--launcher", "submitit", "--jobs", "2"]) == 1
    said = capsys.readouterr().out
    assert "2 runs in 2 jobs of submitit" in said
    assert "names=classifier: done" in said
    assert "names=nothing.like.it: failed: " in said
    assert "calibrate" in (at / "swept" / "logs" / "names=classifier.log").read_text()
    assert (at / "swept" / "names=classifier" / "report.json").exists()
    assert "1 run failed" in (at / "swept" / "comparison.html").read_text()


def test_a_job_that_ends_before_its_time(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended:
        job_id = "7"
        paths = SimpleNamespace(stderr="7.err")

        def exception(self) -> Exception:
            return RuntimeError("has not produced any output\nslurmstepd: out of memory")

    complete = SweepRun("complete", load_run("tiny.yaml"))
    other = SweepRun("other", load_run("tiny.yaml"))
    monkeypatch.setattr(launchers, "is_done", lambda run, folder: run is complete)
    assert launchers.outcomes_of(Ended(), [complete, other], at) == [
        Outcome("complete", None),
        Outcome("other", "job 7 ended: slurmstepd: out of memory; see 7.err"),
    ]


def test_a_launcher_that_is_not_installed(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert main(["run", "tiny.yaml", PERCENTILES, "--output", "swept", "--launcher", "submitit"]) == 1
    assert "enginequant[submitit]" in capsys.readouterr().err
    assert not (at / "swept").exists()


@pytest.mark.nightly
def test_a_ranking_is_made_once(at: Path) -> None:
    command = ["run", "tiny.yaml", "amp={}", "fallback={}", "fallback.num=1,2", "--output", "swept"]
    command += ["quantizer.activations.percentile=99.9"]
    assert main(command) == 0
    records = {name: read_record(at / "swept" / name / "report.json") for name in ("num=1", "num=2")}
    stages = {name: [stage.name for stage in record.stages] for name, record in records.items()}
    assert [names.count("measure sensitivity") for names in stages.values()] == [1, 0]
    first, second = records.values()
    assert [(row.group, row.error) for row in first.sensitivity] == [
        (row.group, row.error) for row in second.sensitivity
    ]
    assert [len(record.fallback.groups) for record in records.values()] == [1, 2]  # type: ignore[union-attr]


@pytest.mark.nightly
def test_head_and_float_export_are_made_once(place: Path, at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = yaml.safe_load((at / "tiny.yaml").read_text())
    settings["model"]["task"] = "embedding-classification"
    settings["data"]["head"] = {"name": "text-csv", "path": str(place / "calibration.csv")}
    settings["quantizer"] |= {"backend": "auto", "candidates": ["onnxruntime"], "exclude": {}}
    config = transformers.BertConfig.from_pretrained(place / "model")
    transformers.BertModel(config).save_pretrained(at / "encoder")
    AutoTokenizer.from_pretrained(place / "model").save_pretrained(at / "encoder")
    settings["model"]["source"] = str(at / "encoder")
    (at / "head.yaml").write_text(yaml.safe_dump(settings))
    made: list[str] = []

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*given: Any, **more: Any) -> Any:
            made.append(name)
            return original(*given, **more)

        monkeypatch.setattr(owner, name, call)

    counted(EmbeddingClassification, "fit_head")
    counted(run_engines, "export_onnx")
    assert main(["run", "head.yaml", "report.bootstrap=50,60", "--output", "swept"]) == 0
    assert sorted(made) == ["export_onnx", "fit_head"]
    names = ("bootstrap=50", "bootstrap=60")
    scores = [read_record(at / "swept" / name / "report.json").scores[0].value for name in names]
    assert scores[0] == scores[1]


def test_the_time_that_is_left(at: Path) -> None:
    config = load_run("tiny.yaml")
    other = config.model_copy(update={"model": config.model.model_copy(update={"max_length": 16})})
    pace = Pace([SweepRun(str(place), one) for place, one in enumerate([config, config, config, other, other])])
    assert pace.left(0) == ""
    pace.add(0, 60)
    assert pace.left(1) == "at most about 4 min left"
    pace.add(1, 20)
    # Two that follow one of their model, and one that does not.
    assert pace.left(2) == "about 1.5 min left"
    assert time_left(2, 6, 60) == "about 2 min left"
    assert time_left(6, 6, 60) == ""


def test_what_a_later_run_lacks_is_told_first(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = yaml.safe_load((at / "tiny.yaml").read_text())["data"]["evaluation"]["path"]
    paths = f"data.evaluation.path=missing.csv,{there}"
    assert main(["run", "tiny.yaml", paths, "--output", "swept"]) == 1
    said = capsys.readouterr().out
    assert said.index("path=missing.csv cannot start: ") < said.index("[1/")
    assert "1 run failed" in (at / "swept" / "comparison.html").read_text()
    assert main(["run", "tiny.yaml", "data.evaluation.path=missing.csv,gone.csv", "--output", "other"]) == 1
    assert "missing.csv" in capsys.readouterr().err
    assert not (at / "other").exists()


def test_a_sweep_is_validated(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (at / "tiny.yaml").read_text()
    (at / "swept.yaml").write_text(text + yaml.safe_dump({"sweep": {"quantizer.activations.percentile": [99.9, 60]}}))
    assert main(["validate", "swept.yaml"]) == 0
    assert "ok: swept.yaml, 2 runs" in capsys.readouterr().out
    (at / "lacking.yaml").write_text(text + yaml.safe_dump({"sweep": {"data.calibration.path": ["gone.csv"]}}))
    assert main(["validate", "lacking.yaml"]) == 1
    assert "gone.csv" in capsys.readouterr().err
    assert main(["validate", "--file-only", "lacking.yaml"]) == 0


def test_a_run_that_cannot_be_is_no_fault_of_its_neighbours(at: Path) -> None:
    config = load_run("tiny.yaml")
    wrong = config.model_copy(update={"quantizer": config.quantizer.model_copy(update={"dtype": "fp8"})})
    ready = ready_to_sweep([SweepRun("wrong", wrong), SweepRun("right", config)])
    assert "fp8" in ready.faults.pop("wrong")
    assert not ready.faults
