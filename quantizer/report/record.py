"""The record of a run: what was done, what it cost and what it won, as frozen data.

Every dataclass here is one object of ``report.json``; the text under a field is its documentation, from which
``docs/report-format.md`` is made. All ratios read the same way: float divided by this, so larger is better.
A field added, removed or changed in meaning needs a new :data:`VERSION`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from quantizer.engines.inspection.inspection import Inspection
from quantizer.engines.inspection.inspection import Layer
from quantizer.engines.inspection.inspection import PrecisionShare
from quantizer.report.record_base import Record
from quantizer.report.site_record import Histogram
from quantizer.report.site_record import Operand
from quantizer.report.site_record import RangeCandidate
from quantizer.report.site_record import Site
from quantizer.report.site_record import UnquantizedProduct

__all__ = [
    "VERSION",
    "EngineFile",
    "UnquantizedProduct",
    "Evaluation",
    "Fallback",
    "Histogram",
    "Inspection",
    "Latency",
    "LatencyEntry",
    "Layer",
    "MemoryEntry",
    "ModelInfo",
    "Operand",
    "PrecisionShare",
    "RangeCandidate",
    "RunRecord",
    "Score",
    "SensitivityRow",
    "Site",
    "SizeEntry",
    "Stage",
    "TrainingRun",
    "TrainingScore",
]

VERSION = 5


@dataclass(frozen=True, kw_only=True)
class ModelInfo(Record):
    """The model that the run started from."""

    source: str
    """Where the model came from: a folder, a hub name, or ``package:NAME/FOLDER``."""
    task: str
    """The task it was run as, such as ``sentence-similarity``."""
    parameters: int
    """Number of parameters of the float model."""


@dataclass(frozen=True, kw_only=True)
class Score(Record):
    """The score of one form of the model on the evaluation data."""

    which: str
    """Which form: ``float`` (the reference), ``proxy`` (the quantized PyTorch model), ``engine`` (the built engine), or
    ``simulation`` (the proxy with a half rest, as the engine has it, where nothing could run the engine). Of a run that
    trained, ``ptq`` (the proxy before training) and ``qat`` (the proxy after it) stand in place of ``proxy``."""
    value: float
    """The metric's value."""
    metric: str
    """Name of the metric, such as ``spearman`` or ``accuracy``."""
    paired: Mapping[str, float | None] = field(default_factory=dict)
    """Figures against the float model on the same inputs, by name: ``label_flips`` (a share), ``mean_cosine``."""
    difference: float | None = None
    """This value minus the float value; null for float itself."""
    interval: tuple[float, float] | None = None
    """95% bootstrap interval [low, high] of the difference; null where it was not computed."""
    rows: int | None = None
    """Number of evaluation examples."""
    higher_is_better: bool = True
    """Whether a larger value is a better one."""


@dataclass(frozen=True, kw_only=True)
class LatencyEntry(Record):
    """The time that one batch takes in one engine."""

    name: str
    """The engine; ``float`` names the reference and ``engine`` the quantized engine of this run."""
    median_ms: float
    """Median time of one batch, in milliseconds."""
    min_ms: float
    """Shortest time of one batch, in milliseconds."""
    max_ms: float
    """Longest time of one batch, in milliseconds."""
    ratio_to_float: float
    """Speed-up: the float median divided by this median; above 1 is faster."""


@dataclass(frozen=True, kw_only=True)
class Latency(Record):
    """Latencies of all engines, measured interleaved in one run."""

    batch: int
    """Examples in the batch."""
    sequence: int | None
    """Tokens in each example; null for a model without a sequence."""
    threads: int
    """Threads that each engine may use."""
    engines: tuple[LatencyEntry, ...]
    """One entry per engine, the float reference first."""


@dataclass(frozen=True, kw_only=True)
class SizeEntry(Record):
    """The size of one form of the model on disk."""

    name: str
    """The form; ``float`` names the reference and ``engine`` the quantized one."""
    bytes: int
    """Size in bytes."""
    ratio: float
    """The float size divided by this size; above 1 is smaller."""


@dataclass(frozen=True, kw_only=True)
class MemoryEntry(Record):
    """The memory of one form of the model while it runs."""

    name: str
    """The form; ``float`` names the reference and ``engine`` the quantized one."""
    peak_mib: float
    """Peak resident memory in MiB while the engine loads and runs in a process of its own, above what that process held
    before."""
    ratio: float
    """The float peak divided by this peak; above 1 is less memory."""


@dataclass(frozen=True, kw_only=True)
class SensitivityRow(Record):
    """The cost of quantizing one group alone."""

    group: str
    """Name of the group."""
    kind: str
    """Kind of the group's sites; several are separated by commas."""
    block: str = ""
    """The block that it stands in: the path of a module up to its first number, such as ``encoder.layer.3``."""
    position: int = 0
    """Its place in the model's order, from 0."""
    sites: tuple[str, ...] = ()
    """Names of the sites in the group."""
    parts: tuple[str, ...] = ()
    """The precision groups that it is made of: itself, where nothing coarser was measured."""
    activations: int = 0
    """How many activations it quantizes."""
    multiply_adds: int = 0
    """Multiply-adds of its sites in calibration."""
    error: float
    """What quantizing this group alone costs, in the run's ``measure``; 0 is no change."""
    rank: int
    """Place in the ranking, from 1, the most sensitive."""
    fallback: bool = False
    """Whether the group was put back to float."""


@dataclass(frozen=True, kw_only=True)
class Evaluation(Record):
    """One score that a search for the groups to put back took."""

    groups: tuple[str, ...]
    """What was float in it."""
    score: float
    """The metric."""
    drop: float
    """How much worse that is than the float model's score; negative where it is better."""
    cost: float
    """The sum of the costs of what was put back; the number of groups, where no costs were given."""
    front: bool = False
    """Whether no other evaluation beats it in both cost and drop."""
    chosen: bool = False
    """Whether this is what was put back in the end."""


@dataclass(frozen=True, kw_only=True)
class Fallback(Record):
    """The groups that were put back to float."""

    groups: tuple[str, ...]
    """Names of the groups."""
    reason: str
    """Why these: the budget that was given, such as ``num=4``."""
    evaluations: tuple[Evaluation, ...] = ()
    """The scores that a search took, in order; empty where there was none."""
    float_score: float | None = None
    """The float model's score in that search; null where there was none."""
    max_drop: float | None = None
    """How much worse than that the score may be; null where there was no search."""


@dataclass(frozen=True, kw_only=True)
class TrainingScore(Record):
    """A score on the tuning rows in the course of a training."""

    step: int
    """After how many steps it was taken; 0: before training, which is the score of PTQ."""
    score: float
    """The metric."""
    best: bool = False
    """Whether this is the state that was kept."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun(Record):
    """The training with rounded operands."""

    metric: str
    """Name of the metric."""
    higher_is_better: bool
    """Whether a larger value is a better one."""
    planned: int
    """How many steps were planned."""
    losses: tuple[float, ...]
    """What was minimised at each step: how far the outputs of its batch were from the float model's."""
    learning_rates: tuple[float, ...]
    """The learning rate of each step."""
    scores: tuple[TrainingScore, ...]
    """The scores on the tuning rows, in order."""
    float_score: float
    """The float model's score on the tuning rows."""
    stopped: str | None = None
    """Why it ended before all steps were made; null where it did not."""


@dataclass(frozen=True, kw_only=True)
class EngineFile(Record):
    """The engine that was built."""

    backend: str
    """Backend it was built for, such as ``openvino``."""
    path: str
    """Its file, relative to the run folder."""
    build_seconds: float
    """Time to build it, in seconds."""
    verified: str
    """What was checked on it, and the outcome."""


@dataclass(frozen=True, kw_only=True)
class Stage(Record):
    """One stage of the run."""

    name: str
    """Name of the stage."""
    seconds: float
    """How long it took, in seconds."""


@dataclass(frozen=True, kw_only=True)
class RunRecord(Record):
    """The whole run; the top object of ``report.json``."""

    version: int = VERSION
    """Version of this format; a reader refuses every other."""
    name: str
    """Name of the run."""
    created: str
    """When the run started, ISO 8601 with time zone."""
    config: Mapping[str, Any]
    """The resolved configuration, every default filled in."""
    model: ModelInfo
    """The model that the run started from."""
    scores: tuple[Score, ...] = ()
    """Scores of float, proxy and engine or simulation; empty where nothing was evaluated."""
    latency: Latency | None = None
    """Latencies; null where they were not measured."""
    size: tuple[SizeEntry, ...] = ()
    """Sizes on disk; empty where they were not measured."""
    memory: tuple[MemoryEntry, ...] = ()
    """Peak memory; empty where it was not measured."""
    coverage: tuple[Site, ...] = ()
    """Every site found, quantized or not."""
    covered_share: float | None = None
    """Share of the multiply-adds of all matrix products and convolutions that torch executed in calibration, whether a
    site was found for them or not, that run in low precision: 0 to 1; null where nothing was counted."""
    escaped: tuple[UnquantizedProduct, ...] = ()
    """The products that do not run in low precision, the largest first, each with its reason."""
    histograms: tuple[Histogram, ...] = ()
    """Histograms of the quantized activations with the lowest SQNR, the lowest first; empty where none were kept."""
    sensitivity: tuple[SensitivityRow, ...] = ()
    """The ranking of groups; empty where it was not measured."""
    measure: str | None = None
    """What the ranking's errors are: ``gradient`` (the divergence of the output, estimated from gradients), ``loss``
    (the effect on a loss that was given, estimated likewise), ``output`` (the divergence of the output), ``local`` (the
    relative error at the sites), ``metric`` (the drop of the metric). The divergence is the Kullback-Leibler divergence
    of logits, the relative error of any other output; null where nothing was measured."""
    fallback: Fallback | None = None
    """The groups put back to float; null where none were."""
    training: TrainingRun | None = None
    """The training with rounded operands; null where there was none."""
    engine: EngineFile | None = None
    """The engine; null where none was built."""
    inspection: Inspection | None = None
    """What the engine runs in which precision, or what its graph asks for where it could not be observed; null where
    none was built."""
    diff: str = ""
    """The rewritten source as a unified diff; may be long."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Installed version of each package that the run depends on."""
    machine: Mapping[str, str | int | float | None] = field(default_factory=dict)
    """Facts of the machine: ``cpu``, ``instructions``, ``cores``, ``memory_gib``, ``os``, ``python``."""
    stages: tuple[Stage, ...] = ()
    """The stages in order, with their durations."""
