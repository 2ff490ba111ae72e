"""``Workload``: the model, the samples and the scores of a run, made of a checkpoint or a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from quantizer.algorithms.make_plan import sees_the_same
from quantizer.config import RunConfig
from quantizer.config.data_section import MODULE
from quantizer.pipeline.context import RunContext, RunExamples, Runs, as_predictor, bar
from quantizer.pipeline.model_graphs import Graphs
from quantizer.pipeline.module_feed import ModuleFeed, fitted, named_batches
from quantizer.pipeline.progress import StageTimer
from quantizer.pipeline.resume import ResumeFiles
from quantizer.pipeline.scores import FunctionScorer, Metric
from quantizer.pipeline.search_max_drop import EngineBudget
from quantizer.proxy.restored_state import untouched
from quantizer.quantizer import Quantizer
from quantizer.report import ModelInfo, Score
from quantizer.settings import settings_of
from quantizer.tasks import Batch, Example
from quantizer.tasks.datasets.examples import content_of
from quantizer.utils.batches import batches_of


class Scorer(Protocol):
    """Scores of models and engines, and their differences to the float model; none is run twice."""

    def difference(self, which: str, engine: Runs | None) -> float | None:
        """Return the score of an engine less that of the float model; None: there is no score, or no engine."""

    def take(self, forms: Mapping[str, Runs]) -> None:
        """Run models and engines; their scores are made of that later."""

    def scores(self, forms: Mapping[str, Runs]) -> tuple[Score, ...]:
        """Return the scores of the float model, and of other models and engines by name; empty: there are none."""

    def for_run(self, context: RunContext, resamples: int, folder: Path) -> Scorer:
        """Return a scorer for another run on the same model and samples, which knows what the float model gives."""


def _as_it_is(config: RunConfig) -> RunConfig:
    return config


@dataclass
class SharedObjects:
    """Objects that runs on one model and the same batches have in common, in memory.

    No file holds it: a head is fitted into the task, and a ranking belongs to a proxy of the model that is loaded.

    Attributes:
        has_head: whether the head of the task was fitted, which needs the float model alone.
        calibrated: quantizers that were only calibrated, so that no fallback of a run is in them.
        ranked: the amp proxy of a calibrated one, by its place, and the settings with which it was measured.
    """

    has_head: bool = False
    calibrated: list[Quantizer] = field(default_factory=list)
    ranked: dict[int, tuple[str, nn.Module]] = field(default_factory=dict)

    def place(self, quantizer: Quantizer) -> int | None:
        """Return the place of the calibrated quantizer with an equal configuration; None: there is none."""
        return next((place for place, one in enumerate(self.calibrated) if one.config == quantizer.config), None)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model, data and scores of one run.

    Attributes:
        context: the float model and the batches that it takes.
        graphs: the graphs that become engines.
        examples: the samples, by purpose.
        scorer: scores what comes of it.
        info: the model in words.
        check: raises what would otherwise come after minutes of calibration.
        metric: returns the metric of a search, by the tuning samples that it may see.
        fit: returns the configuration of a run with what it takes from the samples.
        shared: what it shares with other runs on it; None: it is used once.
        diagnoses: whether causes of a loss are looked for; a sweep does so when the folder is in its place.
    """

    context: RunContext
    graphs: Graphs
    examples: RunExamples
    scorer: Scorer
    info: ModelInfo
    check: Callable[[], None]
    metric: Callable[[Sequence[Example]], Metric]
    fit: Callable[[RunConfig], RunConfig] = _as_it_is
    shared: SharedObjects | None = None
    diagnoses: bool = True

    @property
    def scored_examples(self) -> str | None:
        """A hash of the samples that a score depends on; None: a function scores, of whose samples nothing is known."""
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
        """Fit the head of the task on the float model's outputs, if it has one and no run before has done so."""
        if not self.examples.head or (self.shared is not None and self.shared.has_head):
            return
        with self.context.timer("fit the head on float embeddings"), bar("head") as progress:
            self.context.task.fit_head(as_predictor(self.context.model), self.examples.head, progress)
        if self.shared is not None:
            self.shared.has_head = True

    def write_call(self, folder: Path) -> None:
        """Write into the folder of a run how its model is called, if that is more than names of inputs."""
        if isinstance(self.scorer, FunctionScorer):
            self.scorer.call.write(folder)

    def calibrate(self, quantizer: Quantizer, batches: Sequence[Batch]) -> None:
        """Calibrate a quantizer on the model, or give it what a run before it has seen.

        One with the settings of an earlier one gets its plan; one with other settings, such as another backend or
        percentile, gets the statistics, of which its plan is made as if it had seen the batches itself.
        """
        model = self.context.model
        if self.shared is None:
            quantizer.calibrate(model, batches, split=True)
            return
        if (place := self.shared.place(quantizer)) is None:
            own, settings = Quantizer(quantizer.config), settings_of(quantizer.config)
            # The weight of a convolution has three axes or more.
            convolves = any(parameter.dim() > 2 for parameter in model.parameters())
            for known in self.shared.calibrated:
                if sees_the_same(settings_of(known.config), settings, convolves=convolves):
                    own.inherit(known)
                    break
            else:
                own.calibrate(model, batches)
            place = len(self.shared.calibrated)
            self.shared.calibrated.append(own)
        quantizer.inherit(self.shared.calibrated[place])

    def amp(self, quantizer: Quantizer, settings: str, measure: Callable[[Quantizer], nn.Module]) -> nn.Module:
        """Return the amp proxy of a quantizer, that of an earlier one if its configuration and settings are equal."""
        shared = self.shared
        if shared is None or (place := shared.place(quantizer)) is None:
            return measure(quantizer)
        if place not in shared.ranked or shared.ranked[place][0] != settings:
            shared.ranked[place] = settings, measure(shared.calibrated[place])
        quantizer.inherit(shared.calibrated[place])
        return shared.ranked[place][1]


Load: TypeAlias = Callable[[StageTimer, ResumeFiles, Path], Workload]
"""Loads a workload for a run that prints through the timer and fills the folder."""


def module_batches(model: nn.Module, data: Any, samples: int | None = None) -> list[Batch]:
    """Return the batches of data by the names of the arguments of ``forward``, without labels; see ``batches_of``."""
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
    """Return the workload of a module in eval mode on the CPU; with the first arguments given it is a ``Load``."""
    context = RunContext(timer=timer, resume=kept, model=model, processor=None, feed=ModuleFeed(batches))
    examples = RunExamples(calibration=list(batches), evaluation=list(batches))
    return scored_workload(context, examples, source, scorer(context))


def scored_workload(context: RunContext, examples: RunExamples, source: str, scorer: FunctionScorer) -> Workload:
    """Return the workload of a module whose context and samples are loaded."""
    feed = context.feed
    assert isinstance(feed, ModuleFeed)
    return Workload(
        context=context,
        graphs=Graphs(context),
        examples=examples,
        scorer=scorer,
        info=context.info(source, MODULE),
        # A function that is no score raises before the calibration.
        check=partial(scorer.take, {"float": context.model}),
        metric=lambda _: scorer.metric,
        fit=lambda config: fitted(config, feed.sizes),
    )


def output_of(model: nn.Module, batch: Batch) -> Any:
    """Return what a model returns for a batch, to know its kind: a part of it might not run."""
    with torch.no_grad(), untouched(model):
        return model(**batch)


def _without_label(batch: Any) -> Any:
    """Return a batch without the labels that a transformers model would compute a loss of."""
    if not hasattr(batch, "keys"):
        return batch
    return {name: batch[name] for name in batch if name not in ("label", "labels")}
