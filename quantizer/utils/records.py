"""Records: frozen data that the core and the engines produce and a report contains.

Each dataclass here is one object of ``report.json``, with those of ``report/record.py``. The text under a field
documents it in ``docs/report-format.md``.

The file also counts the multiply-adds of a layer from the shapes of its tensors, and makes the rows of the tables of
layers and groups. The time of a group is split among its sites by their multiply-adds; its error is shown in the row of
each site.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantizer.plan.reasons import ReasonCode, RuleKind, ran
from quantizer.utils.plain_values import yaml_values

LOW_PRECISIONS = ("int8", "fp8", "int4", "fp4")
"""Formats that a quantized model requests."""

LEAST_SHARE = 0.5
"""Least share of the requested low-precision work that an engine must run in low precision.

Libraries run single matrix multiplications in float for good reasons, such as a head with three outputs or fused
attention. Below one half, the engine did not accept the graph, and conversions make it slower than the float model.
"""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Layer of an engine, or node of a graph that no engine ran."""

    name: str
    """Its name in the engine."""
    type: str
    """The engine's name for this kind of layer."""
    role: str = ""
    """Its purpose: ``product`` (a matrix multiplication or convolution), ``attention`` (fused, with two matrix
    multiplications), ``softmax``, ``quantizer`` (only quantizes or dequantizes), ``cast``, ``reformat`` (changes the
    memory layout), ``move`` (moves values unchanged), ``addition``, ``normalization``; empty for others."""
    precision: str = "unknown"
    """The precision of its computation: ``int8``, ``fp8``, ``int4``, ``fp16``, ``bf16``, ``fp32``; ``index`` for
    integers and booleans that are no quantized values, such as indices, token numbers and shapes (``indices`` in
    tables); ``unknown`` if the engine does not report it."""
    writes: str = "unknown"
    """The type of its first output, in the same words."""
    nodes: tuple[str, ...] = ()
    """Names of the ONNX nodes that it was made of, if the engine reports them."""
    readers: tuple[str, ...] = ()
    """Names of the layers that read its outputs."""
    multiply_adds: int | None = None
    """Multiply-adds of one run; null for a layer without matrix multiplications, and if unknown."""
    time_us: float | None = None
    """Median time in one run, in microseconds; null if it was not measured."""


@dataclass(frozen=True, kw_only=True)
class PrecisionShare:
    """Share of one precision in the layers, matrix multiplications, multiply-adds and time of an engine."""

    precision: str
    """The precision, in the words of ``Layer.precision``."""
    layers: int
    """Number of layers."""
    products: int
    """Number of these layers that are matrix multiplications, convolutions or fused attention."""
    layer_share: float
    """Share of all layers, 0 to 1."""
    multiply_add_share: float | None = None
    """Share of the known multiply-adds, 0 to 1; null if none are known."""
    time_share: float | None = None
    """Share of the time of all layers, 0 to 1; null if it was not measured."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Precision of an engine's layers, as the engine reports it."""

    backend: str
    """The backend, such as ``openvino``; ``onnx`` if only a file was read."""
    verified: bool
    """Whether a running engine reported this. If not, it is only the request of the ONNX file."""
    note: str
    """How it was observed (shapes and runs), or why it was not."""
    shares: tuple[PrecisionShare, ...] = ()
    """Shares by precision, the largest in multiply-adds first."""
    attention_fused: int = 0
    """Number of attention matrix multiplications that run fused, in one layer each."""
    attention_apart: int = 0
    """Number of attentions that are not fused: a separate softmax between matrix multiplications."""
    quantizers: int = 0
    """Layers that only quantize or dequantize."""
    casts: int = 0
    """Layers that only convert to another type."""
    reformats: int = 0
    """Layers that only change the memory layout."""
    float_outputs: int = 0
    """Matrix multiplications in low precision that write float."""
    uncounted: int = 0
    """Matrix multiplications with unknown multiply-adds."""
    reasons: tuple[str, ...] = ()
    """Why matrix multiplications run in float or write float."""
    layers: tuple[Layer, ...] = ()
    """The layers in the order in which they run, without constants."""

    def low_share(self) -> float | None:
        """Return the low-precision share of multiply-adds, or of matrix multiplications if unknown."""
        products = sum(share.products for share in self.shares)
        if products == 0:
            return None
        low = [share for share in self.shares if share.precision in LOW_PRECISIONS]
        if self.uncounted or any(share.multiply_add_share is None for share in self.shares):
            return sum(share.products for share in low) / products
        return sum(share.multiply_add_share or 0.0 for share in low)


Shape = Sequence[int]


def matmul_work(left: Shape, output: Shape) -> int | None:
    """Return the multiply-adds of [.., M, K] times [.., K, N] from the shapes of the left operand and the output.

    Only the product of the left operand's last two sizes counts, so either operand may be transposed. None if the
    shapes do not fit.
    """
    if len(left) < 2 or len(output) < 2:
        return None
    rows, size = output[-2], left[-1] * left[-2]
    if rows == 0 or size % rows:
        return None
    return prod(output) * (size // rows)


def convolution_work(weight: Shape, channels: int, output: Shape) -> int | None:
    """Return the multiply-adds of a convolution with ``channels`` output channels, in any layout; None if unknown.

    For a transposed convolution, input and output are swapped: pass its input channels, and its input as ``output``.
    """
    if channels == 0 or prod(weight) % channels:
        return None
    return prod(output) * (prod(weight) // channels)


def attention_work(query: Shape, key: Shape, value: Shape, output: Shape) -> int | None:
    """Return the multiply-adds of a fused attention with output [.., S, D], in any layout; None if unknown."""
    if len(output) < 2 or min(output) == 0:
        return None
    heads, rows, width = prod(output[:-2]), output[-2], output[-1]
    if prod(value) % (heads * width) or prod(query) % (heads * rows):
        return None
    columns, depth = prod(value) // (heads * width), prod(query) // (heads * rows)
    if prod(key) != heads * columns * depth:
        return None
    return heads * rows * columns * (depth + width)


class Record:
    """Base of records. It turns lists into tuples, so that records compare by value."""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, item.name)
            if isinstance(value, list):
                object.__setattr__(self, item.name, tuple(value))


@dataclass(frozen=True, kw_only=True)
class Score(Record):
    """The score of one form of the model on the evaluation samples."""

    form: str
    """The form of the model: ``float`` (the reference), ``proxy`` (the quantized PyTorch model), ``engine`` (the built
    engine), or ``simulation`` (the proxy with non-quantized operations in half precision, if the engine could not run).
    A run with training has ``ptq`` (the proxy before training) and ``qat`` (the proxy after it) instead of
    ``proxy``."""
    value: float
    """Value of the metric."""
    metric: str
    """Name of the metric, such as ``spearman`` or ``accuracy``."""
    paired: Mapping[str, float | None] = field(default_factory=dict)
    """Comparisons with the float model on the same inputs, by name: ``label_flips`` (a share), ``mean_cosine``."""
    difference: float | None = None
    """This value minus the float value; null for float."""
    interval: tuple[float, float] | None = None
    """95% bootstrap interval [low, high] of the difference; null if not computed."""
    samples: int | None = None
    """Number of evaluation samples; null if unknown."""
    higher_is_better: bool = True
    """Whether a higher value is better."""


def quantized_score(scores: Sequence[Score]) -> Score | None:
    """Return the score of the form nearest to the engine, else the last score that is not float."""
    by_name = {entry.form: entry for entry in scores if entry.form != "float"}
    nearest = (by_name[which] for which in ("engine", "simulation", "qat", "proxy") if which in by_name)
    return next(nearest, next(reversed(by_name.values()), None))


_HIDDEN_REASONS = (
    ReasonCode.NOT_TENSORS,
    ReasonCode.ADD_BROADCASTS,
    ReasonCode.ADD_PARAMETER,
    ReasonCode.ADD_UNWEIGHTED,
    ReasonCode.ADD_ONE_PRODUCT,
)


_NOT_REWRITTEN = (ReasonCode.PASSED_ON, ReasonCode.IN_F_STRING)


def is_of_torch(file: str) -> bool:
    """Return whether a source file holds the layers and functions of ``torch.nn``."""
    parts = PurePath(file).parts
    return parts[-3:] == ("torch", "nn", "functional.py") or parts[-4:-1] == ("torch", "nn", "modules")


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
    """Whether its range is computed from its values at each run. Such an operand has neither ``amax`` nor ``scale``."""
    block_size: int | None = None
    """Number of neighbours along the input channels of a weight that share a scale; null without blocks."""
    zero_point: int | None = None
    """The quantized value of 0.0 in an asymmetric format; null in a symmetric one."""
    minimum: float | None = None
    """Lowest value in calibration; null if there was none."""
    maximum: float | None = None
    """Highest value in calibration; null if there was none."""
    amax: float | None = None
    """Largest absolute value that the format represents (over all channels); null if there is no range."""
    scale: float | None = None
    """Scale, the distance between two quantized values (the largest of all channels); null if there is no range."""
    channels: int = 1
    """Number of scales: 1 for per-tensor, otherwise one per output channel, block, or call in a forward pass."""
    sqnr_db: float | None = None
    """Signal to quantization noise of this operand in calibration, in dB; null if it was not measured."""
    clipped: float | None = None
    """Share of the values beyond the range in calibration, 0 to 1; null if it was not measured."""
    estimate: str | None = None
    """The calibrator that was chosen for the range; null if there was no choice."""
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
        """The parts with their own scale: ``tensor``, ``384 channels``, ``1,152 blocks``, ``3 calls``."""
        if self.channels == 1:
            return "tensor"
        parts = "calls" if self.role == "activation" else "channels" if self.block_size is None else "blocks"
        return f"{self.channels:,} {parts}"


@dataclass(frozen=True, kw_only=True)
class Range(Operand):
    """The range of one operand, named ``SITE.OPERAND``; with several scales, ``amax`` and ``scale`` are the largest."""

    smoothing: str | None
    """How SmoothQuant moved its outliers, or why it did not; None: SmoothQuant was off."""

    @property
    def site(self) -> str:
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
    """Why it is quantized or not."""
    rule: str | None = None
    """The rule of the configuration that decided, such as ``exclude.names: classifier``; null if none did."""
    multiply_adds: int | None = None
    """Multiply-adds of all its calls in calibration; null if they were not counted."""
    operands: tuple[Operand, ...] = ()
    """The operands that can be quantized."""

    @property
    def quiet(self) -> bool:
        """True for sites that tables omit: branches of torch that its modules do not take, additions that never
        qualify, and embeddings not worth quantizing."""
        if self.kind == "embedding" and not self.quantized:
            return self.rule in {RuleKind.SWITCH.text(key="embedding", value=value) for value in ("false", "auto")}
        code = ReasonCode.of(self.reason)
        if code is ReasonCode.OTHER_BRANCH:
            return True
        if self.kind != "residual_add" or self.quantized:
            return False
        # In calls that cannot be rewritten, torch adds sizes and offsets, not the branches of a model.
        return code in _HIDDEN_REASONS or (code in _NOT_REWRITTEN and is_of_torch(self.file))

    @property
    def ran(self) -> bool:
        """False if calibration never reached it, such as the branch for another ``padding_mode`` in ``nn.Conv2d``."""
        return ran(self.reason)

    @property
    def place(self) -> str:
        """Its source as ``file.py:350``; empty if there is none."""
        return f"{PurePath(self.file).name}:{self.line}" if self.file else ""


@dataclass(frozen=True, kw_only=True)
class UnquantizedProduct(Record):
    """Matrix multiplications or convolutions of one operation in one place that do not run in low precision."""

    path: str
    """Path of the innermost module that computed it; empty for the model itself."""
    site: str | None = None
    """Name of the site; null if it ran outside of any site."""
    operation: str
    """The operation as torch executed it, such as ``addmm``."""
    multiply_adds: int
    """Multiply-adds of all its calls in calibration."""
    share: float
    """Share of all multiply-adds, 0 to 1."""
    reason: str
    """The reason, from a fixed list, such as ``excluded by rule``."""
    detail: str = ""
    """The evidence: the calling function and line, the type of the operands, the rule, or the reason of the site; empty
    if the reason says it all."""


@dataclass(frozen=True, kw_only=True)
class RangeCandidate(Record):
    """A candidate for the range of an operand."""

    name: str
    """The estimate: ``max``, ``percentile 99.9``, ``mse``, ``entropy``, ``0.81 of max``; ``chosen`` for any other
    range."""
    amax: float
    """Largest absolute value in its range."""
    clipped: float
    """Share of the values beyond its range, 0 to 1."""
    sqnr_db: float
    """Signal to quantization noise of the operand with this range, in dB."""
    chosen: bool = False
    """Whether the operand has this range."""


@dataclass(frozen=True, kw_only=True)
class Histogram(Record):
    """The absolute values of an operand in calibration, with candidates for its range."""

    name: str
    """The operand, as ``SITE.OPERAND``."""
    dtype: str
    """The format that the candidates are compared for."""
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
    """The precision groups in it: itself, unless coarser groups were measured."""
    activations: int = 0
    """Number of activations among its operands."""
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
    """The latency of one group of sites."""

    group: str
    """Name of the group."""
    low_us: float
    """Microseconds in low precision, including the conversions that it causes."""
    float_us: float
    """Microseconds in float."""
    slower_reason: str | None = None
    """Why it is in float, if low precision makes it slower; null otherwise."""


@dataclass(frozen=True, kw_only=True)
class Evaluation(Record):
    """One score in a search for the groups that fall back to float."""

    groups: tuple[str, ...]
    """Names of the groups in float."""
    score: float
    """Value of the metric."""
    drop: float
    """How much worse the score is than that of the float model; negative if better."""
    cost: float
    """Sum of the costs of the groups, or their number without costs."""
    pareto_optimal: bool = False
    """Whether no other evaluation is better in both cost and drop."""
    chosen: bool = False
    """Whether the search chose these groups."""


@dataclass(frozen=True, kw_only=True)
class EngineCheck(Record):
    """The score of an engine that is checked against the accuracy budget, on samples that the search did not see."""

    groups: int
    """Number of groups in float."""
    drop: float
    """How much worse the engine's score is than that of the float model; negative if better."""
    samples: int | None
    """Number of samples; null: the user's function scored it."""


@dataclass(frozen=True, kw_only=True)
class BudgetOutcome(Record):
    """The outcome of an accuracy budget; a drop is how much worse a score is than that of the float model."""

    max_drop: float
    """The allowed drop."""
    tuning_drop: float
    """Drop of the chosen plan on the tuning samples, which the search used."""
    form: str | None = None
    """The form of the model that was scored on the evaluation samples, the nearest to the engine; null: none."""
    evaluation_drop: float | None = None
    """Its drop on the evaluation samples, which no choice depended on; null if not scored."""
    interval: tuple[float, float] | None = None
    """95% bootstrap interval [low, high] of ``evaluation_drop``; null if not computed."""
    verdict: str
    """``met`` or ``not met``, by the evaluation samples, else by the samples of the engine check, else by the tuning
    samples; with ``, within noise`` if the interval includes ``max_drop``."""

    @property
    def is_missed(self) -> bool:
        return self.verdict.startswith("not met")

    @property
    def is_within_noise(self) -> bool:
        """True if other samples may change the verdict."""
        return self.verdict.endswith("within noise")


@dataclass(frozen=True, kw_only=True)
class FallbackRecord(Record):
    """The groups that fell back to float."""

    groups: tuple[str, ...]
    """Names of the groups."""
    reason: str
    """Why these groups: the arguments of the choice, such as ``num=4``, and the result of a search."""
    evaluations: tuple[Evaluation, ...] = ()
    """The scores that the search measured, in order; empty without a search."""
    float_score: float | None = None
    """The float model's score in that search; null without a search."""
    max_drop: float | None = None
    """How much worse than the float score the score may be; null without a search."""
    checks: tuple[EngineCheck, ...] = ()
    """The engines that were checked against ``max_drop``; the last one was delivered. Empty if none was checked."""
    outcome: BudgetOutcome | None = None
    """Whether the final result meets ``max_drop``; null without a search."""


@dataclass(frozen=True, kw_only=True)
class Fix(Record):
    """A setting that was tried, with its measured gain."""

    setting: str
    """The setting, as YAML of the ``quantizer`` section."""
    gain_db: float
    """Increase of the SQNR of the model's output in dB with this setting and all groups quantized."""
    gain_alone_db: float
    """Increase of the SQNR of the model's output in dB with this setting and only this group quantized; infinite if the
    setting keeps the group in float."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sections = yaml_values(self.setting.encode())
        if not isinstance(sections, dict) or len(sections) != 1:
            raise ValueError(f"the setting of a fix is {self.setting!r}; expected one section of YAML")


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Record):
    """The accuracy cost of one group, and its cause."""

    group: str
    """Name of the group."""
    sqnr_db: float
    """SQNR of the model's output in dB with only this group quantized, measured on calibration batches."""
    findings: tuple[str, ...] = ()
    """What is unusual about its inputs; empty: nothing."""
    fix: Fix | None = None
    """The setting with the largest gain; null if nothing is unusual, or no tried setting improves the output."""
    notes: tuple[str, ...] = ()
    """Why SmoothQuant cannot move outliers of its inputs into its weights; empty if it can."""


FLOAT = "float"

_DEFAULT_METHODS = (".forward", "._conv_forward")
"""Methods that a row omits after the path of their module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRow:
    """One layer: a site that ran, or matrix multiplications outside of any site.

    Attributes:
        layer: the path of its module, and the function in it if that is not ``forward``; empty for the model itself.
        operation: its operation, numbered if the layer has several of one kind.
        activations: the formats of its activations, such as ``uint8`` or ``float``.
        weights: the format of its weight; None without a weight.
        amax: the largest absolute value in the range of its activations; None without a range.
        sqnr_db: the lowest SQNR among its operands, in dB; None if not measured.
        error: the error of quantizing its group alone, by the measure of the sensitivity; None if not measured.
        share: its share of all multiply-adds, 0 to 1; None if none were counted.
        low_us: its time in low precision in microseconds; None if no engine was timed.
        float_us: its time in float in microseconds; None if no engine was timed.
    """

    layer: str
    operation: str
    activations: str
    weights: str | None = None
    amax: float | None = None
    sqnr_db: float | None = None
    error: float | None = None
    share: float | None = None
    low_us: float | None = None
    float_us: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRow:
    """The gain and the cost of keeping one group in float.

    Attributes:
        group: its name.
        error: the error of quantizing only this group, which float avoids; None: not measured.
        sqnr_alone_db: the SQNR of the model's output in dB with only this group quantized; None: not measured.
        low_us: its time in low precision in microseconds; None: no engine was benchmarked.
        float_us: its time in float in microseconds; None: no engine was benchmarked.
        in_float: whether it is in float already.
    """

    group: str
    error: float | None
    sqnr_alone_db: float | None
    low_us: float | None
    float_us: float | None
    in_float: bool

    @property
    def cost_us(self) -> float | None:
        """The additional microseconds in float; negative if float is faster."""
        return None if self.low_us is None or self.float_us is None else self.float_us - self.low_us


def layer_rows(
    sites: Iterable[Site],
    products: Sequence[UnquantizedProduct] = (),
    sensitivity: Sequence[GroupSensitivity] = (),
    times: Sequence[GroupTime] = (),
) -> tuple[LayerRow, ...]:
    """Return a row for each site that ran, in the model's order, and for matrix multiplications outside of sites."""
    ran = [site for site in sites if site.ran and not site.quiet and site.kind != "source"]
    outside = [product for product in products if product.site is None]
    total = sum(site.multiply_adds or 0 for site in ran) + sum(product.multiply_adds for product in outside)
    errors = {part: row.error for row in sensitivity for part in (row.parts or (row.group,))}
    low, plain = ({entry.group: getattr(entry, name) for entry in times} for name in ("low_us", "float_us"))
    work = _work(ran)
    names = _names(ran)
    rows = [
        LayerRow(
            layer=layer,
            operation=operation,
            activations=_formats(site, "activation") or FLOAT,
            weights=_formats(site, "weight"),
            amax=max((o.amax for o in site.operands if o.role == "activation" and o.amax is not None), default=None),
            sqnr_db=min((o.sqnr_db for o in site.operands if o.sqnr_db is not None), default=None),
            error=max((errors[group] for group in work[site.name] if group in errors), default=None),
            share=(site.multiply_adds or 0) / total if total else None,
            low_us=_time(work[site.name], low),
            float_us=_time(work[site.name], plain),
        )
        for site, (layer, operation) in zip(ran, names, strict=True)
    ]
    rows += [
        LayerRow(
            layer=product.path,
            operation=product.operation,
            activations=FLOAT,
            share=product.multiply_adds / total if total else None,
        )
        for product in outside
    ]
    return tuple(rows)


def group_rows(
    sites: Iterable[Site],
    sensitivity: Sequence[GroupSensitivity] = (),
    times: Sequence[GroupTime] = (),
    diagnoses: Sequence[Diagnosis] = (),
) -> tuple[GroupRow, ...]:
    """Return a row for each group with an error or a time, sorted by error and then by latency cost.

    Args:
        sites: all sites, with their operands.
        sensitivity: the ranking; empty if nothing was measured.
        times: the times of the groups; empty if no engine was timed.
        diagnoses: the groups whose SQNR alone was measured.
    """
    quantized = {o.group for site in sites for o in site.operands if o.quantized}
    errors = {row.group: row.error for row in sensitivity}
    parts = {row.group: row.parts or (row.group,) for row in sensitivity}
    ranked = {part for members in parts.values() for part in members}
    parts.update({entry.group: (entry.group,) for entry in times if entry.group not in ranked})
    alone = {cause.group: cause.sqnr_db for cause in diagnoses}
    timed = {entry.group: entry for entry in times}
    rows = []
    for group, members in parts.items():
        known = [timed[part] for part in members if part in timed]
        rows.append(
            GroupRow(
                group=group,
                error=errors.get(group),
                sqnr_alone_db=alone.get(group),
                low_us=sum(entry.low_us for entry in known) if known else None,
                float_us=sum(entry.float_us for entry in known) if known else None,
                in_float=not quantized & set(members),
            )
        )
    return tuple(sorted(rows, key=lambda row: (row.error is None, -(row.error or 0), row.cost_us or 0)))


def _work(sites: Sequence[Site]) -> dict[str, dict[str, float]]:
    """Return the share of each site in the work of each of its groups."""
    amounts: dict[str, dict[str, int]] = defaultdict(dict)
    for site in sites:
        for group in {operand.group for operand in site.operands if operand.group is not None}:
            # A residual add has no multiply-adds, but takes time.
            amounts[group][site.name] = max(site.multiply_adds or 0, 1)
    work: dict[str, dict[str, float]] = defaultdict(dict)
    for group, members in amounts.items():
        for name, amount in members.items():
            work[name][group] = amount / sum(members.values())
    return work


def _time(shares: Mapping[str, float], times: Mapping[str, float]) -> float | None:
    known = [share * times[group] for group, share in shares.items() if group in times]
    return sum(known) if known else None


def _names(sites: Sequence[Site]) -> list[tuple[str, str]]:
    split = [_split(site.name) for site in sites]
    counts = Counter((layer, operation.rpartition("_")[0]) for layer, operation in split)
    return [
        (layer, operation if counts[layer, kind] > 1 else kind)
        for layer, operation, kind in ((layer, operation, operation.rpartition("_")[0]) for layer, operation in split)
    ]


def _split(name: str) -> tuple[str, str]:
    path, _, operation = f".{name}".rpartition(".")
    for function in _DEFAULT_METHODS:
        path = path.removesuffix(function)
    return path.removeprefix("."), operation


def _formats(site: Site, role: str) -> str | None:
    formats = [
        replace(operand, zero_point=None).format if operand.quantized else FLOAT
        for operand in site.operands
        if operand.role == role
    ]
    return ", ".join(dict.fromkeys(formats)) or None


def paired_interval(first: NDArray[Any], second: NDArray[Any]) -> tuple[float, float]:
    """Return the 95% interval of ``second - first``, scores of two models on the same resamples [R]."""
    low, high = np.quantile(second - first, [0.025, 0.975])
    return float(low), float(high)
