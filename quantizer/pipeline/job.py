"""One model on its way to an engine: what was asked, what it works on, and what its stages have made so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantizer.config import RunConfig
from quantizer.engines import BuildResult, Inspection, runs_here
from quantizer.pipeline.compare_outputs import OnlySizes, OutputCheck, References, Tolerance, distances_of, tolerance
from quantizer.pipeline.context import RunContext, RunExamples
from quantizer.pipeline.latency_fallback import RunPlacement
from quantizer.pipeline.model_graphs import Graphs
from quantizer.pipeline.open_axes import is_in_parts
from quantizer.pipeline.progress import StageTimer
from quantizer.pipeline.resume import ResumeFiles
from quantizer.pipeline.run_engines import RunEngines
from quantizer.pipeline.scores import Metric
from quantizer.pipeline.search_max_drop import EngineBudget
from quantizer.pipeline.train import TrainingResult
from quantizer.pipeline.workload import Load, Scorer, Workload
from quantizer.quantizer import Quantizer
from quantizer.report import Latency, MemoryEntry, Score, Stage
from quantizer.report.record import Agreement, EngineChoice, OutputDistance
from quantizer.tasks import Batch

QUANTIZER = "quantizer"
"""The folder of the calibrated quantizer in that of a run."""


@dataclass
class Job:
    """The state of one run; the functions of ``stages`` work on it, in their order.

    Attributes:
        config: the configuration, resolved as the stages go on.
        name: the name of the result.
        target: the folder that is filled.
        kept: the files from which the same command resumes.
        load: loads the model and its data.
        among: the backends to choose from, empty for all of this CPU; None: the configuration names one.
        converts: whether the result is one of a conversion, which has one for each backend.
        work: the model, the samples and the scores.
        fixed: which sizes the model fixes, in sentences.
        alone: the sizes that an engine takes alone, by its name, in sentences.
        refused: why an engine is not delivered, by its name.
        references: PyTorch's outputs at several sizes, by graph.
        checks: the outputs of the engine against them, by graph.
        agreement: how far the texts of each form are those of the float model.
        only_sizes: the sizes that the engine takes alone; empty: it takes all.
        distances: how far the proxy's outputs are from the float model's, where no engine runs here.
        latencies: those at the usual sizes, then at others.
    """

    config: RunConfig
    name: str
    target: Path
    kept: ResumeFiles
    timer: StageTimer
    load: Load
    among: Sequence[str] | None = None
    converts: bool = False
    work: Workload = field(init=False)
    budget: EngineBudget = field(init=False)
    quantizer: Quantizer = field(init=False)
    engines: RunEngines = field(init=False)
    latency_fallback: RunPlacement = field(init=False)
    references: dict[str, References] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    batches: list[Batch] = field(default_factory=list)
    choice: EngineChoice | None = None
    proxy: nn.Module | None = None
    forms: dict[str, nn.Module] = field(default_factory=dict)
    training: TrainingResult | None = None
    built: dict[str, BuildResult] = field(default_factory=dict)
    compared: BuildResult | None = None
    checks: dict[str, tuple[OutputCheck, ...]] = field(default_factory=dict)
    only_sizes: OnlySizes = ()
    alone: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    distances: tuple[OutputDistance, ...] = ()
    agreement: tuple[Agreement, ...] = ()
    float_engine_db: float | None = None
    inspection: Inspection | None = None
    scores: tuple[Score, ...] = ()
    latencies: tuple[Latency, ...] = ()
    memory: tuple[MemoryEntry, ...] = ()

    def __post_init__(self) -> None:
        self._began = len(self.timer.done)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of this job that are done."""
        return tuple(self.timer.done[self._began :])

    @property
    def context(self) -> RunContext:
        """The model and the batches that it takes."""
        return self.work.context

    @property
    def model(self) -> nn.Module:
        """The float model."""
        return self.work.context.model

    @property
    def examples(self) -> RunExamples:
        """The samples, by purpose."""
        return self.work.examples

    @property
    def scorer(self) -> Scorer:
        """The scores of models and engines."""
        return self.work.scorer

    @property
    def graphs(self) -> Graphs:
        """The graphs of the model."""
        return self.work.graphs

    @property
    def frozen(self) -> nn.Module:
        """The module that the engine is built of: the frozen proxy, or the float model where nothing is quantized."""
        if not self.config.quantize:
            return self.model
        return self.forms["proxy" if self.training is None else "qat"]

    @property
    def outputs(self) -> tuple[OutputDistance, ...]:
        """The distance of each output to that of the float model, at several sizes."""
        checks = [check for of_graph in self.checks.values() for check in of_graph]
        return self.distances or distances_of(checks, engine=True)

    def tolerance(self, *, quantized: bool) -> Tolerance:
        """Return how far the outputs of an engine may be from PyTorch's, by the types in which it computes."""
        report, precision = self.config.report, self.config.engine.inference_precision
        computed = self.config.quantizer.target.torch_dtype if precision is None else getattr(torch, precision)
        # The least SQNR that is asked for is that of the engine to deliver.
        return tolerance(report.tolerance if quantized == self.config.quantize else None, quantized, computed)

    @cached_property
    def metric(self) -> Metric:
        """The score on tuning samples, or by a function, for what is chosen by it."""
        return self.work.metric(self.budget.searched)

    @property
    def samples(self) -> list[Any]:
        """Samples on which engines are compared and timed."""
        return self.context.feed.all_samples(
            self.examples.check or self.examples.evaluation or self.examples.calibration
        )


@dataclass(frozen=True)
class Outline:
    """Facts of a job before it starts, for the names of its stages.

    Attributes:
        here: whether its engines run on this machine.
        chooses: whether its engine is chosen.
    """

    config: RunConfig
    here: bool
    chooses: bool

    @classmethod
    def of(cls, config: RunConfig, *, chooses: bool) -> Outline:
        """Return the outline of a configuration."""
        return cls(config, chooses or runs_here(config.quantizer.backend), chooses)

    @property
    def by_function(self) -> bool:
        """True if the model is given by a function, which scores it."""
        return self.config.model.task is None

    @property
    def scored(self) -> bool:
        """True if there is a score."""
        return self.config.model.metric is not None if self.by_function else self.config.data.evaluation is not None

    @property
    def writes(self) -> bool:
        """True if the model is an encoder-decoder one, which writes text and becomes several engines."""
        return is_in_parts(self.config)

    @property
    def searches(self) -> bool:
        """True if groups fall back until a score is met."""
        return self.config.fallback is not None and self.config.fallback.max_drop is not None

    @property
    def changed(self) -> bool:
        """True if the plan may change after the engine was first built."""
        return self.config.fallback is not None or self.config.qat is not None
