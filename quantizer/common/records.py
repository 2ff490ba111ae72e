"""Records that the core makes and the report shows: sites, ranges, rankings, searches, causes, scores.

Every dataclass here is one object of ``report.json``, with those of ``report/record.py``; the text under a field
documents it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import PurePath

from quantizer.common.plain_values import yaml_values
from quantizer.reasons import ReasonCode, RuleKind


class Record:
    """The base of a record: lists among the arguments become tuples, so that records compare by value."""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, item.name)
            if isinstance(value, list):
                object.__setattr__(self, item.name, tuple(value))


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


def quantized_score(scores: Sequence[Score]) -> Score | None:
    """Return the score of the headline: that of the form nearest to the engine, else the last that is not float."""
    by_name = {entry.which: entry for entry in scores if entry.which != "float"}
    nearest = (by_name[which] for which in ("engine", "simulation", "qat", "proxy") if which in by_name)
    return next(nearest, next(reversed(by_name.values()), None))


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

    @property
    def format(self) -> str:
        """Its format with block size and zero point: ``int8``, ``int4 /128``, ``uint8 zp 113``, ``uint8 dynamic``."""
        blocks = "" if self.block_size is None else f" /{self.block_size}"
        point = "" if self.zero_point is None else f" zp {self.zero_point}"
        return f"{self.dtype}{blocks}{point}{' dynamic' if self.dynamic else ''}"

    @property
    def granularity(self) -> str:
        """The parts with a scale each: ``tensor``, ``384 channels``, ``1,152 blocks``, ``3 calls``."""
        if self.channels == 1:
            return "tensor"
        parts = "calls" if self.role == "activation" else "channels" if self.block_size is None else "blocks"
        return f"{self.channels:,} {parts}"


@dataclass(frozen=True, kw_only=True)
class Range(Operand):
    """The range of one operand, named ``SITE.OPERAND``; of several scales ``amax`` and ``scale`` are the largest."""

    smoothing: str | None
    """A text on the migration of its outliers, or on why there is none; None: it was not asked for."""

    @property
    def site(self) -> str:
        """Name of the site."""
        return self.name.rpartition(".")[0]


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
class GroupSensitivity(Record):
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
class EngineCheck(Record):
    """The score of an engine that is held to a budget, on rows that the search for its fallback did not see."""

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


@dataclass(frozen=True, kw_only=True)
class FallbackRecord(Record):
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
