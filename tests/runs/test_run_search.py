"""Runs that choose what falls back to float: what they say, and a search that is interrupted goes on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import yaml
from daily import some_daily

from quantizer import Quantizer
from quantizer.algorithms.sensitivity import Fallback
from quantizer.cli.main import main
from quantizer.engines import BuildResult, Inspection
from quantizer.errors import EngineError
from quantizer.pipeline.latency_fallback import RunLatencyFallback
from quantizer.pipeline.run_engines import RunEngines
from quantizer.pipeline.scores import TaskMetric
from quantizer.report import RunRecord, read_record
from quantizer.tasks import Example, Predictions, build_task, load_examples, load_model, load_tokenizer, tasks

for _package in ("transformers", "sklearn", "jinja2"):
    pytest.importorskip(_package, reason="a run needs enginequant[hf,report]")

from tiny_run import tiny_run

REPOSITORY = Path(__file__).parents[2]
TASK = "sequence-classification"


@dataclass
class Search:
    """The scores that were taken.

    Attributes:
        taken: how many.
        stop: the number of the one that Ctrl-C comes in; 0: none.
        found: what ``fallback`` gave last.
    """

    taken: int = 0
    stop: int = 0
    scores: list[float] = field(default_factory=list)
    found: Fallback | None = None


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run whose search wants a half of what is lost with everything quantized."""
    folder = tmp_path_factory.mktemp("search")
    run = tiny_run(folder)
    run["data"]["tuning"] = {"name": "text-csv", "path": str(folder / "calibration.csv")}
    return {**run, "amp": {"batches": 1}, "fallback": {"max_drop": 0.02}}


@dataclass
class Expected:
    """The float outputs of the tuning samples."""

    rows: list[Example]
    outputs: npt.NDArray[np.float32]

    def closeness(self, predictions: Predictions, rows: Sequence[Example]) -> float:
        """Of tuning samples to the float outputs; of other samples no matter what."""
        places = [self.rows.index(row) if row in self.rows else 0 for row in rows]
        return 1 - float(np.abs(predictions.outputs - self.outputs[places]).mean())


@pytest.fixture(scope="module")
def expected(files: dict[str, Any]) -> Expected:
    source = files["model"]["source"]
    model = load_model(source, TASK)
    task = build_task(TASK, model, load_tokenizer(source), max_length=32, batch_size=8, min_length=16)
    rows = load_examples("text-csv", path=files["data"]["tuning"]["path"])
    return Expected(rows, task.predict(lambda batch: model(**batch), rows).outputs)


@pytest.fixture
def search(files: dict[str, Any], expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Search:
    """An empty current folder with the configuration; nothing is exported, and a score is a fine one."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump(files))
    search = Search()
    call = TaskMetric.__call__

    def counted(self: TaskMetric, model: torch.nn.Module) -> float:
        search.taken += 1
        if search.taken == search.stop:
            raise KeyboardInterrupt
        search.scores.append(call(self, model))
        return search.scores[-1]

    fallback = Quantizer.fallback

    def noted(self: Quantizer, *arguments: Any, **keywords: Any) -> Fallback:
        search.found = fallback(self, *arguments, **keywords)
        return search.found

    def build(self: RunEngines, *_: Any, **__: Any) -> dict[str, BuildResult]:
        built = {}
        for name in ("float", "engine"):
            path = self.files(name).engine
            path.write_bytes(b"engine")
            built[name] = BuildResult(path=path, size_bytes=6, seconds=0.0)
        self._built = {name: {"model": one} for name, one in built.items()}
        return built

    # Of 16 rows the accuracy has 17 values, the distance from the float outputs has many.
    monkeypatch.setattr(tasks[TASK], "score", lambda _, predictions, rows: expected.closeness(predictions, rows))
    monkeypatch.setattr(TaskMetric, "__call__", counted)
    monkeypatch.setattr(Quantizer, "fallback", noted)
    monkeypatch.setattr(RunEngines, "build", build)
    unseen = Inspection(backend="openvino", verified=False, note="nothing was built")
    monkeypatch.setattr(RunEngines, "inspect", lambda *_: unseen)
    monkeypatch.setattr(RunEngines, "load", lambda *_: {})
    monkeypatch.setattr(RunEngines, "runs_here", False)
    monkeypatch.setattr(RunLatencyFallback, "measured", lambda *_: None)
    return search


def _run(*words: str, code: int = 0) -> RunRecord | None:
    assert main(["run", "tiny.yaml", *words, "--output", "out"]) == code
    return read_record(Path("out/report.json")) if code == 0 else None


def _left() -> set[str]:
    return {path.name for path in Path.cwd().iterdir()}


def _plain(text: str) -> str:
    return " ".join(text.split())


# -- a search ------------------------------------------------------------------------------------------------------


def test_a_search_meets_its_budget(search: Search, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed and recorded of it: tests/goldens."""
    record = _run()
    out = _plain(capsys.readouterr().out)
    assert record is not None
    assert 0 < len(record.fallback.groups) < len(record.sensitivity)
    said = re.fullmatch(r"found by .* in (\d+) evaluations: ([\d.]+) on .* has ([\d.]+)", record.fallback.reason)
    assert int(said[1]) == search.taken <= 25
    assert float(said[3]) == pytest.approx(search.scores[0], abs=1e-5)
    assert float(said[3]) - float(said[2]) <= 0.02 + 1e-5
    assert any(float(said[2]) == pytest.approx(score, abs=1e-5) for score in search.scores)
    assert f"scores are kept until the run is complete in {Path.cwd() / 'out.search'}" in out
    assert record.fallback.outcome.tuning_drop <= record.fallback.outcome.max_drop == 0.02
    assert _left() == {"tiny.yaml", "out"}
    assert [row.group for row in record.sensitivity if row.fallback] == list(record.fallback.groups)


def _no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """End runs with an error after the search."""

    def enough(*_: Any, **__: Any) -> None:
        raise EngineError("far enough")

    monkeypatch.setattr(RunLatencyFallback, "measured", lambda *_: None)
    monkeypatch.setattr(Quantizer, "quantize", enough)


@pytest.mark.parametrize("all_places", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["some", "all"])
def test_an_interrupted_search_goes_on(
    all_places: bool, search: Search, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _no_further(monkeypatch)
    _run(code=1)
    kept, whole, needed = Path.cwd() / "out.search", search.found, search.taken
    assert whole is not None
    assert needed >= 6
    # Before the first score, the float model's; after it; in the middle; in the last one.
    for number in range(1, needed + 1) if all_places else (1, 2, needed // 2 + 1, needed):
        shutil.rmtree(kept)
        search.taken, search.stop = 0, number
        capsys.readouterr()
        _run(code=130)
        said = capsys.readouterr().err
        results = f"the calibration, plans and engines are kept in {Path.cwd() / 'out.resume'}"
        if number == 1:
            # There is no score yet.
            assert said == f"interrupted: {results}; run the same command again to resume\n"
            assert _left() == {"tiny.yaml", "out.resume"}
        else:
            both = f"the scores are kept in {kept}, and {results}"
            assert said == f"interrupted: {both}; run the same command again to resume\n"
            assert _left() == {"tiny.yaml", "out.search", "out.resume"}
            assert len(list(kept.rglob("entry.json"))) == number - 1
        search.stop, search.found = 0, None
        _run(code=1)
        assert (f"resuming with {number - 1} scores from {kept}" in capsys.readouterr().out) is (number > 1)
        assert search.found == whole
        # The one that was interrupted is taken twice.
        assert search.taken == needed + 1


def test_an_error_after_the_search_keeps_its_scores(
    search: Search, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise EngineError("no engine")

    with monkeypatch.context() as patch:
        patch.setattr(RunEngines, "build", fails)
        _run(code=1)
    assert capsys.readouterr().err == "error: no engine\n"
    needed = search.taken
    assert _left() == {"tiny.yaml", "out.search"}
    _run()
    assert search.taken == needed
    assert f"resuming with {needed} scores" in _plain(capsys.readouterr().out)
    assert _left() == {"tiny.yaml", "out"}


@pytest.mark.parametrize(
    "word",
    some_daily(["data.tuning.samples=12", "quantizer.activations.calibrator=max", "model.max_length=20"], 1),
)
def test_scores_of_another_run_are_not_taken(
    search: Search, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    _no_further(monkeypatch)
    search.stop = 4
    _run(code=130)
    search.stop = 0
    assert len(search.scores) == 3
    _run(word, code=1)
    assert "scores are kept until the run is complete" in _plain(capsys.readouterr().out)
    found = search.found
    shutil.rmtree("out.search")
    _run(word, code=1)
    assert search.found == found


def test_rows_changed_in_their_file_are_other_rows(
    search: Search, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _no_further(monkeypatch)
    settings = yaml.safe_load(Path("tiny.yaml").read_text())
    rows = Path("rows.csv")
    rows.write_text(Path(settings["data"]["tuning"]["path"]).read_text())
    search.stop = 3
    _run("data.tuning.path=rows.csv", code=130)
    search.stop = 0
    rows.write_text(rows.read_text().replace("good", "dull", 1))
    _run("data.tuning.path=rows.csv", code=1)
    assert "going on" not in _plain(capsys.readouterr().out)


def test_a_search_with_another_budget_takes_the_scores_that_are_there(
    search: Search, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _no_further(monkeypatch)
    search.stop = 4
    _run(code=130)
    search.stop = 0
    _run("fallback.max_drop=0.05", "fallback.max_evaluations=20", code=1)
    assert "resuming with 3 scores" in _plain(capsys.readouterr().out)


def test_a_folder_of_others_takes_no_scores(search: Search, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out.search").mkdir()
    Path("out.search/notes").touch()
    _run(code=1)
    assert "out.search contains 'notes', which quantizer did not write" in _plain(capsys.readouterr().err)
    assert search.taken == 0
    assert list(Path("out.search").iterdir()) == [Path("out.search/notes")]


def test_too_few_evaluations(search: Search, capsys: pytest.CaptureFixture[str]) -> None:
    _run("fallback.max_evaluations=2", code=1)
    assert "max_evaluations=2: expected at least" in _plain(capsys.readouterr().err)


# As a user would do it; what is interrupted above is the same search, in the process of the tests.


@pytest.mark.nightly
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_a_search_that_is_killed_goes_on(
    files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump({**files, "fallback": {"max_drop": 0.0}}))
    command = [sys.executable, "-u", "-m", "quantizer", "run", "tiny.yaml", "--output", "out"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        seen = 0
        for line in process.stdout:
            seen += line.startswith("  try ")
            if seen == 1:
                process.send_signal(signal.SIGKILL)
                break
        process.communicate(timeout=120)
    finally:
        process.kill()
    kept = len(list(Path("out.search").rglob("entry.json")))
    assert kept >= 2

    _no_further(monkeypatch)
    _run(code=1)
    assert f"resuming with {kept} scores" in _plain(capsys.readouterr().out)


# -- other choices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fallback", "reason"),
    [
        ({"num": 2}, "chosen by fallback(num=2)"),
        ({"ratio": 0.2, "costs": "multiply_adds"}, "chosen by fallback(ratio=0.2)"),
        ({"names": ["bert.encoder.layer.0.output"]}, "chosen by fallback(names=['bert.encoder.layer.0.output'])"),
    ],
    ids=str,
)
def test_without_a_search(search: Search, files: dict[str, Any], fallback: dict[str, Any], reason: str) -> None:
    data = {key: value for key, value in files["data"].items() if key != "tuning"}
    document = {**files, "data": data, "fallback": fallback, "amp": None if "names" in fallback else {}}
    Path("tiny.yaml").write_text(yaml.safe_dump(document))
    record = _run()
    assert record.fallback.groups
    assert record.fallback.reason == reason
    assert bool(record.sensitivity) is ("names" not in fallback)
    assert search.taken == 0
    assert _left() == {"tiny.yaml", "out"}


@pytest.mark.parametrize("measure", ["gradient", "output", "local", "metric"])
def test_measures(search: Search, measure: str) -> None:
    record = _run(f"amp.measure={measure}", "fallback={num: 1}", *([] if measure == "metric" else ["~data.tuning"]))
    assert len(record.sensitivity) > 5
    assert search.taken == (1 + len(record.sensitivity) if measure == "metric" else 0)


def test_layers_are_measured_and_kept_in_float_whole(search: Search) -> None:
    record = _run("amp.granularity=layer", "fallback={num: 1}", "~data.tuning")
    names = [row.group for row in record.sensitivity]
    assert "bert.encoder.layer.0.attention" in names
    assert [row.fallback for row in record.sensitivity] == [True] + [False] * (len(names) - 1)


def test_what_is_named_and_is_not_there(search: Search, capsys: pytest.CaptureFixture[str]) -> None:
    _run("fallback={names: [nothing]}", "~data.tuning", code=1)
    assert "fallback.names: 'nothing' matches nothing: no module, site or operand" in _plain(capsys.readouterr().err)
