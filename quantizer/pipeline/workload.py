"""``Workload``: the model, the samples and the scores of a run, from a checkpoint or a module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from quantizer.algorithms.make_plan import sees_the_same
from quantizer.config import RunConfig
from quantizer.config.data_section import MODULE
from quantizer.observe.replay_batches import weight
from quantizer.pipeline.context import RunContext, RunExamples, Runnable, as_predictor, bar
from quantizer.pipeline.model_graphs import Graphs
from quantizer.pipeline.module_feed import LABELS, ModuleFeed, fitted, named_batches
from quantizer.pipeline.progress import StageTimer
from quantizer.pipeline.resume import ResumeFiles
from quantizer.pipeline.scores import FunctionScorer, Metric
from quantizer.pipeline.search_max_drop import EngineBudget
from quantizer.proxy.restored_state import untouched
from quantizer.quantizer import Quantizer
from quantizer.report import ModelInfo, Score
from quantizer.report.text import counted
from quantizer.settings import settings_of
from quantizer.tasks import Batch, Example, Feed, batch_shape, rows_at
from quantizer.tasks.datasets.examples import content_of
from quantizer.utils.batches import batches_of
from quantizer.utils.sizes import BATCH


class Scorer(Protocol):
    """Scores of models and engines, and their differences from the float model; each is run once."""

    def difference(self, which: str, engine: Runnable | None) -> float | None:
        """Return the score of an engine minus the float model's score; None without a score or an engine."""

    def take(self, forms: Mapping[str, Runnable]) -> None:
        """Run models and engines; their scores follow later."""

    def scores(self, forms: Mapping[str, Runnable]) -> tuple[Score, ...]:
        """Return the scores of the float model and of other models and engines by name; empty without a score."""

    def for_run(self, context: RunContext, resamples: int, folder: Path) -> Scorer:
        """Return a scorer for another run on the same model and samples, which reuses the float model's results."""


def _unchanged(config: RunConfig) -> RunConfig:
    return config


@dataclass
class SharedObjects:
    """Objects in memory that runs on the same model and batches share.

    Attributes:
        has_head: the head of the task was fitted, which needs only the float model.
        calibrated: quantizers after calibration only, without the fallback of a run.
        ranked: amp proxies with their settings, by the index of the calibrated quantizer.
    """

    has_head: bool = False
    calibrated: list[Quantizer] = field(default_factory=list)
    ranked: dict[int, tuple[str, nn.Module]] = field(default_factory=dict)

    def place(self, quantizer: Quantizer) -> int | None:
        """Return the index of the calibrated quantizer with an equal configuration; None without one."""
        return next((place for place, known in enumerate(self.calibrated) if known.config == quantizer.config), None)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model, data and scores of one run.

    Attributes:
        context: the float model and its batches.
        graphs: the graphs that become engines.
        rows: the samples by purpose.
        scorer: scores models and engines.
        info: a description of the model.
        check: raises errors that would otherwise appear after calibration.
        metric: returns the metric of a search, for the tuning samples that it may use.
        fit: completes the configuration with sizes from the samples.
        shared: objects shared with other runs; None for a single run.
    """

    context: RunContext
    graphs: Graphs
    examples: RunExamples
    scorer: Scorer
    info: ModelInfo
    check: Callable[[], None]
    metric: Callable[[Sequence[Example]], Metric]
    fit: Callable[[RunConfig], RunConfig] = _unchanged
    shared: SharedObjects | None = None

    @property
    def scored_rows(self) -> str | None:
        """A hash of the samples that the score depends on; None for a function, whose samples are unknown."""
        if isinstance(self.scorer, FunctionScorer):
            return None
        return content_of([*self.examples.head, *self.examples.evaluation])

    def budget(self, asked: float | None, *, checked: bool) -> EngineBudget:
        """Return the budget of the engine; see ``EngineBudget``."""
        function = self.scorer if isinstance(self.scorer, FunctionScorer) else None
        return EngineBudget(
            self.graphs.scored(self.context), asked, self.examples.tuning, checked=checked, function=function
        )

    def fit_head(self) -> None:
        """Fit the head of the task on the float model's outputs, unless fitted before or missing."""
        if not self.examples.head or (self.shared is not None and self.shared.has_head):
            return
        with self.context.timer("fit the head on float embeddings"), bar("head") as progress:
            self.context.task.fit_head(as_predictor(self.context.model), self.examples.head, progress)
        if self.shared is not None:
            self.shared.has_head = True

    def write_call(self, folder: Path) -> None:
        """Write the call form of a module into the folder of a run."""
        if isinstance(self.scorer, FunctionScorer):
            self.scorer.call.write(folder)

    def calibrate(self, quantizer: Quantizer, batches: Sequence[Batch]) -> None:
        """Calibrate a quantizer on the model, or reuse an earlier calibration.

        An earlier quantizer with equal settings provides its plan. With other settings, such as another backend or
        percentile, it provides the statistics, from which the plan follows as if the quantizer had seen the batches
        itself.
        """
        model, cache = self.context.model, self.context.resume.calibration.folder
        if not self.graphs.several:
            batches = in_parts(batches, self.context.feed)
        calibrate = partial(
            Quantizer.calibrate, model=model, batches=batches, split=True, cache=cache, tell=self._tell_resumed
        )
        if self.shared is None:
            calibrate(quantizer)
            return
        if (place := self.shared.place(quantizer)) is None:
            own, settings = Quantizer(quantizer.config), settings_of(quantizer.config)
            # Weights of convolutions have at least three axes.
            convolves = any(parameter.dim() > 2 for parameter in model.parameters())
            for known in self.shared.calibrated:
                if sees_the_same(settings_of(known.config), settings, convolves=convolves):
                    own.inherit(known)
                    break
            else:
                calibrate(own)
            place = len(self.shared.calibrated)
            self.shared.calibrated.append(own)
        quantizer.inherit(self.shared.calibrated[place])

    def _tell_resumed(self, calibration: str) -> None:
        """Print which results of an interrupted command are used."""
        kept = self.context.resume
        others = f", {counted(kept.engines.count, 'other result')}" if kept.engines.count else ""
        self.context.timer.say(f"  resumes: {calibration}{others} from {kept.calibration.folder}")

    def amp(self, quantizer: Quantizer, settings: str, measure: Callable[[Quantizer], nn.Module]) -> nn.Module:
        """Return the amp proxy of a quantizer, or an earlier one with equal configuration and settings."""
        shared = self.shared
        if shared is None or (place := shared.place(quantizer)) is None:
            return measure(quantizer)
        if place not in shared.ranked or shared.ranked[place][0] != settings:
            shared.ranked[place] = settings, measure(shared.calibrated[place])
        quantizer.inherit(shared.calibrated[place])
        return shared.ranked[place][1]


_PART = 16
"""The largest weight of a batch for calibration, so that the least number of batches is enough for a search."""


def in_parts(batches: Sequence[Batch], feed: Feed) -> Sequence[Batch]:
    """Return calibration batches, the large ones in parts if the model computes each sample independently."""
    is_fixed = feed.sizes is not None and not feed.sizes.is_open(BATCH)
    if is_fixed or not feed.samples_independent:
        return batches
    return [part for batch in batches for part in _parts(batch)]


def _parts(batch: Batch) -> Iterator[Batch]:
    rows, _ = batch_shape(batch)
    size = math.ceil(rows / math.ceil(weight(batch) / _PART))
    for start in range(0, rows, size):
        yield rows_at(batch, range(start, min(start + size, rows)))


Load: TypeAlias = Callable[[StageTimer, ResumeFiles, Path], Workload]
"""A function that loads the workload of a run, with its timer, resume files and folder."""


def module_batches(model: nn.Module, data: Any, samples: int | None = None) -> list[Batch]:
    """Return batches of data without labels, by the argument names of ``forward``; see ``batches_of``."""
    return named_batches(model, map(_without_label, batches_of(model, data, samples)))


def module_workload(
    model: nn.Module,
    source: str,
    batches: Sequence[Batch],
    scorer: Callable[[RunContext], FunctionScorer],
    timer: StageTimer,
    kept: ResumeFiles,
    folder: Path,
) -> Workload:
    """Return the workload of a module in eval mode on the CPU; a partial call is a ``Load``."""
    context = RunContext(timer=timer, resume=kept, model=model, processor=None, feed=ModuleFeed(batches))
    examples = RunExamples(calibration=list(batches), evaluation=list(batches))
    return scored_workload(context, examples, source, scorer(context))


def scored_workload(context: RunContext, examples: RunExamples, source: str, scorer: FunctionScorer) -> Workload:
    """Return the workload of a module whose context and samples exist."""
    feed = context.feed
    assert isinstance(feed, ModuleFeed)
    return Workload(
        context=context,
        graphs=Graphs(context),
        examples=examples,
        scorer=scorer,
        info=context.info(source, MODULE),
        # An invalid score function raises before calibration.
        check=partial(scorer.take, {"float": context.model}),
        metric=lambda _: scorer.metric,
        fit=lambda config: fitted(config, feed.sizes),
    )


def output_of(model: nn.Module, batch: Batch) -> Any:
    """Return the output of a model for a batch, to learn its structure."""
    with torch.no_grad(), untouched(model):
        return model(**batch)


def _without_label(batch: Any) -> Any:
    """Return a batch without labels."""
    if not hasattr(batch, "keys"):
        return batch
    return {name: batch[name] for name in batch if name not in LABELS}
