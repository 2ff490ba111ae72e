"""The record of a run: what was done, what it cost and what it won, as frozen data.

Every dataclass here is one object of ``report.json``; the text under a field is its documentation, from which
``docs/report-format.md`` is made. All ratios read the same way: float divided by this, so larger is better.
A field added, removed or changed in meaning needs a new :data:`VERSION`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from dataclasses import fields
from typing import Any

from quantizer.engines.inspection.inspection import Inspection
from quantizer.engines.inspection.inspection import Layer
from quantizer.engines.inspection.inspection import PrecisionShare

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


class _Record:
    """Base: lists given to a constructor become tuples, so that a record is hashable in parts and compares by value."""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, item.name)
            if isinstance(value, list):
                object.__setattr__(self, item.name, tuple(value))


@dataclass(frozen=True, kw_only=True)
class ModelInfo(_Record):
    """The model that the run started from."""

    source: str
    """Where the model came from: a folder, a hub name, or ``package:NAME/FOLDER``."""
    task: str
    """The task it was run as, such as ``sentence-similarity``."""
    parameters: int
    """Number of parameters of the float model."""


@dataclass(frozen=True, kw_only=True)
class Score(_Record):
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
class LatencyEntry(_Record):
    """How long one batch takes in one engine."""

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
class Latency(_Record):
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
class SizeEntry(_Record):
    """What one form of the model takes on disk."""

    name: str
    """The form; ``float`` names the reference and ``engine`` the quantized one."""
    bytes: int
    """Size in bytes."""
    ratio: float
    """The float size divided by this size; above 1 is smaller."""


@dataclass(frozen=True, kw_only=True)
class MemoryEntry(_Record):
    """What one form of the model takes in memory while it runs."""

    name: str
    """The form; ``float`` names the reference and ``engine`` the quantized one."""
    peak_mib: float
    """Peak resident memory in MiB while the engine loads and runs in a process of its own, above what that process held
    before."""
    ratio: float
    """The float peak divided by this peak; above 1 is less memory."""


@dataclass(frozen=True, kw_only=True)
class Operand(_Record):
    """One operand of a site."""

    name: str
    """Name of the operand quantizer."""
    role: str
    """``activation`` or ``weight``."""
    quantized: bool
    """Whether this operand is in low precision."""
    dtype: str = "int8"
    """The format that it is held in where it is quantized: ``int8``, ``uint8``, ``fp8``, ``int4``."""
    block_size: int | None = None
    """How many neighbours along the input channels of a weight share a scale; null where there are no blocks."""
    zero_point: int | None = None
    """The step of 0.0 in an asymmetric format; null in a symmetric one."""
    minimum: float | None = None
    """Lowest value seen; null where none was."""
    maximum: float | None = None
    """Highest value seen; null where none was."""
    amax: float | None = None
    """Largest absolute value that is represented (of all channels); null where there is no range."""
    scale: float | None = None
    """Step between two neighbouring values (the largest of all channels); null where there is no range."""
    channels: int = 1
    """Number of ranges: 1 is per tensor, more is one for each output channel, or for each block."""
    sqnr_db: float | None = None
    """Signal to quantization noise of this operand in calibration, in dB; null where it was not measured."""
    clipped: float | None = None
    """Share of the values beyond the range in calibration, 0 to 1; null where it was not measured."""
    estimate: str | None = None
    """The calibrator that was chosen for the range among several; null where there was no choice."""
    group: str | None = None
    """The precision group: what goes back to float together; null where there is none."""


@dataclass(frozen=True, kw_only=True)
class Site(_Record):
    """One call of a quantizable operation, quantized or not."""

    name: str
    """Full name: the path of the module and the operation in its function."""
    kind: str
    """Kind of operation: ``linear``, ``conv``, ``matmul``, ``residual_add``."""
    host_type: str
    """Type of the module that runs the operation."""
    file: str
    """Source file that holds the operation."""
    line: int
    """Line in that file, from 1."""
    quantized: bool
    """Whether the site runs in low precision."""
    reason: str
    """Why it is quantized, or why not."""
    rule: str | None = None
    """The rule of the configuration that decided, such as ``exclude.names: classifier``; null where none did."""
    multiply_adds: int | None = None
    """Multiply-adds of one call in calibration; null where they were not counted."""
    operands: tuple[Operand, ...] = ()
    """The operands that can be quantized."""


@dataclass(frozen=True, kw_only=True)
class RangeCandidate(_Record):
    """A range that an operand might have."""

    name: str
    """How it is estimated: ``max``, ``percentile 99.9``, ``mse``, ``entropy``; ``chosen`` for a range that none of
    them gives."""
    amax: float
    """Largest absolute value that it represents."""
    clipped: float
    """Share of the values beyond it, 0 to 1."""
    sqnr_db: float
    """Signal to quantization noise of the operand with this range, in dB."""
    chosen: bool = False
    """Whether this is the range that the operand has."""


@dataclass(frozen=True, kw_only=True)
class Histogram(_Record):
    """The absolute values that an operand took in calibration, and what ranges would make of them."""

    name: str
    """The operand, as ``SITE.OPERAND``."""
    dtype: str
    """The format that the candidates are judged by."""
    minimum: float
    """Lowest value seen."""
    maximum: float
    """Highest value seen."""
    width: float
    """Width of a bin."""
    counts: tuple[int, ...]
    """Number of values in each bin: bin i holds absolute values from i times the width up to the next bin."""
    candidates: tuple[RangeCandidate, ...]
    """Ranges to choose from, the largest first."""


@dataclass(frozen=True, kw_only=True)
class UnquantizedProduct(_Record):
    """Matrix products or convolutions of one operation in one place that do not run in low precision."""

    path: str
    """Path of the innermost module that was running; empty for the model itself."""
    site: str | None = None
    """Name of the site; null where the product ran outside of any site."""
    operation: str
    """The operation as torch executed it, such as ``addmm``."""
    multiply_adds: int
    """Multiply-adds of all its calls in calibration."""
    share: float
    """Share of all multiply-adds, 0 to 1."""
    reason: str
    """Why; one of a closed list, such as ``excluded by rule``."""
    detail: str = ""
    """The evidence: the calling function and line, the type of the operands, or what the site says."""


@dataclass(frozen=True, kw_only=True)
class SensitivityRow(_Record):
    """What quantizing one group alone costs."""

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
class Evaluation(_Record):
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
class Fallback(_Record):
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
class TrainingScore(_Record):
    """A score on the tuning rows in the course of a training."""

    step: int
    """After how many steps it was taken; 0: before training, which is the score of PTQ."""
    score: float
    """The metric."""
    best: bool = False
    """Whether this is the state that was kept."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun(_Record):
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
class EngineFile(_Record):
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
class Stage(_Record):
    """One stage of the run."""

    name: str
    """Name of the stage."""
    seconds: float
    """How long it took, in seconds."""


@dataclass(frozen=True, kw_only=True)
class RunRecord(_Record):
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
