"""The plan: what becomes of each site, decided once from what calibration saw, and then data.

A plan is what coverage shows, what ``quantize()`` carries out, and what is saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace

import torch
from torch import Tensor
from torch import nn

from quantizer.calibrators import Calibrator
from quantizer.errors import ConfigError
from quantizer.numerics.granularity import in_blocks
from quantizer.numerics.qtype import INT8
from quantizer.numerics.qtype import QType
from quantizer.numerics.qtype import qtype
from quantizer.proxy.classes import original_class
from quantizer.proxy.formats import Format
from quantizer.proxy.formats import Formats
from quantizer.proxy.groups import group_names
from quantizer.proxy.observe import EMPTY
from quantizer.proxy.observe import Observation
from quantizer.proxy.observe import OperandRecord
from quantizer.proxy.observe import SiteRecord
from quantizer.proxy.rules import by_kind
from quantizer.proxy.site import Site
from quantizer.proxy.weight import Weight
from quantizer.proxy.weight import WeightView
from quantizer.source.catalogue import Operand
from quantizer.targets import TargetProfile

__all__ = [
    "NOT_CALIBRATED",
    "RESIDUAL_SQNR_DB",
    "OperandPlan",
    "Plan",
    "PlanSettings",
    "SitePlan",
    "decide",
    "judged_as",
    "put_back",
    "scale_of",
]

RESIDUAL_SQNR_DB = 30.0
"""``residual_add: auto`` quantizes an operand whose own signal to quantization-noise ratio reaches this.

docs/architecture.md shows the measurement behind the figure.
"""

_UNREGISTERED = "the weight is a parameter that no module of the model has registered"
_WEIGHTS_ALONE = "weights alone are quantized here"
_MATRIX = 2  # axes of a weight that has blocks

NEVER_RAN = "never ran in calibration"
NOT_CALIBRATED = "not calibrated yet"
_OFFLOADED = "the weight is offloaded: it is loaded for each call, and the model holds none to store as integers"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperandPlan:
    """What becomes of one operand, held in the format ``dtype`` where it is quantized.

    ``amax`` [] or [C] is the range before the target's float type rounds the scale; ``scale`` [] or [C] is what the
    quantizer uses. ``range_group`` names the operands that share one range; ``clipped`` is the share of values beyond
    it; ``estimate`` the calibrator that was chosen for it among several (None: there was no choice); ``axis`` the
    output channels of a weight (None: per tensor), or with ``block_size`` its input channels, of which so many share a
    scale; ``zero_point`` the step of 0.0 of an asymmetric format (None: 0); ``parameter`` the weight's path in the
    model and ``view`` how the operand shows it (None: as it is).
    """

    name: str
    role: str
    quantized: bool
    reason: str | None = None
    amax: Tensor | None = None
    scale: Tensor | None = None
    dtype: str = INT8.name
    axis: int | None = None
    block_size: int | None = None
    zero_point: int | None = None
    minimum: float | None = None
    maximum: float | None = None
    sqnr_db: float | None = None
    clipped: float | None = None
    range_group: str | None = None
    estimate: str | None = None
    group: str | None = None
    parameter: str | None = None
    view: WeightView | None = None

    @property
    def largest_amax(self) -> float | None:
        """The largest amax of its channels; None where no range was seen."""
        return None if self.amax is None else float(self.amax.max())

    @property
    def scales(self) -> int:
        """How many scales it has; 1 where no range was seen."""
        return 1 if self.amax is None else self.amax.numel()

    @property
    def largest_scale(self) -> float | None:
        """The largest scale of its channels; None where no range was seen."""
        return None if self.scale is None else float(self.scale.max())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SitePlan:
    """What becomes of one site, and why. ``rule`` is the config entry that decided, where one did.

    ``reads`` are the parameters among its operands, whether quantized or not.
    """

    name: str
    operation: str
    kind: str
    host_type: str
    file: str
    line: int
    quantized: bool
    reason: str
    rule: str | None = None
    multiply_adds: int = 0
    reads: tuple[str, ...] = ()
    operands: tuple[OperandPlan, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """What a plan depends on besides the data.

    ``scale_dtype`` is the float type that holds the scales on the target.
    """

    formats: Formats
    per_channel: bool
    switches: Mapping[str, bool | str]
    scale_dtype: torch.dtype
    profile: TargetProfile


Plan = dict[str, SitePlan]


def decide(
    proxy: nn.Module,
    sites: Iterable[Site],
    observation: Observation,
    refused: Mapping[str, str],
    settings: PlanSettings,
) -> Plan:
    """Decide every site from what was observed."""
    plan: Plan = {}
    indivisible: list[str] = []
    for site in sites:
        host = proxy.get_submodule(site.host_path)
        record = observation.records[site.path]
        kind = record.kind or site.operation.kind
        wanted = settings.formats.of(site.path, kind)
        reason, rule = _refusal(site, record, refused, settings)
        if reason == NEVER_RAN and observation.batches == 0:
            reason = NOT_CALIBRATED
        operands = () if reason else _operands(site, host, record, refused, settings, wanted, indivisible)
        if not reason:
            reason = _whole(site, operands)
            rule = wanted.rule
        quantized = reason is None
        if not quantized:
            operands = tuple(replace(operand, quantized=False) for operand in operands)
        plan[site.path] = SitePlan(
            name=site.path,
            operation=site.source.operation,
            kind=kind,
            host_type=original_class(host).__name__,
            file=site.source.file,
            line=site.source.line,
            quantized=quantized,
            reason=reason or _summary(operands),
            rule=rule,
            multiply_adds=record.multiply_adds,
            reads=tuple(sorted(record.reads)),
            operands=operands,
        )
    if indivisible:
        raise ConfigError(indivisible)
    plan = _whole_attention(plan)
    names = group_names(plan)
    return {
        path: replace(entry, operands=tuple(replace(o, group=names.get((path, o.name))) for o in entry.operands))
        for path, entry in plan.items()
    }


def put_back(plan: Plan, groups: Mapping[str, str]) -> Plan:
    """The plan with whole groups back in float; ``groups`` gives each one's reason."""
    result: Plan = {}
    for path, entry in plan.items():
        operands = tuple(
            replace(o, quantized=False, reason=groups[o.group])
            if o.quantized and o.group is not None and o.group in groups
            else o
            for o in entry.operands
        )
        quantized = any(operand.quantized for operand in operands)
        changed = [new for new, old in zip(operands, entry.operands, strict=True) if new is not old]
        reason = entry.reason
        if changed:
            reason = _summary(operands) if quantized else changed[0].reason or ""
        result[path] = replace(entry, operands=operands, quantized=quantized, reason=reason)
    return result


def _refusal(
    site: Site, record: SiteRecord, refused: Mapping[str, str], settings: PlanSettings
) -> tuple[str | None, str | None]:
    """Why a site is left in float before its ranges are looked at, and the rule that says so."""
    if site.path in refused:
        return "excluded by rule", refused[site.path]
    kind = record.kind or site.operation.kind
    off = by_kind(settings.switches, kind)
    if off is not None:
        return "this kind of site is switched off", off
    if record.calls == 0:
        return NEVER_RAN, None
    # An empty batch among others says nothing about the site.
    reasons = [reason for reason in record.reasons if reason != EMPTY or record.fit == 0]
    if reasons and (record.fit == 0 or kind != "residual_add"):
        return reasons[0], None
    if kind not in settings.profile.site_kinds:
        return f"{settings.profile.name} gains nothing from this kind of site", f"target {settings.profile.name}"
    if kind not in ("residual_add", "embedding"):
        # A dimension that changes with the data is judged by nobody here: it may well be large in use.
        depth, width = (size or settings.profile.min_gemm_dim or 1 for size in (record.depth, record.width))
        too_small = settings.profile.gemm_reason(depth, width)
        if too_small is not None:
            return too_small, f"target {settings.profile.name}"
    return None, None


def _operands(
    site: Site,
    host: nn.Module,
    record: SiteRecord,
    refused: Mapping[str, str],
    settings: PlanSettings,
    wanted: Format,
    indivisible: list[str],
) -> tuple[OperandPlan, ...]:
    plans = []
    offloaded = any(parameter.is_meta for parameter in host.parameters(recurse=False))
    for operand in site.operation.operands:
        seen = record.operands.get(operand.name, OperandRecord())
        if f"{site.path}.{operand.name}" in refused:
            plans.append(OperandPlan(name=operand.name, role="activation", quantized=False, reason="excluded by rule"))
        elif seen.weight is not None:
            plans.append(_weight(site, operand, seen.weight, seen.axis, settings, wanted, indivisible, offloaded))
        elif seen.group is not None:
            plans.append(_activation(site, operand.name, seen, settings, wanted))
    return tuple(plans)


def _weight(
    site: Site,
    operand: Operand,
    seen: Weight,
    axis: int | None,
    settings: PlanSettings,
    wanted: Format,
    indivisible: list[str],
    offloaded: bool,
) -> OperandPlan:
    def refused(reason: str) -> OperandPlan:
        return OperandPlan(name=operand.name, role="weight", quantized=False, reason=reason)

    if seen.path is None:
        return refused(_OFFLOADED if offloaded else _UNREGISTERED)
    weight = seen.tensor().float()
    block = wanted.block_size
    if block is not None:
        if axis is None or weight.dim() != _MATRIX:
            return refused(f"a weight of {weight.dim()} axes has no blocks of input channels")
        axis = 1 - axis
        if weight.shape[axis] % block:
            indivisible.append(
                f"quantizer.{wanted.rule or 'formats'}: block_size {block} does not divide the {weight.shape[axis]} "
                f"input channels of {site.path}; choose another, or leave the site out by a rule"
            )
            return refused("its block size does not divide its input channels")
        amax = in_blocks(weight, axis, block).abs().amax(dim=axis + 1)
    elif axis is None or not settings.per_channel:
        amax, axis = weight.abs().amax(), None
    else:
        amax = weight.abs().amax(dim=[d for d in range(weight.dim()) if d != axis])
    return OperandPlan(
        name=operand.name,
        role="weight",
        parameter=seen.path,
        view=seen.view,
        quantized=True,
        amax=amax,
        scale=scale_of(amax, wanted.weights, settings.scale_dtype),
        dtype=wanted.weights.name,
        axis=axis,
        block_size=block,
        minimum=float(weight.min()),
        maximum=float(weight.max()),
    )


def _activation(site: Site, name: str, seen: OperandRecord, settings: PlanSettings, wanted: Format) -> OperandPlan:
    assert seen.group is not None
    calibrator = seen.group.calibrator
    if wanted.activations is None:
        low, high = calibrator.minimum, calibrator.maximum
        return OperandPlan(
            name=name, role="activation", quantized=False, reason=_WEIGHTS_ALONE, minimum=low, maximum=high
        )
    dtype = wanted.activations
    # What a softmax gives is at most 1; an attention in FP8 takes exactly that range.
    fixed = dtype.is_float and seen.softmax
    amax = torch.tensor(1.0 if fixed else seen.group.amax(judged_as(dtype).name), dtype=torch.float32)
    if dtype.has_zero_point:
        scale, zero_point = _asymmetric(calibrator, float(amax), dtype, settings.scale_dtype)
    else:
        scale, zero_point = scale_of(amax, dtype, settings.scale_dtype), None
    histogram = calibrator.histogram
    judged = judged_as(dtype)
    sqnr = histogram.sqnr_db(float(amax) / judged.qmax, judged.name) if histogram is not None else None
    reason = None
    if site.operation.kind == "residual_add" and settings.switches["residual_add"] == "auto":
        assert sqnr is not None
        if sqnr < RESIDUAL_SQNR_DB:
            reason = f"{dtype.name} does not hold it: SQNR {sqnr:.1f} dB, below {RESIDUAL_SQNR_DB:g} dB"
    return OperandPlan(
        name=name,
        role="activation",
        quantized=reason is None,
        reason=reason,
        amax=amax,
        scale=scale,
        dtype=dtype.name,
        zero_point=zero_point,
        minimum=calibrator.minimum,
        maximum=calibrator.maximum,
        sqnr_db=sqnr,
        clipped=histogram.share_above(float(amax)) if histogram is not None else None,
        range_group=seen.group.operands[0],
        estimate=seen.group.chosen[1] if seen.group.chosen is not None else None,
    )


def judged_as(dtype: QType) -> QType:
    """The format by which a range is estimated: histograms are of magnitudes, which know no zero point."""
    return INT8 if dtype.has_zero_point else dtype


def scale_of(amax: Tensor, dtype: QType, scale_dtype: torch.dtype) -> Tensor:
    """amax / qmax as the target's float type holds it; 1 where the range is empty (all zeros stay zeros anyhow)."""
    info = torch.finfo(scale_dtype)
    # In float64, so that the one rounding is to the target's type; a subnormal scale would lose its precision.
    scale = (amax.double() / dtype.qmax).clamp(min=info.smallest_normal)
    scale = torch.where(amax > 0, scale, torch.ones_like(scale))
    return scale.to(scale_dtype).float()


def _asymmetric(calibrator: Calibrator, amax: float, dtype: QType, scale_dtype: torch.dtype) -> tuple[Tensor, int]:
    """The scale and the zero point of a range that holds 0: what was seen, clipped at amax on either side."""
    low, high = max(min(calibrator.minimum, 0.0), -amax), min(max(calibrator.maximum, 0.0), amax)
    # As if the range were symmetric, with as many steps on its one side as the format has in all.
    scale = scale_of(torch.tensor(high - low), dtype, scale_dtype)
    return scale, round(-low / float(scale)) if high > low else 0


def _whole(site: Site, operands: tuple[OperandPlan, ...]) -> str | None:
    """Why the site as a whole stays float: a product has all operands in low precision or none, or weights alone."""
    missing = [operand for operand in operands if not operand.quantized]
    if site.operation.kind != "residual_add":
        if len(operands) < len(site.operation.operands):
            return "an operand was not observed"
        by_rule = all(operand.reason == _WEIGHTS_ALONE for operand in missing)
        if by_rule and any(operand.quantized for operand in operands):
            return None
        return missing[0].reason if missing else None
    return (missing[0].reason if missing else "no operand observed") if len(missing) == len(operands) else None


def _whole_attention(plan: Plan) -> Plan:
    """FP8 attention is fused as a whole: its products are all in FP8 or none is."""
    functions: dict[str, list[SitePlan]] = defaultdict(list)
    for entry in plan.values():
        if entry.kind == "matmul" and entry.reason != NEVER_RAN:
            functions[entry.name.rpartition(".")[0]].append(entry)
    torn = [
        entry
        for entries in functions.values()
        if any(map(_in_fp8, entries)) and not all(map(_in_fp8, entries))
        for entry in entries
        if _in_fp8(entry)
    ]
    reason = "not all products of this attention are in FP8: query, key, value and softmax go together or not at all"
    left = {
        entry.name: replace(
            entry,
            quantized=False,
            reason=reason,
            operands=tuple(replace(operand, quantized=False) for operand in entry.operands),
        )
        for entry in torn
    }
    return {**plan, **left}


def _in_fp8(entry: SitePlan) -> bool:
    return entry.quantized and all(qtype(operand.dtype).is_float for operand in entry.operands)


def _summary(operands: tuple[OperandPlan, ...]) -> str:
    """``int8: input, weight``, or format by format, and what is left out."""
    formats: dict[str, list[str]] = defaultdict(list)
    for operand in operands:
        if operand.quantized:
            blocks = f" in blocks of {operand.block_size}" if operand.block_size is not None else ""
            formats[operand.dtype + blocks].append(operand.name)
    held = [f"{dtype}: {', '.join(names)}" for dtype, names in formats.items()]
    left = [f"{operand.name} not: {operand.reason}" for operand in operands if not operand.quantized]
    return "; ".join([*held, *left])
