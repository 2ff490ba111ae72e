"""A budget on the engine: which rows it is checked on, how the search goes on, and what is said where it is missed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console
from torch import nn

import quantizer.pipeline.run as pipeline
from quantizer.algorithms.fallback import Fallback
from quantizer.cli.main import main
from quantizer.engines import Engine
from quantizer.pipeline.context import RunExamples
from quantizer.pipeline.progress import StageTimer
from quantizer.pipeline.scores import TaskMetric
from quantizer.pipeline.search_max_drop import EngineBudget, more_groups
from quantizer.report import read_record
from quantizer.report.terminal import evaluation_caption
from quantizer.tasks import Example
from quantizer.tasks.datasets.examples import Text
from quantizer.utils.records import Evaluation, FallbackRecord

for _package in ("transformers", "sklearn", "jinja2", "openvino"):
    pytest.importorskip(_package, reason="a run needs enginequant[hf,report,openvino]")

from helpers import read_json
from tiny_run import tiny_run

BUDGET = 0.1


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Example]:
    """The tuning samples of a run in the current folder."""
    monkeypatch.chdir(tmp_path)
    run = tiny_run(tmp_path)
    run["data"]["tuning"] = {"name": "text-csv", "path": str(tmp_path / "calibration.csv")}
    run |= {"amp": {"batches": 1}, "fallback": {"max_drop": BUDGET}}
    Path("tiny.yaml").write_text(yaml.safe_dump(run))
    return RunExamples.of(pipeline.RunConfig.model_validate(run).data).tuning


@pytest.fixture
def drops(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The drops of the engines that are built, in order; an engine beyond the list has none."""
    given: list[float] = []
    score, taken = EngineBudget._score, [0]

    def lowered(self: EngineBudget, model: Any) -> float:
        if isinstance(model, nn.Module):
            return score(self, model)
        taken[0] += 1
        return score(self, self._context.model) - (given[taken[0] - 1] if taken[0] <= len(given) else 0.0)

    monkeypatch.setattr(EngineBudget, "_score", lowered)
    return given


def done(*words: str) -> FallbackRecord:
    assert main(["run", "tiny.yaml", *words, "--output", "out"]) == 0
    fallback = read_record(Path("out/report.json")).fallback
    assert fallback is not None
    return fallback


@pytest.mark.nightly
def test_the_search_goes_on_with_what_the_engine_loses_more(
    rows: list[Example], drops: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    searched: list[list[Example]] = []
    metric = TaskMetric.__init__

    def noted(self: TaskMetric, *given: Any, **more: Any) -> None:
        searched.append(given[2])
        metric(self, *given, **more)

    monkeypatch.setattr(TaskMetric, "__init__", noted)
    drops += [0.14]
    fallback = done("deliver=[processor]")
    first, second = fallback.checks
    assert first.drop == pytest.approx(0.14)
    assert "max_drop=0.06" in fallback.reason
    assert second.drop <= BUDGET
    assert len(fallback.groups) == second.groups >= first.groups
    assert fallback.max_drop == BUDGET
    assert "and 0.1 is allowed: the search continues with 0.06000" in " ".join(capsys.readouterr().out.split())
    assert "not met" not in evaluation_caption(fallback)
    # The search saw all other samples.
    assert {check.samples for check in fallback.checks} == {len(rows) // 3}
    assert searched == [[row for place, row in enumerate(rows) if place % 3 != 2]]
    assert f"on {second.samples} samples that the search did not see, the engine" in evaluation_caption(fallback)
    told = read_json(Path("out/config.json"))["quantization"]
    assert [one["drop"] for one in told["budget"]] == [first.drop, second.drop]
    assert Path("out/quantizer").is_dir()


# -- without a run -----------------------------------------------------------------------------------------------------


class Engines(EngineBudget):
    """A budget of 0.1 whose engines drop by what is given."""

    def __init__(self, rows: list[Example], drops: list[float], **settings: Any) -> None:
        self.console = Console(record=True, width=500)
        context = SimpleNamespace(
            model=nn.Identity(), task=SimpleNamespace(higher_is_better=True), timer=StageTimer(self.console)
        )
        super().__init__(context, tuning=rows, **{"asked": BUDGET, "checked": True, **settings})
        self._given = iter(drops)

    def _score(self, model: nn.Module | Engine) -> float:
        return 1.0 if isinstance(model, nn.Module) else 1.0 - next(self._given)

    def allowed(self) -> list[float]:
        """What the search is allowed after each engine, until it ends."""
        found = []
        while (drop := self.next_drop(object(), groups=len(found))) is not None:
            found.append(drop)
        return found


ROWS: list[Example] = [Text(text=f"row {number}", label=number % 2) for number in range(7)]


def test_an_engine_within_the_budget_is_checked_once() -> None:
    engines = Engines(ROWS, [0.05, 0.2])
    assert engines.allowed() == []
    assert [check.drop for check in engines.checks] == pytest.approx([0.05])


def test_a_budget_that_no_engine_meets_ends_after_three_and_says_so() -> None:
    engines = Engines(ROWS, [0.11, 0.11, 0.12, 0.0])
    assert engines.allowed() == pytest.approx([0.09, 0.08])
    assert [check.drop for check in engines.checks] == pytest.approx([0.11, 0.11, 0.12])
    assert [check.samples for check in engines.checks] == [2, 2, 2]
    missed = "the engine does not meet the budget; this is the best plan that was found"
    assert missed in engines.console.export_text()
    fallback = FallbackRecord(groups=("a",), reason="", max_drop=BUDGET, checks=tuple(engines.checks))
    assert evaluation_caption(fallback).endswith(missed)
    assert missed not in evaluation_caption(replace(fallback, max_drop=0.2))


def test_nothing_below_a_drop_of_zero_is_searched() -> None:
    engines = Engines(ROWS, [0.5, 0.3, 0.2])
    assert engines.allowed() == [0.0, 0.0]
    assert [check.drop for check in engines.checks] == pytest.approx([0.5, 0.3, 0.2])


@pytest.mark.parametrize(
    ("drop", "in_float", "least"), [(-0.01, (), 5), (0.0, ("a",), 5), (-0.01, tuple("abcd"), 8), (0.02, ("a",), 0)]
)
def test_a_rejected_plan_is_not_found_again(drop: float, in_float: tuple[str, ...], least: int) -> None:
    """On other samples than those of the search its drop may be within any limit."""
    evaluation = Evaluation(groups=in_float, score=0.9, drop=drop, cost=0.0)
    rejected = Fallback(groups=in_float, asked="", evaluations=(evaluation,), float_score=0.9, max_drop=0.0)
    assert more_groups(rejected, 0.0, groups=40) == least


@pytest.mark.parametrize("settings", [{"asked": None}, {"checked": False}])
def test_what_is_not_checked_searches_on_all_rows(settings: dict[str, Any]) -> None:
    engines = Engines(ROWS, [], **settings)
    assert engines.searched == ROWS
    assert engines.allowed() == []
    assert engines.checks == []
