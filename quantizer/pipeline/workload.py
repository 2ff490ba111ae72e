"""``Workload``: the model, the rows and the scores of one run, whoever brought them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from torch import nn

from quantizer.config import RunConfig
from quantizer.pipeline.budget import EngineBudget
from quantizer.pipeline.context import ResumeFiles, RunContext, RunRows, Runs, as_predictor, bar
from quantizer.pipeline.graphs import Graphs
from quantizer.pipeline.progress import StageTimer
from quantizer.pipeline.scores import FunctionScorer, Metric
from quantizer.pipeline.shared_results import Calibrations
from quantizer.quantizer import Quantizer
from quantizer.report import ModelInfo, Score
from quantizer.tasks import Batch, Row
from quantizer.tasks.datasets.rows import content_of


class Scorer(Protocol):
    """Scores of models and engines, and their differences to the float model; none is run twice."""

    def difference(self, which: str, engine: Runs | None) -> float | None:
        """Return the score of an engine less that of the float model; None: there is no score, or no engine."""

    def take(self, forms: Mapping[str, Runs]) -> None:
        """Run models and engines; their scores are made of that later."""

    def scores(self, forms: Mapping[str, Runs]) -> tuple[Score, ...]:
        """Return the scores of the float model, and of other models and engines by name; empty: there are none."""

    def for_run(self, context: RunContext, resamples: int, folder: Path) -> Scorer:
        """Return a scorer for another run on the same model and rows, which knows what the float model gives."""


def _as_it_is(config: RunConfig) -> RunConfig:
    return config


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model, data and scores of one run.

    Attributes:
        context: the float model and the batches that it takes.
        graphs: the graphs that become engines.
        rows: the rows, by purpose.
        scorer: scores what comes of it.
        info: the model in words.
        check: raises what would otherwise come after minutes of calibration.
        metric: returns the metric of a search, by the tuning rows that it may see.
        fit: returns the configuration of a run with what it takes from the rows.
        calibrations: those of other runs on it, with which it is compared; None: it is used once.
        diagnoses: whether causes of a loss are looked for; a sweep does so when the folder is in its place.
    """

    context: RunContext
    graphs: Graphs
    rows: RunRows
    scorer: Scorer
    info: ModelInfo
    check: Callable[[], None]
    metric: Callable[[Sequence[Row]], Metric]
    fit: Callable[[RunConfig], RunConfig] = _as_it_is
    calibrations: Calibrations | None = None
    diagnoses: bool = True

    @property
    def scored_rows(self) -> str | None:
        """A hash of the rows that a score depends on; None: a function scores, of whose rows nothing is known."""
        if isinstance(self.scorer, FunctionScorer):
            return None
        return content_of([*self.rows.head, *self.rows.evaluation])

    def budget(self, asked: float | None, *, checked: bool) -> EngineBudget:
        """Return the budget of the engine; see ``EngineBudget``."""
        function = self.scorer if isinstance(self.scorer, FunctionScorer) else None
        return EngineBudget(
            self.graphs.scored(self.context), asked, self.rows.tuning, checked=checked, function=function
        )

    def fit_head(self) -> None:
        """Fit the head of the task on the float model's outputs, if it has one and no run before has done so."""
        if not self.rows.head or (self.calibrations is not None and self.calibrations.has_head):
            return
        with self.context.timer("fit the head on float embeddings"), bar("head") as progress:
            self.context.task.fit_head(as_predictor(self.context.model), self.rows.head, progress)
        if self.calibrations is not None:
            self.calibrations.has_head = True

    def write_call(self, folder: Path) -> None:
        """Write into the folder of a run how its model is called, if that is more than names of inputs."""
        if isinstance(self.scorer, FunctionScorer):
            self.scorer.call.write(folder)

    def calibrate(self, quantizer: Quantizer, batches: Sequence[Batch]) -> None:
        """Calibrate a quantizer on the model, or give it what a run before it has seen."""
        if self.calibrations is None:
            quantizer.calibrate(self.context.model, batches, split=True)
        else:
            self.calibrations.calibrate(quantizer, self.context.model, batches)

    def amp(self, quantizer: Quantizer, settings: str, measure: Callable[[Quantizer], nn.Module]) -> nn.Module:
        """Return the amp proxy of a quantizer after its measurement; see ``Calibrations.amp``."""
        return measure(quantizer) if self.calibrations is None else self.calibrations.amp(quantizer, settings, measure)


Load: TypeAlias = Callable[[StageTimer, ResumeFiles, Path], Workload]
"""Loads a workload for a run that prints through the timer and fills the folder."""
