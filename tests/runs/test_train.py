"""The training of a run: what it keeps, how it goes on after an interruption, and what ends it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

pytest.importorskip("transformers", reason="a run needs enginequant[hf]")
pytest.importorskip("jinja2", reason="a run needs enginequant[report]")

from helpers import assert_same
from safetensors.torch import load_file
from tiny_run import tiny_run, write_rows

from quantizer import Quantizer
from quantizer.cli.main import main
from quantizer.config import QatConfig
from quantizer.errors import TrainingError
from quantizer.pipeline.scores import TaskMetric
from quantizer.pipeline.train import Training, TrainingResult
from quantizer.tasks import Example, Task, build_task, load_examples, load_model, load_tokenizer

TASK = "sequence-classification"
SETTINGS: dict[str, Any] = {"epochs": 2.5, "learning_rate": 0.0001, "tolerance": 0.0}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tiny run with rows to train on."""
    folder = tmp_path_factory.mktemp("training")
    run = tiny_run(folder)
    write_rows(folder / "training.csv", 60, seed=3)
    _label_as_the_model_does(run)
    run["data"]["training"] = {"name": "text-csv", "path": str(folder / "training.csv")}
    run["data"]["tuning"] = {"name": "text-csv", "path": str(folder / "calibration.csv")}
    # It clips much, so that there is much to win.
    run["quantizer"] |= {"preset": "plain", "activations": {"percentile": 90.0}}
    return {**run, "qat": SETTINGS}


def _label_as_the_model_does(run: dict[str, Any]) -> None:
    """So that the float model scores 1, and every other what it agrees with it."""
    model = load_model(run["model"]["source"], TASK)
    task = build_task(TASK, model, load_tokenizer(run["model"]["source"]), max_length=32, batch_size=8)
    for part in ("calibration", "evaluation"):
        path = Path(run["data"][part]["path"])
        rows = load_examples("text-csv", path=str(path))
        decisions = task.predict(lambda batch: model(**batch), rows).decisions
        lines = [f"{row.text},{decision}" for row, decision in zip(rows, decisions, strict=True)]
        path.write_text("\n".join(["text,label", *lines]) + "\n")


class Bench:
    """A model, its quantizer, and rows, fresh at each time as in a new process."""

    def __init__(self, files: dict[str, Any]) -> None:
        source = files["model"]["source"]
        self.model = load_model(source, TASK)
        self.task: Task = build_task(TASK, self.model, load_tokenizer(source), max_length=32, batch_size=8)
        self.rows: list[Example] = load_examples("text-csv", path=files["data"]["training"]["path"])
        self.quantizer = Quantizer(files["quantizer"])
        self.quantizer.calibrate(self.model, self.task.batches(self.rows[:16]), progress=False)
        self.proxy = self.quantizer.qat(self.model, scales="learned", copy=True)
        self.told: list[str] = []
        self.scored = 0

    def divergence(self, model: nn.Module) -> float:
        """Of the logits from the float model's: what is lost, and finer than an accuracy."""
        self.scored += 1
        with torch.no_grad():
            return sum(
                float((model(**batch).logits - self.model(**batch).logits).square().mean())
                for batch in self.task.batches(self.rows[:24])
            )

    def training(self, folder: Path, score: Any = None, identity: str = "same", **settings: Any) -> Training:
        return Training(
            QatConfig(**SETTINGS | settings),
            self.task,
            self.rows,
            score or self.divergence,
            higher_is_better=False,
            folder=folder,
            identity=identity,
            tell=self.told.append,
        )

    def train(self, folder: Path, **settings: Any) -> TrainingResult:
        return self.training(folder, **settings).run(self.model, self.proxy)


def test_it_comes_nearer_to_the_float_model_and_keeps_the_best(files: dict[str, Any], tmp_path: Path) -> None:
    bench = Bench(files)
    before = {name: value.clone() for name, value in bench.model.state_dict().items()}
    course = bench.train(tmp_path / "kept")
    assert course.steps == len(course.losses) == len(course.rates) == 20
    assert [step for step, _ in course.scores] == [0, 4, 8, 12, 16, 20]
    assert course.float_score == 0
    best = dict(course.scores)[course.best]
    assert best == min(score for _, score in course.scores)
    assert best < course.scores[0][1] / 2
    # What is left is the best state, and the frozen model of it.
    assert bench.divergence(bench.proxy) == best
    assert bench.divergence(bench.quantizer.quantize(bench.model)) == best
    assert all(torch.equal(before[name], value) for name, value in bench.model.state_dict().items())


def test_labels_of_the_training_rows_are_not_read(files: dict[str, Any], tmp_path: Path) -> None:
    bench, other = Bench(files), Bench(files)
    other.rows = [replace(row, label=1 - row.label) for row in other.rows]
    settings = {"epochs": 0.5}
    first, second = bench.train(tmp_path / "first", **settings), other.train(tmp_path / "second", **settings)
    assert first.losses == second.losses
    assert_same(dict(bench.proxy.state_dict()), dict(other.proxy.state_dict()))


def test_the_rate_rises_and_falls_with_a_cosine(files: dict[str, Any], tmp_path: Path) -> None:
    course = Bench(files).train(tmp_path / "kept", evaluations=1)
    assert course.rates[:2] == [0.00005, 0.0001]
    assert course.rates[11] == pytest.approx(0.0001 * 0.5)
    falling = [0.00005 * (1 + math.cos(math.pi * step / 18)) for step in range(18)]
    assert course.rates[2:] == pytest.approx(falling)


def test_a_state_from_before_the_scales_were_fixed_comes_back_whole(files: dict[str, Any], tmp_path: Path) -> None:
    bench = Bench(files)
    scores = iter([0.0, 9.0, 1.0, 5.0, 6.0, 7.0, 8.0])  # float, before training, then worse after the first fifth
    seen: list[float] = []

    def score(model: nn.Module) -> float:
        seen.append(bench.divergence(model))
        return next(scores)

    course = bench.train(tmp_path / "kept", score=score, freeze_scales=0.5)
    assert course.best == 4
    assert bench.divergence(bench.proxy) == seen[2]
    assert bench.divergence(bench.quantizer.quantize(bench.model)) == seen[2]


class Stop(Exception):
    """An interruption."""


def test_an_interrupted_training_goes_on_as_if_it_had_not_been(files: dict[str, Any], tmp_path: Path) -> None:
    whole = Bench(files)
    expected = whole.train(tmp_path / "whole")
    first = Bench(files)

    def stops(model: nn.Module) -> float:
        if first.scored == 4:
            raise Stop("now")
        return first.divergence(model)

    with pytest.raises(Stop, match="now"):
        first.train(tmp_path / "kept", score=stops)
    second = Bench(files)
    course = second.train(tmp_path / "kept")
    assert course == expected
    assert f"resuming after 8 of 20 steps from {tmp_path / 'kept' / 'last.safetensors'}" in second.told
    for one, two in zip(whole.proxy.state_dict().values(), second.proxy.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    # All done: nothing is trained again.
    third = Bench(files)
    assert third.train(tmp_path / "kept") == expected
    assert third.scored == 0


def test_checkpoints_of_another_configuration(files: dict[str, Any], tmp_path: Path) -> None:
    bench = Bench(files)
    bench.train(tmp_path / "kept", evaluations=1, epochs=0.1)
    before = (tmp_path / "kept" / "last.safetensors").read_bytes()
    with pytest.raises(TrainingError, match=r"kept contains checkpoints of another configuration: remove it"):
        Bench(files).train(tmp_path / "kept", identity="other")
    assert (tmp_path / "kept" / "last.safetensors").read_bytes() == before


def test_a_damaged_checkpoint(files: dict[str, Any], tmp_path: Path) -> None:
    Bench(files).train(tmp_path / "kept", evaluations=1, epochs=0.1)
    path = tmp_path / "kept" / "last.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(TrainingError, match=r"last\.safetensors is not a checkpoint of a training, or is damaged"):
        Bench(files).train(tmp_path / "kept")


def test_a_loss_that_is_no_number(files: dict[str, Any], tmp_path: Path) -> None:
    bench, steps = Bench(files), 0

    def ruin(_: nn.Module, __: Any, output: Any) -> Any:
        nonlocal steps
        steps += torch.is_grad_enabled()
        if steps > 5:
            output.logits = output.logits * float("nan")
        return output

    bench.proxy.register_forward_hook(ruin)
    last = tmp_path / "kept" / "last.safetensors"
    with pytest.raises(TrainingError, match=rf"the loss is nan after 5 steps: .*last good checkpoint is {last}"):
        bench.train(tmp_path / "kept")
    assert not any(torch.isnan(value).any() for value in load_file(last).values())


def test_nothing_has_a_gradient(files: dict[str, Any], tmp_path: Path) -> None:
    bench = Bench(files)
    bench.proxy.register_forward_hook(lambda _, __, output: _detached(output))
    with pytest.raises(TrainingError, match="no parameter has a gradient"):
        bench.train(tmp_path / "kept")


def _detached(output: Any) -> Any:
    output.logits = output.logits.detach().requires_grad_()
    if output.hidden_states is not None:
        output.hidden_states = tuple(state.detach() for state in output.hidden_states)
    return output


def test_a_rate_that_destroys_the_model(files: dict[str, Any], tmp_path: Path, caplog: Any) -> None:
    # With ranges that clip nothing there is much to lose.
    bench = Bench({**files, "quantizer": {**files["quantizer"], "activations": {"calibrator": "max"}}})
    course = bench.train(tmp_path / "kept", learning_rate=0.05)
    assert course.best == 0
    (text, *_) = [line for line in bench.told if line.startswith("warning")]
    assert "worse than the" in text
    assert "a lower qat.learning_rate than 0.05 may help" in text
    assert "a lower qat.learning_rate than 0.05 may help" in caplog.text
    # The state of PTQ is what is left.
    assert bench.divergence(bench.proxy) == course.scores[0][1]


def test_a_later_score_that_is_hardly_worse_is_preferred(files: dict[str, Any], tmp_path: Path) -> None:
    bench = Bench(files)
    scores = iter([0.0, 9.0, 1.0, 1.4, 1.6, 0.9, 1.45])
    assert bench.train(tmp_path / "kept", score=lambda _: next(scores), tolerance=0.5).best == 16
    scores = iter([0.0, 9.0, 1.0, 1.4, 1.6, 0.9, 1.35])
    assert bench.train(tmp_path / "other", score=lambda _: next(scores), tolerance=0.5).best == 20


def test_patience(files: dict[str, Any], tmp_path: Path) -> None:
    bench = Bench(files)
    scores = iter([0.0, 9.0, 5.0, 6.0, 7.0])
    course = bench.train(tmp_path / "kept", score=lambda _: next(scores), patience=2)
    assert course.stopped == "no better score in 2 evaluations"
    assert (course.best, len(course.losses)) == (4, 12)


def _stopped_by_a_signal(words: list[str], last: Path) -> tuple[int, str]:
    """Start a command and press Ctrl-C when there is a checkpoint; its exit code and what it said."""
    command = [sys.executable, "-m", "quantizer", *words]
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    end = time.monotonic() + 120
    while not last.exists() and run.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    return run.returncode, errors


def _stopped_at_a_score(words: list[str], last: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The same in this process, at the first score behind a checkpoint."""
    take = TaskMetric.__call__

    def stops(self: TaskMetric, model: nn.Module) -> float:
        if last.exists():
            raise KeyboardInterrupt
        return take(self, model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskMetric, "__call__", stops)
        return main(words), capsys.readouterr().err


@pytest.mark.parametrize("how", ["at a score", pytest.param("by a signal", marks=pytest.mark.nightly)])
def test_a_run_that_is_stopped_says_where_its_checkpoints_are(
    how: str, files: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**files, "qat": {"epochs": 400.0, "evaluations": 300}}))
    words = ["run", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "out")]
    last = tmp_path / "out.training" / "last.safetensors"
    by_signal = how == "by a signal"
    code, errors = _stopped_by_a_signal(words, last) if by_signal else _stopped_at_a_score(words, last, capsys)
    assert code == 130
    assert f"the checkpoints are kept in {tmp_path / 'out.training'}" in errors
    assert "; run the same command again to resume" in errors
    assert last.exists()
    assert not (tmp_path / "out").exists()
    # From other calibration data the scales start elsewhere: it is another training.
    kept = last.read_bytes()
    assert main([*words, "data.calibration.samples=8"]) == 1
    assert "contains checkpoints of another configuration: remove it to start over" in capsys.readouterr().err
    assert last.read_bytes() == kept
