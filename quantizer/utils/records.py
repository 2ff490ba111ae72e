"""Frozen data that the core and the engines find and a report holds, and a row for each layer.

Multiply-adds of one layer from the shapes of its tensors; None if the shapes do not determine them.

Every dataclass here is one object of ``report.json``, with those of ``report/record.py``; the text under a field
documents it.

A time and an error belong to a group. The time is split among the sites of the group by their multiply-adds; the error
is that of the whole group, in the line of each of its sites.
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

from quantizer.plan.reasons import ReasonCode, RuleKind
from quantizer.utils.plain_values import yaml_values

LOW_PRECISIONS = ("int8", "fp8", "int4", "fp4")
"""What is asked for when a model is quantized."""

LEAST_SHARE = 0.5
"""The least part of the work that a graph asks for in low precision that an engine has to do in it.

Libraries leave single products in floats, with good reason: a head of three rows, an attention that is fused in floats.
Below one half it is the graph that they did not take: the other half is then slower than the float model, for what it
quantizes and dequantizes around it.
"""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Layer of an engine, or node of a graph that was not run by an engine."""

    name: str
    """Its name in the engine."""
    type: str
    """What the engine calls this kind of layer."""
    role: str = ""
    """What it is for: ``product`` (of matrices, or a convolution), ``attention`` (fused, so two products),
    ``softmax``, ``quantizer`` (quantizes or dequantizes, nothing else), ``cast``, ``reformat`` (of the memory's
    layout), ``move`` (of values that stay as they are), ``addition``, ``normalization``; empty for any other."""
    precision: str = "unknown"
    """What it computes in: ``int8``, ``fp8``, ``int4``, ``fp16``, ``bf16``, ``fp32``; ``index`` for whole numbers and
    truth values that are no data, ``unknown`` where the engine does not tell."""
    writes: str = "unknown"
    """The type of its first output, in the same words."""
    nodes: tuple[str, ...] = ()
    """Names of the ONNX nodes that it was made of, as far as the engine tells."""
    readers: tuple[str, ...] = ()
    """Names of the layers that read its outputs."""
    multiply_adds: int | None = None
    """Multiply-adds of one run; null for a layer without products, and where they cannot be told."""
    time_us: float | None = None
    """Median time in one run, in microseconds; null where it was not measured."""


@dataclass(frozen=True, kw_only=True)
class PrecisionShare:
    """Share of one precision in the layers, products, multiply-adds and time of an engine."""

    precision: str
    """The precision, in the words of ``Layer.precision``."""
    layers: int
    """Number of layers."""
    products: int
    """Number of those that are products or fused attention."""
    layer_share: float
    """Share of all layers, 0 to 1."""
    multiply_add_share: float | None = None
    """Share of the multiply-adds that could be told, 0 to 1; null where none could."""
    time_share: float | None = None
    """Share of the time of all layers, 0 to 1; null where it was not measured."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Precision of an engine's layers, as the engine itself reports it."""

    backend: str
    """The backend that was asked, such as ``openvino``; ``onnx`` where only a file was read."""
    verified: bool
    """Whether this was observed in a running engine. If not, it is what the ONNX file asks for, and no fact."""
    note: str
    """How it was observed: shapes and runs; or why it was not."""
    shares: tuple[PrecisionShare, ...] = ()
    """Shares by precision, the largest in multiply-adds first."""
    attention_fused: int = 0
    """Number of attention products that run fused, in one layer each."""
    attention_apart: int = 0
    """Number of attentions that are taken apart: a softmax of its own between products."""
    quantizers: int = 0
    """Layers that do nothing but quantize or dequantize."""
    casts: int = 0
    """Layers that do nothing but convert to another type."""
    reformats: int = 0
    """Layers that do nothing but change the layout in memory."""
    float_outputs: int = 0
    """Products in low precision that write floats."""
    uncounted: int = 0
    """Products whose multiply-adds could not be told."""
    reasons: tuple[str, ...] = ()
    """Why products run in floats, or write them, in words."""
    layers: tuple[Layer, ...] = ()
    """The layers in the order in which they run, constants left out."""

    def low_share(self) -> float | None:
        """Return the share of multiply-adds in low precision, else of products; None if there is no product."""
        products = sum(share.products for share in self.shares)
        if products == 0:
            return None
        low = [share for share in self.shares if share.precision in LOW_PRECISIONS]
        if self.uncounted or any(share.multiply_add_share is None for share in self.shares):
            return sum(share.products for share in low) / products
        return sum(share.multiply_add_share or 0.0 for share in low)


Shape = Sequence[int]


def matmul_work(left: Shape, output: Shape) -> int | None:
    """Return the multiply-adds of [.., M, K] times [.., K, N], either transposed, from the left operand and the output.

    Only the product of the left operand's last two sizes counts, so its orientation does not matter.
    """
    if len(left) < 2 or len(output) < 2:
        return None
    rows, size = output[-2], left[-1] * left[-2]
    if rows == 0 or size % rows:
        return None
    return prod(output) * (size // rows)


def convolution_work(weight: Shape, channels: int, output: Shape) -> int | None:
    """Return the multiply-adds of a convolution whose ``weight`` makes ``channels`` channels, in any layout.

    A transposed convolution swaps input and output: pass its input's channels, and its input as ``output``.
    """
    if channels == 0 or prod(weight) % channels:
        return None
    return prod(output) * (prod(weight) // channels)


def attention_work(query: Shape, key: Shape, value: Shape, output: Shape) -> int | None:
    """Return the multiply-adds of both products of a fused attention with output [.., S, D], in any orientation."""
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
    samples: int | None = None
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
    samples: int | None
    """The number of samples; null: a function of the user's own scored it, as it scored the search."""


@dataclass(frozen=True, kw_only=True)
class BudgetOutcome(Record):
    """Outcome of a budget of accuracy; a drop is how much worse a score is than the float model's."""

    asked: float
    """The drop that was allowed."""
    tuning: float
    """The drop of the chosen plan on the tuning samples that the search saw."""
    which: str | None = None
    """The form of the model that was scored on the evaluation samples, the nearest to the engine; null: none was."""
    evaluation: float | None = None
    """Its drop on the evaluation samples, which nothing was chosen by; null if it was not scored."""
    interval: tuple[float, float] | None = None
    """95% bootstrap interval [low, high] of that drop; null if it was not computed."""
    verdict: str
    """``met`` or ``not met``, by the evaluation, else by the engine's rows, else by the tuning samples; with ``, within
    noise`` where the interval has the budget in it, so that other samples may say otherwise."""

    @property
    def is_missed(self) -> bool:
        """True if the budget is not met."""
        return self.verdict.startswith("not met")

    @property
    def is_within_noise(self) -> bool:
        """True if other samples may say otherwise."""
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
class Fix(Record):
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
            raise ValueError(f"the setting of a fix is {self.setting!r}, expected one section of YAML")


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Record):
    """The cost of one group, and its cause."""

    group: str
    """Name of the group."""
    sqnr_db: float
    """The SQNR of the model's output in dB with this group alone quantized, measured on calibration batches."""
    findings: tuple[str, ...] = ()
    """What is wrong with its inputs; empty if nothing stands out."""
    fix: Fix | None = None
    """The setting that gains most; null if nothing stands out, or if no setting that was tried gains."""
    notes: tuple[str, ...] = ()
    """Why outliers of its inputs cannot move into its weights; empty if they can."""


FLOAT = "float"

_ORDINARY = (".forward", "._conv_forward")
"""Functions that say nothing more than the path of their module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRow:
    """One layer: a site that ran, or products outside of any site.

    Attributes:
        layer: the path of its module, and the function in it if that is not ``forward``; empty for the model itself.
        operation: its operation, numbered where the layer has several of one kind.
        activations: the format of its activations, ``float`` or such as ``uint8``; of several, each once.
        weights: the format of its weight; None: it has none.
        amax: the largest absolute value that its activations represent; None: they have no range.
        sqnr_db: the lowest SQNR among its operands, in dB; None: not measured.
        error: the error of quantizing its group alone, by the measure of the sensitivity; None: not measured.
        share: its share of all multiply-adds, 0 to 1; None: none were counted.
        low_us: its time in low precision in microseconds; None: no engine was timed.
        float_us: its time in float, likewise.
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
    """The gain and the cost of one group that falls back to float.

    Attributes:
        group: its name.
        error: the error of quantizing it alone, which would be gone; None: not measured.
        alone_db: the SQNR of the model's output in dB with this group alone quantized; None: not measured.
        low_us: its time in low precision in microseconds; None: no engine was timed.
        float_us: its time in float, likewise.
        back: whether it is float already.
    """

    group: str
    error: float | None
    alone_db: float | None
    low_us: float | None
    float_us: float | None
    back: bool

    @property
    def cost_us(self) -> float | None:
        """The microseconds that float takes more; below 0 float is faster."""
        return None if self.low_us is None or self.float_us is None else self.float_us - self.low_us


def layer_rows(
    sites: Iterable[Site],
    products: Sequence[UnquantizedProduct] = (),
    sensitivity: Sequence[GroupSensitivity] = (),
    times: Sequence[GroupTime] = (),
) -> tuple[LayerRow, ...]:
    """Return a row for each site that ran, in the model's order, then one for products outside of sites."""
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
    """Return a row for each group with an error or a time, those with the largest error first, then by time.

    Args:
        sites: all sites, with their operands.
        sensitivity: the ranking; empty if nothing was measured.
        times: the times of the groups; empty if no engine was timed.
        causes: the groups whose cost in dB was measured.
    """
    quantized = {o.group for site in sites for o in site.operands if o.quantized}
    errors = {row.group: row.error for row in sensitivity}
    parts = {row.group: row.parts or (row.group,) for row in sensitivity}
    ranked = {part for some in parts.values() for part in some}
    parts.update({entry.group: (entry.group,) for entry in times if entry.group not in ranked})
    alone = {cause.group: cause.sqnr_db for cause in diagnoses}
    timed = {entry.group: entry for entry in times}
    rows = []
    for group, some in parts.items():
        known = [timed[part] for part in some if part in timed]
        rows.append(
            GroupRow(
                group=group,
                error=errors.get(group),
                alone_db=alone.get(group),
                low_us=sum(entry.low_us for entry in known) if known else None,
                float_us=sum(entry.float_us for entry in known) if known else None,
                back=not quantized & set(some),
            )
        )
    return tuple(sorted(rows, key=lambda row: (row.error is None, -(row.error or 0), row.cost_us or 0)))


def _work(sites: Sequence[Site]) -> dict[str, dict[str, float]]:
    """Return for each site its share of the work of each group that it takes part in."""
    amounts: dict[str, dict[str, int]] = defaultdict(dict)
    for site in sites:
        for group in {operand.group for operand in site.operands if operand.group is not None}:
            # A residual add multiplies nothing, and still takes time.
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
    """Return layer and operation of each site."""
    split = [_split(site.name) for site in sites]
    counts = Counter((layer, operation.rpartition("_")[0]) for layer, operation in split)
    return [
        (layer, operation if counts[layer, kind] > 1 else kind)
        for layer, operation, kind in ((layer, operation, operation.rpartition("_")[0]) for layer, operation in split)
    ]


def _split(name: str) -> tuple[str, str]:
    path, _, operation = f".{name}".rpartition(".")
    for function in _ORDINARY:
        path = path.removesuffix(function)
    return path.removeprefix("."), operation


def _formats(site: Site, role: str) -> str | None:
    found = [
        replace(one, zero_point=None).format if one.quantized else FLOAT for one in site.operands if one.role == role
    ]
    return ", ".join(dict.fromkeys(found)) or None


def paired_interval(first: NDArray[Any], second: NDArray[Any]) -> tuple[float, float]:
    """Return the 95% interval of ``second - first``, the scores of two models on the same resamples [R]."""
    low, high = np.quantile(second - first, [0.025, 0.975])
    return float(low), float(high)
