"""The plan: what becomes of each site, decided once from what calibration saw, and then data.

A plan is what coverage shows, what ``quantize()`` carries out, and what is saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace

import torch
from torch import Tensor
from torch import nn

from quantizer.numerics.qtype import QType
from quantizer.proxy.classes import original_class
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
    "held_scale",
    "put_back",
    "scale_of",
]

RESIDUAL_SQNR_DB = 30.0
"""``residual_add: auto`` quantizes an operand whose own signal to quantization-noise ratio reaches this.

docs/architecture.md shows the measurement behind the figure.
"""

NEVER_RAN = "never ran in calibration"
NOT_CALIBRATED = "not calibrated yet"
_OFFLOADED = "the weight is offloaded: it is loaded for each call, and the model holds none to store as integers"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperandPlan:
    """What becomes of one operand.

    ``amax`` [] or [C] is the range before the target's float type rounds the scale; ``scale`` [] or [C] is what the
    quantizer uses. ``range_group`` names the operands that share one range; ``clipped`` is the share of values beyond
    it; ``estimate`` the calibrator that was chosen for it among several (None: there was no choice); ``axis`` the
    output channels of a weight (None: per tensor), ``parameter`` the weight's path in the model and ``view`` how the
    operand shows it (None: as it is).
    """

    name: str
    role: str
    quantized: bool
    reason: str | None = None
    amax: Tensor | None = None
    scale: Tensor | None = None
    axis: int | None = None
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

    dtype: QType
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
    for site in sites:
        record = observation.records[site.path]
        reason, rule = _refusal(site, record, refused, settings)
        if reason == NEVER_RAN and observation.batches == 0:
            reason = NOT_CALIBRATED
        host = proxy.get_submodule(site.host_path)
        operands = () if reason else _operands(site, host, record, refused, settings)
        if not reason:
            reason = _whole(site, operands)
        quantized = reason is None
        if not quantized:
            operands = tuple(replace(operand, quantized=False) for operand in operands)
        plan[site.path] = SitePlan(
            name=site.path,
            operation=site.source.operation,
            kind=record.kind or site.operation.kind,
            host_type=original_class(host).__name__,
            file=site.source.file,
            line=site.source.line,
            quantized=quantized,
            reason=reason or _summary(operands, settings.dtype.name),
            rule=rule,
            multiply_adds=record.multiply_adds,
            reads=tuple(sorted(record.reads)),
            operands=operands,
        )
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
            reason = _summary(operands, reason.partition(":")[0]) if quantized else changed[0].reason or ""
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
    site: Site, host: nn.Module, record: SiteRecord, refused: Mapping[str, str], settings: PlanSettings
) -> tuple[OperandPlan, ...]:
    plans = []
    offloaded = any(parameter.is_meta for parameter in host.parameters(recurse=False))
    for operand in site.operation.operands:
        seen = record.operands.get(operand.name, OperandRecord())
        if f"{site.path}.{operand.name}" in refused:
            plans.append(OperandPlan(name=operand.name, role="activation", quantized=False, reason="excluded by rule"))
        elif seen.weight is not None:
            plans.append(_weight(operand, seen.weight, seen.axis, settings, offloaded))
        elif seen.group is not None:
            plans.append(_activation(site, operand.name, seen, settings))
    return tuple(plans)


def _weight(operand: Operand, seen: Weight, axis: int | None, settings: PlanSettings, offloaded: bool) -> OperandPlan:
    if seen.path is None:
        reason = _OFFLOADED if offloaded else "the weight is a parameter that no module of the model has registered"
        return OperandPlan(name=operand.name, role="weight", quantized=False, reason=reason)
    weight = seen.tensor().float()
    if axis is None or not settings.per_channel:
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
        scale=scale_of(amax, settings),
        axis=axis,
        minimum=float(weight.min()),
        maximum=float(weight.max()),
    )


def _activation(site: Site, name: str, seen: OperandRecord, settings: PlanSettings) -> OperandPlan:
    assert seen.group is not None
    calibrator = seen.group.calibrator
    amax = torch.tensor(seen.group.amax, dtype=torch.float32)
    scale = scale_of(amax, settings)
    histogram = calibrator.histogram
    sqnr = histogram.sqnr_db(float(scale), settings.dtype.qmin, settings.dtype.qmax) if histogram is not None else None
    reason = None
    if site.operation.kind == "residual_add" and settings.switches["residual_add"] == "auto":
        assert sqnr is not None
        if sqnr < RESIDUAL_SQNR_DB:
            reason = f"INT8 does not hold it: SQNR {sqnr:.1f} dB, below {RESIDUAL_SQNR_DB:g} dB"
    return OperandPlan(
        name=name,
        role="activation",
        quantized=reason is None,
        reason=reason,
        amax=amax,
        scale=scale,
        minimum=calibrator.minimum,
        maximum=calibrator.maximum,
        sqnr_db=sqnr,
        clipped=histogram.share_above(float(amax)) if histogram is not None else None,
        range_group=seen.group.operands[0],
        estimate=seen.group.chosen[1] if seen.group.chosen is not None else None,
    )


def scale_of(amax: Tensor, settings: PlanSettings) -> Tensor:
    """amax / qmax as the target holds it; 1 where the range is empty (all zeros stay zeros with any scale)."""
    scale = amax.double() / settings.dtype.qmax
    return held_scale(torch.where(amax > 0, scale, torch.ones_like(scale)), settings)


def held_scale(scale: Tensor, settings: PlanSettings) -> Tensor:
    """A scale [*] rounded to the float type that holds it on the target, as float32."""
    # In float64, so that the one rounding is to the target's type; a subnormal scale would lose its precision.
    smallest = torch.finfo(settings.scale_dtype).smallest_normal
    return scale.double().clamp(min=smallest).to(settings.scale_dtype).float()


def _whole(site: Site, operands: tuple[OperandPlan, ...]) -> str | None:
    """Why the site as a whole stays float: a product has all operands in low precision or none."""
    missing = [operand for operand in operands if not operand.quantized]
    if site.operation.kind != "residual_add":
        if len(operands) < len(site.operation.operands):
            return "an operand was not observed"
        return missing[0].reason if missing else None
    return (missing[0].reason if missing else "no operand observed") if len(missing) == len(operands) else None


def _summary(operands: tuple[OperandPlan, ...], dtype: str) -> str:
    held = [operand.name for operand in operands if operand.quantized]
    left = [f"{operand.name} not: {operand.reason}" for operand in operands if not operand.quantized]
    return "; ".join([f"{dtype}: {', '.join(held)}", *left])
