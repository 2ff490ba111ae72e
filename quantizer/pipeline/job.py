"""The state of one run: its configuration, the model with its data, and the results of the stages so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantizer.config import RunConfig
from quantizer.config.data_section import MODULE
from quantizer.engines import BuildResult, Inspection, runs_here
from quantizer.pipeline.compare_outputs import OnlySizes, OutputCheck, References, Tolerance, distances_of, tolerance
from quantizer.pipeline.context import RunContext, RunExamples, Runnable
from quantizer.pipeline.latency_fallback import RunLatencyFallback
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
"""Name of the folder with the calibrated quantizer in the folder of a run."""


@dataclass
class Job:
    """The state of one run, which the functions of ``stages`` fill in order.

    Attributes:
        config: the configuration; stages resolve it further.
        name: the name of the result.
        target: the output folder.
        kept: the files from which the same command resumes.
        load: loads the model and its data.
        among: the backends to choose from, empty for all of a device; None if the configuration names one.
        converts: the job belongs to a conversion, which has one job per backend.
        work: the model, the samples and the scores.
        fixed: sentences about sizes that the model fixes.
        fastest_float: name and engine of the fastest float engine, unless the run delivers it.
        alone: sentences about the sizes that an engine is limited to, by engine name.
        refused: the reason why an engine is not delivered, by engine name.
        references: PyTorch's outputs at several sizes, by graph.
        checks: comparisons of the engine's outputs with the references, by graph.
        float_checks: the same of the float engine.
        agreement: the agreement of generated texts with the float model, by form.
        only_sizes: the sizes that the engine accepts; empty for all.
        distances: the distance of the proxy's outputs from the float model, if no engine runs on this machine.
        latencies: latencies at the most important size first, then at others.
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
    latency_fallback: RunLatencyFallback = field(init=False)
    references: dict[str, References] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    batches: list[Batch] = field(default_factory=list)
    choice: EngineChoice | None = None
    fastest_float: tuple[str, Runnable] | None = None
    proxy: nn.Module | None = None
    forms: dict[str, nn.Module] = field(default_factory=dict)
    training: TrainingResult | None = None
    built: dict[str, BuildResult] = field(default_factory=dict)
    compared: BuildResult | None = None
    checks: dict[str, tuple[OutputCheck, ...]] = field(default_factory=dict)
    float_checks: dict[str, tuple[OutputCheck, ...]] = field(default_factory=dict)
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
        """The finished stages of this job."""
        return tuple(self.timer.done[self._began :])

    @property
    def context(self) -> RunContext:
        return self.work.context

    @property
    def model(self) -> nn.Module:
        return self.work.context.model

    @property
    def examples(self) -> RunExamples:
        """The samples by purpose."""
        return self.work.examples

    @property
    def scorer(self) -> Scorer:
        return self.work.scorer

    @property
    def graphs(self) -> Graphs:
        return self.work.graphs

    @property
    def frozen(self) -> nn.Module:
        """The module of which the engine is built: the frozen proxy, or the float model if nothing is quantized."""
        if not self.config.quantize:
            return self.model
        return self.forms["proxy" if self.training is None else "qat"]

    @property
    def outputs(self) -> tuple[OutputDistance, ...]:
        """The distance of each output from the float model, at several sizes."""
        checks = [check for of_graph in self.checks.values() for check in of_graph]
        return self.distances or distances_of(checks, engine=True)

    def tolerance(self, *, quantized: bool) -> Tolerance:
        """Return the tolerance of an engine's outputs, which depends on the types in which it computes."""
        report, precision = self.config.report, self.config.engine.inference_precision
        computed = self.config.quantizer.target.torch_dtype if precision is None else getattr(torch, precision)
        # report.tolerance applies to the engine that is delivered.
        return tolerance(report.tolerance if quantized == self.config.quantize else None, quantized, computed)

    @cached_property
    def metric(self) -> Metric:
        """The score that searches use: on tuning samples, or by a function."""
        return self.work.metric(self.budget.searched)

    @property
    def samples(self) -> list[Any]:
        """Samples for output comparisons and benchmarks."""
        return self.context.feed.all_samples(
            self.examples.check or self.examples.evaluation or self.examples.calibration
        )


@dataclass(frozen=True)
class Outline:
    """Facts about a job before it starts, which decide the names of its stages.

    Attributes:
        here: the engines run on this machine.
        chooses: the engine is chosen among several.
        scored: models and engines are scored.
    """

    config: RunConfig
    here: bool
    chooses: bool
    scored: bool

    @classmethod
    def of(cls, config: RunConfig, *, chooses: bool, scored: bool | None = None) -> Outline:
        """Return the outline of a configuration; ``scored`` is None if the configuration names the score."""
        if scored is None:
            by_function = config.model.task is None
            scored = (config.model.metric if by_function else config.data.evaluation) is not None
        return cls(config, chooses or runs_here(config.quantizer.backend), chooses, scored)

    @property
    def by_function(self) -> bool:
        """True if a function scores the model."""
        return self.config.model.task in (None, MODULE)

    @property
    def writes(self) -> bool:
        """True for an encoder-decoder model, which generates text and has several engines."""
        return is_in_parts(self.config)

    @property
    def scored_by_choice(self) -> bool:
        """True if the choice of an engine scores the float model and the quantized engine."""
        return self.chooses and self.config.quantize and not self.writes

    @property
    def searches(self) -> bool:
        """True if a search keeps groups in float until the score meets a budget."""
        return self.config.fallback is not None and self.config.fallback.max_drop is not None

    @property
    def checks_drop(self) -> bool:
        """True if the engine of the search is scored, and the search continues if the drop is too large."""
        return self.searches and self.here and self.config.qat is None

    @property
    def changed(self) -> bool:
        """True if the plan may change after the first build."""
        return self.config.fallback is not None or self.config.qat is not None
