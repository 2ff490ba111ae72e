"""The record of a run as frozen data: its configuration, its measurements and its results.

Every dataclass here is one object of ``report.json``. The text under a field documents it, and
``docs/report-format.md`` is generated from these texts. All ratios are float divided by this, so larger is better.
A field that is added, removed or changed in meaning needs a new :data:`VERSION`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantizer.engines.inspection.inspection import Inspection, Layer, PrecisionShare
from quantizer.report.record_base import Record
from quantizer.report.run_records import (
    BudgetOutcome,
    Candidate,
    Cause,
    Cure,
    EngineCheck,
    EngineChoice,
    GroupTime,
    Histogram,
    Operand,
    OutputDistance,
    Placement,
    PlacementPoint,
    RangeCandidate,
    Site,
    SpeedCheck,
    TrainingRun,
    TrainingScore,
    UnquantizedProduct,
)

__all__ = [
    "VERSION",
    "BudgetOutcome",
    "Candidate",
    "Cause",
    "Cure",
    "EngineChoice",
    "EngineFile",
    "UnquantizedProduct",
    "EngineCheck",
    "Evaluation",
    "Fallback",
    "GroupTime",
    "Histogram",
    "Inspection",
    "Latency",
    "LatencyEntry",
    "Layer",
    "MemoryEntry",
    "ModelInfo",
    "Operand",
    "OutputDistance",
    "Placement",
    "PlacementPoint",
    "PrecisionShare",
    "RangeCandidate",
    "RunRecord",
    "Score",
    "SensitivityRow",
    "Site",
    "SizeEntry",
    "SpeedCheck",
    "Stage",
    "TrainingRun",
    "TrainingScore",
]

VERSION = 9


@dataclass(frozen=True, kw_only=True)
class ModelInfo(Record):
    """The model that the run started from."""

    source: str
    """Where the model came from: a folder, a hub name, or ``package:NAME/FOLDER``."""
    task: str
    """The task of the model, such as ``sentence-similarity``."""
    parameters: int
    """Number of parameters of the float model."""


@dataclass(frozen=True, kw_only=True)
class Score(Record):
    """The score of one form of the model on the evaluation data."""

    which: str
    """Which form: ``float`` (the reference), ``proxy`` (the quantized PyTorch model), ``engine`` (the built engine), or
    ``simulation`` (the proxy with its float part in half precision, if the engine could not run). A run with training
    has ``ptq`` (the proxy before training) and ``qat`` (the proxy after it) in place of ``proxy``."""
    value: float
    """The metric's value."""
    metric: str
    """Name of the metric, such as ``spearman`` or ``accuracy``."""
    paired: Mapping[str, float | None] = field(default_factory=dict)
    """Comparisons with the float model on the same inputs, by name: ``label_flips`` (a share), ``mean_cosine``."""
    difference: float | None = None
    """This value minus the float value; null for float itself."""
    interval: tuple[float, float] | None = None
    """95% bootstrap interval [low, high] of the difference; null if it was not computed."""
    rows: int | None = None
    """Number of evaluation examples."""
    higher_is_better: bool = True
    """Whether a higher value is better."""


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
    quartiles_ms: tuple[float, float] | None = None
    """First and third quartile of the times: half of them lie between; null if there were fewer than four."""
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
    reference: str | None = None
    """What the speed-ups are relative to, the entry ``float``: the float engine's backend and type, such as ``openvino
    float32`` or ``openvino bfloat16``, or ``PyTorch float``; null in a report of an older version."""
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
    """Peak resident memory in MiB while the engine loads and runs in a process of its own, less the memory of that
    process before."""
    ratio: float
    """The float peak divided by this peak; above 1 is less memory."""


@dataclass(frozen=True, kw_only=True)
class SensitivityRow(Record):
    """The error of quantizing one group alone."""

    group: str
    """Name of the group."""
    kind: str
    """Kind of the group's sites; several are separated by commas."""
    block: str = ""
    """The block of the group: the path of a module up to its first number, such as ``encoder.layer.3``."""
    position: int = 0
    """Its place in the model's order, from 0."""
    sites: tuple[str, ...] = ()
    """Names of the sites in the group."""
    parts: tuple[str, ...] = ()
    """The precision groups that it consists of: itself, unless coarser groups were measured."""
    activations: int = 0
    """How many of its operands are activations."""
    multiply_adds: int = 0
    """Multiply-adds of its sites in calibration."""
    error: float
    """The error of quantizing this group alone, by the run's ``measure``; 0 is no change."""
    rank: int
    """Place in the ranking; 1 is the highest error."""
    fallback: bool = False
    """Whether the group fell back to float."""


@dataclass(frozen=True, kw_only=True)
class Evaluation(Record):
    """One score in a search for the groups that fall back to float."""

    groups: tuple[str, ...]
    """Names of the groups that were float."""
    score: float
    """The metric."""
    drop: float
    """How much worse the score is than the float model's; negative if it is better."""
    cost: float
    """The sum of the costs of the groups; their number, if no costs were given."""
    front: bool = False
    """Whether no other evaluation beats it in both cost and drop."""
    chosen: bool = False
    """Whether the search chose these groups."""


@dataclass(frozen=True, kw_only=True)
class Fallback(Record):
    """The groups that fell back to float."""

    groups: tuple[str, ...]
    """Names of the groups."""
    reason: str
    """Why these groups: the arguments of the choice, such as ``num=4``, and the result of a search."""
    evaluations: tuple[Evaluation, ...] = ()
    """The scores that a search measured, in order; empty if there was none."""
    float_score: float | None = None
    """The float model's score in that search; null if there was none."""
    max_drop: float | None = None
    """How much worse than the float score the score may be; null if there was no search."""
    checks: tuple[EngineCheck, ...] = ()
    """The engines that were checked against ``max_drop``, the last of them delivered; empty if none was."""
    outcome: BudgetOutcome | None = None
    """Whether ``max_drop`` is met in the end; null if there was no search."""


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
    """What was checked on the engine, and the result."""


@dataclass(frozen=True, kw_only=True)
class Stage(Record):
    """One stage of the run."""

    name: str
    """Name of the stage."""
    seconds: float
    """How long it took, in seconds."""
    inside: str | None = None
    """The stage that it was a part of, whose time holds its own; null: it stands by itself."""


@dataclass(frozen=True, kw_only=True)
class RunRecord(Record):
    """The whole run; the top object of ``report.json``."""

    version: int = VERSION
    """Version of this format; a reader takes no other one."""
    name: str
    """Name of the run."""
    created: str
    """When the run started, ISO 8601 with time zone."""
    config: Mapping[str, Any]
    """The resolved configuration, every default filled in."""
    model: ModelInfo
    """The model that the run started from."""
    fixed: tuple[str, ...] = ()
    """Sizes of inputs that an engine takes alone, a sentence each: the model fixes them, or the backend computes its
    model for all sizes wrongly. Empty: none."""
    scores: tuple[Score, ...] = ()
    """Scores of float, proxy and engine or simulation; empty if nothing was evaluated."""
    outputs: tuple[OutputDistance, ...] = ()
    """The distance of each output to that of the float model; empty if it was not measured."""
    float_engine_db: float | None = None
    """SQNR in dB of the float engine's worst output to the float model's in PyTorch; null: there is no difference, or
    it was not compared."""
    engine_refused: str | None = None
    """How wrong the engine's outputs are, at which size; such an engine is not in the folder. Null: they are right, or
    were not compared."""
    float_engine_refused: str | None = None
    """The same of the engine of the float model."""
    latency: Latency | None = None
    """Latencies; null if they were not measured."""
    size: tuple[SizeEntry, ...] = ()
    """Sizes on disk; empty if they were not measured."""
    memory: tuple[MemoryEntry, ...] = ()
    """Peak memory; empty if it was not measured."""
    coverage: tuple[Site, ...] = ()
    """All sites, quantized or not."""
    covered_share: float | None = None
    """Share in low precision of all multiply-adds that torch executed in calibration, in sites or not; null: none."""
    escaped: tuple[UnquantizedProduct, ...] = ()
    """The products that do not run in low precision, the largest first, each with its reason."""
    histograms: tuple[Histogram, ...] = ()
    """Histograms of the quantized activations with the lowest SQNR, the lowest first; empty if none were kept."""
    sensitivity: tuple[SensitivityRow, ...] = ()
    """The ranking of groups; empty if it was not measured."""
    measure: str | None = None
    """The measure of the ranking's errors: ``gradient`` (the divergence of the output, estimated from gradients),
    ``loss`` (the effect on the user's loss, estimated from gradients), ``output`` (the divergence of the output),
    ``local`` (the relative error at the sites), ``metric`` (the drop of the metric). The divergence is the
    Kullback-Leibler divergence of logits, or the relative error of any other output. Null if nothing was measured."""
    causes: tuple[Cause, ...] = ()
    """The groups that cost most, the worst first, each with its cause and its cure; empty if the run has no ``amp``."""
    causes_problem: str | None = None
    """The error that ended the search for causes; null if it did not fail."""
    fallback: Fallback | None = None
    """The groups that fell back to float; null if none did."""
    training: TrainingRun | None = None
    """The quantization-aware training; null if there was none."""
    choice: EngineChoice | None = None
    """The choice of the backend by measured time; null if the configuration named one."""
    placement: Placement | None = None
    """What quantizing each group is worth in time; null where no engine was timed."""
    engine: EngineFile | None = None
    """The engine; null if none was built, or it was refused."""
    inspection: Inspection | None = None
    """The precision of each layer of the engine, or what the ONNX file asks for if the engine could not be observed;
    null if none was built."""
    diff: str = ""
    """The rewritten source as a unified diff; may be long."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Installed version of each package that the run depends on."""
    machine: Mapping[str, str | int | float | None] = field(default_factory=dict)
    """Facts of the machine: ``cpu``, ``instructions``, ``cores``, ``memory_gib``, ``os``, ``python``."""
    stages: tuple[Stage, ...] = ()
    """The stages in order, with their durations."""
