"""Records of a run's parts: sites, outputs, candidates, placements, budgets, causes, training.

The records of a quantization-aware training.

The records of causes and cures: the groups that cost most, and the setting that mends each.

The records of a choice between engines: what was tried, how fast each was, and why the others were not taken.

The record of how far the outputs of the quantized model are from those of the float model.

The records of a placement by measured time: what each group takes, and the plans between fast and accurate.

The records of a budget of accuracy: the engines that were held to it, and what came of it in the end.

The records of sites: the decision for each, its operands, their histograms, and the products in float.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from quantizer.common.plain_values import yaml_values
from quantizer.reasons import ReasonCode, RuleKind
from quantizer.report.record_base import Record


@dataclass(frozen=True, kw_only=True)
class TrainingScore(Record):
    """A score on the tuning rows before or during training."""

    step: int
    """The number of steps before this score; 0 is the score of PTQ."""
    score: float
    """The metric."""
    best: bool = False
    """Whether the model of this score was kept."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun(Record):
    """The quantization-aware training."""

    metric: str
    """Name of the metric."""
    higher_is_better: bool
    """Whether a higher value is better."""
    planned: int
    """The number of steps that were planned."""
    losses: tuple[float, ...]
    """The loss of each step: the distance of the outputs of its batch from those of the float model."""
    learning_rates: tuple[float, ...]
    """The learning rate of each step."""
    scores: tuple[TrainingScore, ...]
    """The scores on the tuning rows, in order."""
    float_score: float
    """The float model's score on the tuning rows."""
    stopped: str | None = None
    """Why training ended before the planned steps; null if it did not."""


@dataclass(frozen=True, kw_only=True)
class Cure(Record):
    """A setting that was tried."""

    setting: str
    """The setting, as YAML of the ``quantizer`` section."""
    gain_db: float
    """By how many dB the SQNR of the model's output rises with it, measured with all groups quantized."""
    alone_db: float
    """By how many dB the SQNR of the model's output rises with it if this group alone is quantized; infinite if it
    leaves the group in float."""

    def __post_init__(self) -> None:
        super().__post_init__()
        told = yaml_values(self.setting.encode())
        if not isinstance(told, dict) or len(told) != 1:
            raise ValueError(f"the setting of a cure is {self.setting!r}, expected one section of YAML")


@dataclass(frozen=True, kw_only=True)
class Cause(Record):
    """The cost of one group, and its cause."""

    group: str
    """Name of the group."""
    sqnr_db: float
    """The SQNR of the model's output in dB with this group alone quantized, measured on calibration batches."""
    findings: tuple[str, ...] = ()
    """What is wrong with its inputs; empty if nothing stands out."""
    cure: Cure | None = None
    """The setting that gains most; null if nothing stands out, or if no setting that was tried gains."""
    notes: tuple[str, ...] = ()
    """Why outliers of its inputs cannot move into its weights; empty if they can."""


_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Candidate(Record):
    """An engine that was tried."""

    backend: str
    """Its backend, such as ``openvino``."""
    format: str
    """What its products are in: ``int8``, ``int8+bfloat16`` where all else is in bfloat16, ``int8 dynamic`` with ranges
    that are taken at run time; ``float32`` or ``bfloat16`` for an engine of the float model."""
    milliseconds: tuple[float, ...] = ()
    """Median latency at each shape of the choice, all candidates in turns; empty if it failed, and without the last
    shapes if it was too slow at those before."""
    score_difference: float | None = None
    """Its score less that of the float model, on the rows with labels; null where there are none."""
    sqnr_db: float | None = None
    """The least SQNR of its outputs in dB against the float model's in PyTorch at the shapes of the choice; null if
    they are equal or it failed."""
    verdict: str = ""
    """Why it was chosen, or why not."""

    @property
    def name(self) -> str:
        """Backend and format."""
        return f"{self.backend} {self.format}"

    @property
    def is_float(self) -> bool:
        """True for an engine of the float model."""
        return self.format in _FLOATS

    def times_of(self, other: Candidate) -> float:
        """Return how many times as long as another one it takes: the geometric mean over the shapes that both have."""
        pairs = list(zip(self.milliseconds, other.milliseconds, strict=False))
        return math.exp(sum(math.log(mine / its) for mine, its in pairs) / len(pairs))


@dataclass(frozen=True, kw_only=True)
class EngineChoice(Record):
    """A choice of the fastest engine that computes what it should."""

    headline: str
    """What was chosen, and the fastest engine in float, or why nothing in low precision is faster."""
    instructions: str | None
    """The CPU's instruction sets for which the choice holds; null if the system does not tell."""
    shapes: tuple[str, ...]
    """The shapes at which all were timed."""
    candidates: tuple[Candidate, ...]
    """All that were tried, the chosen one first, then by time; those that failed at the end."""
    deploy: str = ""
    """The file of a run's folder that is the fastest in the end, and its speed beside the other one's; empty if it was
    not compared."""
    missing: tuple[str, ...] = ()
    """Candidates whose library is not installed, and what installs it."""


ALIKE_DB = 30.0
"""SQNR of an engine's output to its proxy's that is always enough for a quantized model."""

FURTHER_DB = 3.0
"""Sums in another order move a few values to the neighbouring step, and these move others in later layers. A correct
engine's error is then another sample of the quantization error: as large as the proxy's, but different. So an engine
is right, too, if the power of its error against the float model is at most twice that of the proxy."""


@dataclass(frozen=True, kw_only=True)
class OutputDistance(Record):
    """The distance of one output to that of the float model, on one batch."""

    output: str
    """Name of the output."""
    batch: int
    """Rows of the batch."""
    sequence: int | None = None
    """Tokens in a row of it; null: rows are no texts."""
    sqnr_db: float | None = None
    """SQNR in dB of the engine's output, or of the proxy's if the engine did not run; null: there is no difference."""
    cosine: float
    """Mean cosine of its vectors to the float model's."""
    proxy_sqnr_db: float | None = None
    """SQNR in dB of the proxy's output; null: there is no difference."""
    engine_to_proxy_db: float | None = None
    """SQNR in dB of the engine's output to the proxy's; null: there is no difference, or the engine did not run."""
    noise_sqnr_db: float | None = None
    """Least SQNR in dB of the proxy's output with the noise of float sums; null: it was not needed, or not taken."""
    engine: bool
    """Whether the engine ran."""

    @property
    def is_alike(self) -> bool:
        """True for an engine that computes what its proxy does, with sums in an order of its own, or did not run."""
        if self.engine_to_proxy_db is None or self.engine_to_proxy_db >= ALIKE_DB or self.sqnr_db is None:
            return True
        return is_no_further(self.sqnr_db, (self.proxy_sqnr_db, self.noise_sqnr_db), FURTHER_DB)


def is_no_further(engine: float | None, pytorch: Sequence[float | None], decibels: float) -> bool:
    """Return whether an engine is at most so much further from the float model than PyTorch at its worst.

    Args:
        engine: the SQNR in dB of the engine's output; None: there is no difference.
        pytorch: those of PyTorch's, likewise.
        decibels: how much further.
    """
    known = [one for one in pytorch if one is not None]
    return engine is None or (bool(known) and engine >= min(known) - decibels)


def worst_output(outputs: Sequence[OutputDistance]) -> OutputDistance | None:
    """Return the output with the lowest SQNR; None: there is none."""
    return min(outputs, key=lambda one: math.inf if one.sqnr_db is None else one.sqnr_db, default=None)


@dataclass(frozen=True, kw_only=True)
class GroupTime(Record):
    """The time of one group of sites."""

    group: str
    """Its name."""
    low_us: float
    """Microseconds in low precision, with the conversions that it causes."""
    float_us: float
    """Microseconds in float."""
    slower: str | None = None
    """Why it is float, if low precision makes it slower; null if it does not."""


@dataclass(frozen=True, kw_only=True)
class PlacementPoint(Record):
    """A plan between everything in low precision and everything in float."""

    back: int
    """How many groups are float in it."""
    milliseconds: float
    """Its predicted latency."""
    error: float
    """The sum of the errors of the groups that stay quantized, by the measure of the sensitivity."""


@dataclass(frozen=True, kw_only=True)
class SpeedCheck(Record):
    """An engine that was timed against ``fallback.min_speedup``."""

    predicted: float
    """How many times as fast as in float the plan was predicted to be at least."""
    groups: int
    """How many groups were float for the accuracy."""
    speedup: float
    """How many times as fast as in float it was."""


@dataclass(frozen=True, kw_only=True)
class Placement(Record):
    """The times of all groups of a plan, and the plan that was taken."""

    where: str
    """The backend, the shape and the threads of the times."""
    low_ms: float
    """Milliseconds of the engine with all groups in low precision."""
    float_ms: float
    """Milliseconds of the engine of the float model."""
    predicted_ms: float
    """Predicted milliseconds of the plan that was taken."""
    back: int
    """How many groups are float in it."""
    groups: tuple[GroupTime, ...]
    """The groups, the largest gain in low precision first."""
    frontier: tuple[PlacementPoint, ...] = ()
    """The plans that put one group more back at a time, the highest error per microsecond first; empty without
    sensitivity."""
    min_speedup: float | None = None
    """How many times as fast as in float the engine had to be; null if that was not asked for."""
    checks: tuple[SpeedCheck, ...] = ()
    """The engines that were timed against it, the last of them delivered."""

    @property
    def speedup(self) -> float | None:
        """Speed of the delivered engine, in that of the float one; None: none was asked for, or it was not timed."""
        return self.checks[-1].speedup if self.min_speedup is not None and self.checks else None


@dataclass(frozen=True, kw_only=True)
class EngineCheck(Record):
    """The score of an engine that is held to a budget, on rows that the search for its fallback did not see."""

    allowed: float
    """How much worse than the float score the search let the score of the quantized model be."""
    groups: int
    """How many groups had fallen back to float."""
    drop: float
    """How much worse the engine's score is than the float model's; negative if it is better."""
    rows: int | None
    """The number of rows; null: a function of the user's own scored it, as it scored the search."""


@dataclass(frozen=True, kw_only=True)
class BudgetOutcome(Record):
    """Outcome of a budget of accuracy; a drop is how much worse a score is than the float model's."""

    asked: float
    """The drop that was allowed."""
    tuning: float
    """The drop of the chosen plan on the tuning rows that the search saw."""
    which: str | None = None
    """The form of the model that was scored on the evaluation rows, the nearest to the engine; null: none was."""
    evaluation: float | None = None
    """Its drop on the evaluation rows, which nothing was chosen by; null if it was not scored."""
    interval: tuple[float, float] | None = None
    """95% bootstrap interval [low, high] of that drop; null if it was not computed."""
    verdict: str
    """``met`` or ``not met``, by the evaluation, else by the engine's rows, else by the tuning rows; with ``, within
    noise`` where the interval has the budget in it, so that other rows may say otherwise."""

    @property
    def is_missed(self) -> bool:
        """True if the budget is not met."""
        return self.verdict.startswith("not met")

    @property
    def is_within_noise(self) -> bool:
        """True if other rows may say otherwise."""
        return self.verdict.endswith("within noise")


# Additions of integers, tuples or broadcasts are sites like all others, but of no interest to a reader.
_QUIET = (
    ReasonCode.NOT_TENSORS,
    ReasonCode.ADD_BROADCASTS,
    ReasonCode.ADD_PARAMETER,
    ReasonCode.ADD_UNWEIGHTED,
    ReasonCode.ADD_ONE_PRODUCT,
)
_FUNCTIONAL = ("torch", "nn", "functional.py")


@dataclass(frozen=True, kw_only=True)
class Operand(Record):
    """One operand of a site."""

    name: str
    """Name of the operand quantizer."""
    role: str
    """``activation`` or ``weight``."""
    quantized: bool
    """Whether this operand is in low precision."""
    dtype: str = "int8"
    """Its number format if it is quantized: ``int8``, ``uint8``, ``fp8``, ``int4``."""
    dynamic: bool = False
    """Whether its range is that of its values at each run, so that it has neither ``amax`` nor ``scale``."""
    block_size: int | None = None
    """How many neighbours along the input channels of a weight share a scale; null without blocks."""
    zero_point: int | None = None
    """The code of 0.0 in an asymmetric format; null in a symmetric one."""
    minimum: float | None = None
    """Lowest value in calibration; null if there was none."""
    maximum: float | None = None
    """Highest value in calibration; null if there was none."""
    amax: float | None = None
    """Largest absolute value that the format represents (over all channels); null if there is no range."""
    scale: float | None = None
    """Scale, the value of one step of the format (the largest of all channels); null if there is no range."""
    channels: int = 1
    """Number of scales: 1 is per tensor, more are one for each output channel, block, or call of a pass."""
    sqnr_db: float | None = None
    """Signal to quantization noise of this operand in calibration, in dB; null if it was not measured."""
    clipped: float | None = None
    """Share of the values beyond the range in calibration, 0 to 1; null if it was not measured."""
    estimate: str | None = None
    """The calibrator that was chosen for the range among several; null if there was no choice."""
    group: str | None = None
    """The precision group, whose operands fall back to float together; null if there is none."""


@dataclass(frozen=True, kw_only=True)
class Site(Record):
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
    """The rule of the configuration that decided, such as ``exclude.names: classifier``; null if none did."""
    multiply_adds: int | None = None
    """Multiply-adds of all its calls in calibration; null if they were not counted."""
    operands: tuple[Operand, ...] = ()
    """The operands that can be quantized."""

    @property
    def quiet(self) -> bool:
        """True for an addition that is no candidate, and for an embedding that is not worth it: tables omit both."""
        if self.kind == "embedding" and not self.quantized:
            return self.rule in {RuleKind.SWITCH.text(key="embedding", value=value) for value in ("false", "auto")}
        if self.kind != "residual_add" or self.quantized:
            return False
        code = ReasonCode.of(self.reason)
        # torch.nn.functional adds sizes and offsets; the branches of a model are not joined there.
        return code in _QUIET or (code is ReasonCode.PASSED_ON and PurePath(self.file).parts[-3:] == _FUNCTIONAL)

    @property
    def ran(self) -> bool:
        """False if calibration never reached it, as the branch for another ``padding_mode`` in ``nn.Conv2d``."""
        return ReasonCode.of(self.reason) is not ReasonCode.NEVER_RAN

    @property
    def place(self) -> str:
        """Its source as ``file.py:350``; empty if there is none."""
        return f"{PurePath(self.file).name}:{self.line}" if self.file else ""


@dataclass(frozen=True, kw_only=True)
class RangeCandidate(Record):
    """A candidate for the range of an operand."""

    name: str
    """The estimate: ``max``, ``percentile 99.9``, ``mse``, ``entropy``, ``0.81 of max``; ``chosen`` for any other
    range."""
    amax: float
    """Largest absolute value that it represents."""
    clipped: float
    """Share of the values beyond it, 0 to 1."""
    sqnr_db: float
    """Signal to quantization noise of the operand with this range, in dB."""
    chosen: bool = False
    """Whether this is the range that the operand has."""


@dataclass(frozen=True, kw_only=True)
class Histogram(Record):
    """The absolute values of an operand in calibration, with candidates for its range."""

    name: str
    """The operand, as ``SITE.OPERAND``."""
    dtype: str
    """The format for which the candidates are judged."""
    minimum: float
    """Lowest value in calibration."""
    maximum: float
    """Highest value in calibration."""
    width: float
    """Width of a bin."""
    counts: tuple[int, ...]
    """Number of values in each bin: bin i holds absolute values from i times the width up to the next bin."""
    candidates: tuple[RangeCandidate, ...]
    """The candidate ranges, the largest first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.counts, default=-1) < 0 or max(self.counts) == 0:
            raise ValueError(f"histogram of {self.name}: expected counts of 0 or more, and not all of them 0")


@dataclass(frozen=True, kw_only=True)
class UnquantizedProduct(Record):
    """Matrix products or convolutions of one operation in one place that do not run in low precision."""

    path: str
    """Path of the innermost module that computed the product; empty for the model itself."""
    site: str | None = None
    """Name of the site; null if the product ran outside of any site."""
    operation: str
    """The operation as torch executed it, such as ``addmm``."""
    multiply_adds: int
    """Multiply-adds of all its calls in calibration."""
    share: float
    """Share of all multiply-adds, 0 to 1."""
    reason: str
    """Why; one of a closed list, such as ``excluded by rule``."""
    detail: str = ""
    """The evidence: the calling function and line, the type of the operands, or the reason of the site."""
