"""The ``Trainer`` of transformers with ``QATCallback``: it trains, resumes, stops in time, and warns."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same, batch, tiny
from torch import nn

from quantizer import Quantizer
from quantizer.errors import TrainingError
from quantizer.proxy.build import sites_of

transformers = pytest.importorskip("transformers")
trainers = pytest.importorskip("trainers")

from quantizer.algorithms.qat.callback import QATCallback


@pytest.fixture
def model() -> nn.Module:
    return tiny("bert-classification", train=True)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_it_trains_by_the_schedule(model: nn.Module, tmp_path: Path) -> None:
    q = trainers.calibrated(model)
    proxy = q.qat(model, scales="learned")
    moving = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            before = scales()
            moving.append(any(not torch.equal(one, two) for one, two in zip(watched[-1], before, strict=True)))
            watched.append(before)

    def scales() -> list[torch.Tensor]:
        quantizers = [site.quantizer(0) for site in sites_of(proxy) if site.active]
        return [quantizer.current_scale().clone() for quantizer in quantizers if quantizer.scale is not None]

    watched = [scales()]
    weight = model.get_parameter("classifier.weight").detach().clone()
    callbacks = [QATCallback(freeze_scales=0.5), Watch()]
    trained = trainers.trainer(proxy, tmp_path, callbacks=callbacks, save_strategy="no")
    trained.train()
    assert moving == [True] * 4 + [False] * 4
    assert not torch.equal(weight, model.get_parameter("classifier.weight"))
    # What Trainer scores is what quantize() gives.
    inputs = batch("bert-classification")
    assert_same(q.quantize(model)(**inputs), proxy.eval()(**inputs))


@pytest.mark.nightly
def test_a_killed_run_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    script = Path(__file__).with_name("trainers.py")
    places = os.pathsep.join(str(script.parents[up]) for up in (1, 2))
    killed = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        # As many threads as here: with others, sums are added up in another order.
        env={**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoint-3"}

    model = tiny("bert-classification", train=True)
    q = Quantizer.load(tmp_path / "quantizer")
    resumed = trainers.trainer(q.qat(model, scales="learned"), tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)

    whole = tiny("bert-classification", train=True)
    unbroken = trainers.calibrated(whole)
    expected = trainers.trainer(unbroken.qat(whole, scales="learned"), tmp_path / "whole")
    expected.train()
    assert_same(resumed.model.state_dict(), expected.model.state_dict())
    assert losses(resumed) == losses(expected)
    assert len(losses(resumed)) == 8
    inputs = batch("bert-classification")
    assert_same(q.quantize(model)(**inputs), unbroken.quantize(whole)(**inputs))


def test_a_checkpoint_of_another_configuration(model: nn.Module, tmp_path: Path) -> None:
    trainers.trainer(trainers.calibrated(model).qat(model), tmp_path, max_steps=3).train()
    other = tiny("bert-classification", train=True)
    q = trainers.calibrated(other, weights={"granularity": "per_tensor"})
    with pytest.raises(TrainingError, match=r"another configuration: .* axis 0, .*per tensor, .*checkpoint"):
        trainers.trainer(q.qat(other), tmp_path).train(resume_from_checkpoint=True)


def _poison(proxy: nn.Module, step: int) -> None:
    """Let the loss be NaN from a step on, the weights being what they are."""
    calls = iter(range(1, 100))
    proxy.register_forward_hook(
        lambda _, args, output: {**output, "loss": output["loss"] * float("nan" if next(calls) >= step else 1)}
    )


def test_a_loss_of_nan(model: nn.Module, tmp_path: Path) -> None:
    proxy = trainers.calibrated(model).qat(model)
    _poison(proxy, step=5)
    (tmp_path / "checkpoint-900").mkdir()  # of another run
    with pytest.raises(TrainingError, match=r"step 5: a gradient is NaN or infinite, the first is .*'; ") as told:
        trainers.trainer(proxy, tmp_path).train()
    assert told.match(rf"The last good checkpoint is {tmp_path}/checkpoint-3\. .* lower the learning rate \(0\.001\)")
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.nightly
def test_a_loss_of_nan_at_once(model: nn.Module, tmp_path: Path) -> None:
    proxy = trainers.calibrated(model).qat(model)
    _poison(proxy, step=1)
    with pytest.raises(TrainingError, match=r"step 1: .*There is no earlier checkpoint\."):
        trainers.trainer(proxy, tmp_path).train()


@pytest.mark.parametrize("how", ["none", pytest.param("zero", marks=pytest.mark.nightly)])
def test_no_gradient_anywhere(model: nn.Module, tmp_path: Path, how: str) -> None:
    proxy = trainers.calibrated(model).qat(model)
    lone = nn.Parameter(torch.zeros(()))

    def detached(_: nn.Module, args: Any, output: Any) -> Any:
        loss = output["loss"]
        return {**output, "loss": loss.detach() + lone if how == "none" else loss * 0}

    proxy.register_forward_hook(detached)
    with pytest.raises(TrainingError, match="step 1: no parameter has a gradient, because the loss"):
        trainers.trainer(proxy, tmp_path).train()


def score(found: Any) -> dict[str, float]:
    return {"score": -float(nn.functional.cross_entropy(*map(torch.from_numpy, found)))}


@pytest.mark.parametrize("metric", [pytest.param(None, marks=pytest.mark.nightly), "score"])
def test_a_training_that_ends_below_ptq(
    model: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture, metric: str | None
) -> None:
    q = trainers.calibrated(model)

    def run(rate: float, **resume: Any) -> str:
        caplog.clear()
        options = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4, "metric_for_best_model": metric}
        made = trainers.trainer(q.qat(model, copy=True), tmp_path, learning_rate=rate, **options)
        made.compute_metrics = score
        if not resume:
            made.evaluate()
        with caplog.at_level(logging.WARNING, logger="quantizer"):
            made.train(**resume)
        return caplog.text

    assert "eval_" not in run(0.0)
    name = "eval_loss" if metric is None else "eval_score"
    said = run(10.0)
    for step in (4, 8):
        assert re.search(
            rf"{name} is \S+ after {step} steps, but was \S+ before the first: .* lower the .* \(10\)", said
        )


@pytest.mark.nightly
def test_what_ptq_scored_outlasts_a_resume(model: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    q = trainers.calibrated(model)
    options = {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True, "learning_rate": 10.0}
    trainers.trainer(q.qat(model), tmp_path, max_steps=3, **options).train()
    caplog.clear()
    again = tiny("bert-classification", train=True)
    resumed = trainers.trainer(trainers.calibrated(again).qat(again), tmp_path, **options)
    with caplog.at_level(logging.WARNING, logger="quantizer"):
        resumed.train(resume_from_checkpoint=True)
    assert re.search(r"after 6 steps, but was 1\.\d+ before the first", caplog.text)


def test_it_is_for_proxies(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"the Trainer has a BertForSequenceClassification; pass .* qat\(model\)"):
        trainers.trainer(model, tmp_path).train()
