"""Scores by a function: a number, or one for each row, and the interval that rows give the difference to float."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from quantizer.errors import TaskError
from quantizer.pipeline.context import RunContext
from quantizer.pipeline.engine_module import CallForm
from quantizer.pipeline.module_feed import ModuleFeed
from quantizer.pipeline.progress import StageTimer
from quantizer.pipeline.resume import ResumeFiles
from quantizer.pipeline.scores import FunctionMetric, FunctionScorer
from quantizer.tasks.metrics import accuracy, bootstrap_interval
from quantizer.utils.files import NO_STORE

DECISIONS = np.random.default_rng(0).integers(0, 2, (2, 60))
"""What the float model and another decide of 60 rows; right is 1."""


class _Decided(nn.Module):
    def __init__(self, decisions: Any) -> None:
        super().__init__()
        self.decisions = decisions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _scorer(function: Callable[[Any], Any], model: nn.Module) -> FunctionScorer:
    context = RunContext(
        timer=StageTimer(Console(file=StringIO())),
        resume=ResumeFiles(NO_STORE, Path(), NO_STORE, NO_STORE),
        model=model,
        processor=None,
        feed=ModuleFeed([{"x": torch.ones(2, 3)}]),
    )
    return FunctionScorer(context, function, CallForm.of(model, torch.ones(2), ["x"]), higher_is_better=True)


@pytest.mark.parametrize("form", [np.array, torch.tensor, list])
def test_scores_of_rows_are_their_mean_with_an_interval(form: Callable[[Any], Any]) -> None:
    base, other = (_Decided(form(row.tolist())) for row in DECISIONS)
    first, second = _scorer(lambda model: model.decisions, base).scores({"proxy": other})
    assert (first.value, second.value) == pytest.approx(tuple(DECISIONS.mean(axis=1)))
    assert (first.samples, second.samples, first.interval) == (60, 60, None)
    # The interval of a task of ours that scores the same rows by accuracy.
    assert second.interval == pytest.approx(bootstrap_interval(accuracy, *DECISIONS, np.ones(60)))


def test_a_number_has_no_interval() -> None:
    _, told = _scorer(lambda model: torch.tensor([model.decisions]), _Decided(0.5)).scores({"proxy": _Decided(0.25)})
    assert (told.value, told.difference, told.interval, told.samples) == (0.25, -0.25, None, None)


def test_scores_of_other_rows_than_the_float_models_are_refused() -> None:
    scorer = _scorer(lambda model: model.decisions, _Decided([1.0, 0.0, 1.0]))
    with pytest.raises(
        TaskError, match=r"returned scores of 2 samples for the proxy, but scores of 3 samples for the float"
    ):
        scorer.scores({"proxy": _Decided([1.0, 0.0])})
    with pytest.raises(TaskError, match="returned a number for the proxy, but scores of 3 samples for the float model"):
        scorer.scores({"proxy": _Decided(1.0)})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("0.5", "returned a str; expected a number, or one for each sample"),
        (None, "returned a NoneType; expected a number, or one for each sample"),
        ({"accuracy": 0.5}, "returned a dict; expected a number"),
        ([[0.5, 0.5], [0.5, 0.5]], r"returned values of the shape \[2, 2\]; expected a number"),
        ([], r"returned values of the shape \[0\]; expected a number"),
        ([0.5, float("nan")], r"the score of the float is \[0.5, nan\]; expected a finite number"),
    ],
)
def test_what_is_no_score_is_refused(given: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        FunctionMetric(lambda _: given, higher_is_better=True).checked_score(nn.Identity(), "float")
