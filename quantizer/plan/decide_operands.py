"""Decide the format, range and scale of each operand from the statistics of calibration.

The format of a site comes from the last matching rule of ``formats``, else from the default.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from quantizer.errors import ConfigError
from quantizer.numerics.formats import INT8, UINT8, Format, QType, impossible
from quantizer.observe.calibrators import Calibrator
from quantizer.observe.range_group import Migration, OperandRecord, RangeGroup
from quantizer.observe.statistics import SiteStatistics
from quantizer.plan.reasons import ReasonCode
from quantizer.plan.selection import Selection, matched
from quantizer.plan.site_plan import CallRange, OperandPlan
from quantizer.plan.targets import TargetProfile
from quantizer.plan.weight_scales import ONE_SCALE, ScaledWeights, beyond, scale_of, with_range
from quantizer.proxy.site import OUTPUT, Site
from quantizer.rewrite.operations import Kind, Operand


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatRule:
    """A format for sites of ``kinds`` (empty: all kinds) that match ``sites`` (empty: all sites)."""

    format: Format
    kinds: tuple[Kind, ...]
    sites: Selection


class Formats:
    """The format of each site: from the last rule that matches, else the default."""

    def __init__(
        self,
        default: Format,
        rules: Sequence[tuple[FormatRule, frozenset[str] | None]] = (),
        zero_points: Set[Kind] = frozenset(),
    ) -> None:
        self.default = default
        self._rules = tuple(rules)
        self._zero_points = zero_points

    def of(self, site: str, kind: Kind) -> Format:
        for rule, sites in reversed(self._rules):
            if (not rule.kinds or kind in rule.kinds) and (sites is None or site in sites):
                return rule.format
        static = self.default.activations == INT8 and not self.default.dynamic
        asymmetric = static and kind in self._zero_points
        return replace(self.default, activations=UINT8) if asymmetric else self.default


def formats_for(
    proxy: nn.Module,
    sites: Iterable[Site],
    default: Format,
    rules: Sequence[FormatRule],
    target: TargetProfile,
    *,
    zero_point: bool,
) -> Formats:
    """Return the format of each site, by a default and rules; raise ``ConfigError`` with all problems of the rules."""
    sites = list(sites)
    problems: list[str] = []
    matches: list[tuple[FormatRule, frozenset[str] | None]] = []
    for number, rule in enumerate(rules):
        section = f"formats[{number}]"
        names = frozenset(matched(proxy, sites, rule.sites, section, problems)) if rule.sites else None
        matches.append((rule, names))
    problems += impossible(default, [rule.format for rule in rules], target)
    if problems:
        raise ConfigError(problems)
    asymmetric: Set[Kind] = target.zero_points if zero_point else frozenset()
    if target.quantizes_outputs and "conv" in asymmetric:
        # Operations between convolutions use the formats of convolutions.
        asymmetric = {*asymmetric, "output", "residual_add"}
    return Formats(default, matches, asymmetric)


RESIDUAL_SQNR_DB = 33.0
"""``residual_add: auto`` quantizes an operand whose own SQNR in dB reaches this.

See docs/design/calibration.md for the measurement.
"""

_MATRIX = 2  # axes of a weight that has blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """The settings that a plan depends on, besides the statistics.

    ``scale_dtype`` is the float type of scales on the target; ``weights`` caches the scales of weights.
    """

    formats: Formats
    per_channel: bool
    weight_estimate: str | None
    switches: Mapping[str, bool | str]
    scale_dtype: torch.dtype
    profile: TargetProfile
    weights: ScaledWeights


def operand_plans(
    site: Site,
    host: nn.Module,
    record: SiteStatistics,
    refused: Mapping[str, str],
    settings: PlanSettings,
    requested: Format,
    indivisible: list[str],
) -> tuple[OperandPlan, ...]:
    """Return the plans of the operands of a site that calibration observed."""
    plans = []
    migration = next((o.smoothed.migration for o in record.operands.values() if o.smoothed is not None), None)
    offloaded = any(parameter.is_meta for parameter in host.parameters(recurse=False))
    for operand in site.operation.operands:
        observed = record.operands.get(operand.name, OperandRecord())
        if f"{site.path}.{operand.name}" in refused:
            plans.append(
                OperandPlan(name=operand.name, role="activation", quantized=False, reason=ReasonCode.EXCLUDED.text())
            )
        elif observed.weight is not None:
            plan = _weight(site, operand, observed, settings, requested, indivisible, migration, offloaded)
            plans.append(replace(plan, note="; ".join(filter(None, (plan.note, _unreached_note(record)))) or None))
        elif observed.group is not None:
            plans.append(_activation(site, operand.name, observed, settings, requested))
    return tuple(plans)


def _weight(
    site: Site,
    operand: Operand,
    observed: OperandRecord,
    settings: PlanSettings,
    requested: Format,
    indivisible: list[str],
    migration: Migration | None,
    offloaded: bool,
) -> OperandPlan:
    def refused(reason: str) -> OperandPlan:
        return OperandPlan(name=operand.name, role="weight", quantized=False, reason=reason)

    assert observed.weight is not None
    if observed.weight.path is None:
        return refused((ReasonCode.OFFLOADED if offloaded else ReasonCode.UNREGISTERED).text())
    multiplied = site.operation.kind != "embedding"
    if multiplied and requested.dynamic and not settings.profile.reads_dynamic and not _multiplies_last_axis(observed):
        return refused(ReasonCode.NO_DYNAMIC.text(target=settings.profile.name))
    axis, block = _scale_of(site, observed, settings, requested.block_size)
    if requested.block_size is not None:
        shape = observed.weight.shape
        if axis is None:
            return refused(ReasonCode.NO_BLOCKS.text(axes=len(shape)))
        if shape[axis] % requested.block_size:
            indivisible.append(
                f"quantizer.{requested.rule or 'formats'}: block_size {block} does not divide the {shape[axis]} "
                f"input channels of {site.path}; choose another, or leave the site out by a rule"
            )
            return refused(ReasonCode.INDIVISIBLE.text())
    inner = observed.inner if migration is None or migration.weight_axis is None else migration.weight_axis
    assert migration is None or inner is not None
    plan = OperandPlan(
        name=operand.name,
        role="weight",
        parameter=observed.weight.path,
        view=observed.weight.view,
        computation=observed.weight.computation,
        quantized=True,
        dtype=requested.weights.name,
        axis=axis,
        block_size=block,
        estimate=settings.weight_estimate,
        smooth=migration.factors if migration is not None else None,
        smooth_axis=inner if migration is not None else None,
        spread=observed.spread,
        smoothing=migration.text if migration is not None else None,
        note=ONE_SCALE if site.operation.kind == "conv" and settings.per_channel and axis is None else None,
    )
    name, qmax = f"{site.path}.{operand.name}", settings.profile.weight_qmax
    scaled = settings.weights.scaled(name, plan, observed.weight, settings.scale_dtype, qmax)
    if scaled.reason is not None:
        return refused(scaled.reason)
    if observed.rounded is None:
        return scaled
    ranged = with_range(scaled, observed.rounded.amax, settings.scale_dtype, qmax)
    return replace(ranged, codes=observed.rounded.codes, rounding=observed.rounded.text)


def _scale_of(
    site: Site, observed: OperandRecord, settings: PlanSettings, block: int | None
) -> tuple[int | None, int | None]:
    """Return the axis and the block size of a weight's scales; a block size without an axis cannot be applied.

    Experts have their own scales: per channel, as one block over all input channels, or one scale per expert.
    """
    assert observed.weight is not None
    grouped = site.operation.grouped is not None and observed.inner is not None
    if block is not None:
        matrix = 1 - observed.axis if observed.axis is not None and len(observed.weight.shape) == _MATRIX else None
        return (observed.inner if grouped else matrix), block
    if not settings.per_channel and observed.spread is None:
        return (0 if grouped else None), None
    if grouped and observed.inner is not None:
        return observed.inner, observed.weight.shape[observed.inner]
    return observed.axis, None


def _unreached_note(record: SiteStatistics) -> str | None:
    """Return the note on experts that no calibration sample reached; None if there are none."""
    if not record.unreached:
        return None
    numbers = ", ".join(map(str, record.unreached))
    count, experts = len(record.unreached), len(record.experts)
    which = f"{count} of {experts} experts ({numbers})"
    return f"no calibration sample reached {which}; the range comes from the other experts"


_RANGES = 4096
"""The ranges whose scales are kept."""


def _multiplies_last_axis(observed: OperandRecord) -> bool:
    return observed.inner is not None and observed.weight is not None and observed.weight.tensor().dim() == _MATRIX


def _activation(
    site: Site, name: str, observed: OperandRecord, settings: PlanSettings, requested: Format
) -> OperandPlan:
    group = observed.range
    assert group is not None
    migration = group.migration
    if group.calibrator.count == 0:
        return OperandPlan(name=name, role="activation", quantized=False, reason=ReasonCode.NO_VALUE.text())
    if requested.activations is not None and not requested.dynamic and group.calibrator.largest == 0:
        return OperandPlan(name=name, role="activation", quantized=False, reason=ReasonCode.ONLY_ZEROS.text())
    if requested.activations is None or requested.dynamic:
        return _without_scale(name, observed, group, requested.activations, settings.profile)
    dtype = requested.activations
    if dtype == INT8 and requested.rule is None and _is_rectified_output(group, settings.profile):
        dtype = UINT8
    # The output of a softmax is at most 1, and attention in FP8 uses exactly that range.
    fixed = dtype.is_float and observed.softmax
    ranges = _ranges_of_calls(group, observed, dtype)
    # A site that a pass calls once has the range of that call, whatever its neighbours in the group read.
    used = ranges[0] if len(ranges) == 1 else group
    amax, scale, zero_point = _range(used, dtype, settings, 1.0 if fixed else None)
    calls = _calls(observed.tensors or (), ranges, group, dtype, settings) if ranges else ()
    sqnr, clipped = _fit(ranges or [used], [call.amax for call in calls] or [float(amax)], judged_as(dtype))
    reason = None
    # Between convolutions in integers a float operand would cost more than it saves.
    guarded = site.operation.kind == "residual_add" and not settings.profile.quantizes_outputs
    if guarded and settings.switches["residual_add"] == "auto":
        assert sqnr is not None
        if sqnr < RESIDUAL_SQNR_DB:
            reason = ReasonCode.SQNR.text(dtype=dtype.name, sqnr=f"{sqnr:.1f}", limit=f"{RESIDUAL_SQNR_DB:g}")
    reason = _scale_problem(float(amax), scale, dtype, settings.scale_dtype) or reason
    return OperandPlan(
        name=name,
        role="activation",
        quantized=reason is None,
        reason=reason,
        amax=amax,
        scale=scale,
        dtype=dtype.name,
        zero_point=zero_point,
        minimum=used.calibrator.minimum,
        maximum=used.calibrator.maximum,
        sqnr_db=sqnr,
        clipped=clipped,
        range_group=group.operands[0],
        calls=calls,
        note="; ".join(filter(None, (_constant_note(used.calibrator), _shared_range_note(group)))) or None,
        estimate=used.chosen[1] if used.chosen is not None and not fixed else None,
        smooth=migration.factors if migration is not None else None,
        smooth_axis=migration.axis if migration is not None else None,
        smoothing=migration.text if migration is not None else observed.left,
    )


def _constant_note(calibrator: Calibrator) -> str | None:
    """Return a note on an activation with a single value in calibration; None if it had several."""
    if calibrator.count < 2 or calibrator.minimum != calibrator.maximum:
        return None
    return f"all of its values in calibration were {calibrator.minimum:g}"


def _shared_range_note(group: RangeGroup) -> str | None:
    return f"one range for all calls: {group.together}" if group.together else None


def _range(
    used: RangeGroup, dtype: QType, settings: PlanSettings, fixed: float | None = None
) -> tuple[Tensor, Tensor, int | None]:
    """Return amax, scale and zero point of a range in a format; ``fixed`` replaces the amax."""
    largest = used.amax(judged_as(dtype).name) if fixed is None else fixed
    zero_point = None
    if dtype.has_zero_point:
        bounds = used.calibrator.minimum, used.calibrator.maximum
        amax, scale, zero_point = _asymmetric(*bounds, largest, dtype, settings.scale_dtype)
    else:
        amax, scale = _symmetric(largest, dtype, settings.scale_dtype)
    # Copies, because a file of tensors must not contain one twice.
    return amax.clone(), scale.clone(), zero_point


def _ranges_of_calls(group: RangeGroup, observed: OperandRecord, dtype: QType) -> list[RangeGroup]:
    """Return the range of each call of a pass; empty if all calls have one.

    Calls with zeros only use the range of all calls. FP8 always does, because its precision is relative to the value.
    """
    if dtype.is_float or not group.told_apart:
        return []
    ranges = (group.of_tensor(tensor) for tensor in observed.tensors or ())
    return [each if each.calibrator.largest > 0 else group for each in ranges]


def _calls(
    tensors: tuple[int, ...], ranges: list[RangeGroup], group: RangeGroup, dtype: QType, settings: PlanSettings
) -> tuple[CallRange, ...]:
    calls = []
    for tensor, each in zip(tensors, ranges, strict=True):
        amax, scale, zero_point = _range(each, dtype, settings)
        if _scale_problem(float(amax), scale, dtype, settings.scale_dtype) is not None:
            amax, scale, zero_point = _range(group, dtype, settings)
        own = group.range_of(tensor) if each is not group else -1
        calls.append(CallRange(tensor=own, amax=float(amax), scale=float(scale), zero_point=zero_point))
    return tuple(calls)


def _fit(ranges: list[RangeGroup], amax: list[float], judged: QType) -> tuple[float | None, float | None]:
    """Return the lowest SQNR in dB over all calls, and the share of clipped values; None without a histogram."""
    histograms = [(each.calibrator.histogram, end) for each, end in zip(ranges, amax, strict=True)]
    pairs = [(histogram, end) for histogram, end in histograms if histogram is not None]
    if len(pairs) < len(histograms):
        return None, None
    sqnr = min(histogram.sqnr_db(end / judged.qmax, judged.name) for histogram, end in pairs)
    values = max(sum(histogram.total for histogram, _ in pairs), 1)
    return sqnr, sum(histogram.share_above(end) * (histogram.total / values) for histogram, end in pairs)


def _is_rectified_output(group: RangeGroup, profile: TargetProfile) -> bool:
    """Return whether a non-negative tensor is the output of a convolution on a target that quantizes outputs.

    With zero point 0 the integers are those after the ReLU, which the engine fuses into the convolution.
    """
    of_result = any(name.endswith(f".{OUTPUT}.input") for name in group.operands)
    return profile.quantizes_outputs and group.calibrator.minimum >= 0 and of_result


def _without_scale(
    name: str, observed: OperandRecord, group: RangeGroup, dtype: QType | None, profile: TargetProfile
) -> OperandPlan:
    """Return the plan of a dynamically quantized activation, or (``dtype`` None) of a float one."""
    migration = group.migration
    return OperandPlan(
        name=name,
        role="activation",
        quantized=dtype is not None,
        reason=ReasonCode.WEIGHTS_ALONE.text() if dtype is None else None,
        dtype=INT8.name if dtype is None else dtype.name,
        dynamic=dtype is not None,
        block_size=None if dtype is None or profile.dynamic is None else profile.dynamic.block_size,
        minimum=group.calibrator.minimum,
        maximum=group.calibrator.maximum,
        range_group=None if dtype is None else group.operands[0],
        smooth=migration.factors if migration is not None else None,
        smooth_axis=migration.axis if migration is not None else None,
        smoothing=migration.text if migration is not None else None if dtype is None else observed.left,
    )


def _scale_problem(amax: float, scale: Tensor, dtype: QType, scale_dtype: torch.dtype) -> str | None:
    """Return why the target's float type cannot represent a scale; None if it can."""
    value, least = float(scale), torch.finfo(scale_dtype).smallest_normal
    if amax and not dtype.is_float and not value >= least:
        name = str(scale_dtype).removeprefix("torch.")
        return ReasonCode.SCALE_TOO_SMALL.text(amax=f"{amax:.3g}", least=f"{least:.2g}", dtype=name)
    return None if math.isfinite(value) else beyond(amax, scale, scale_dtype)


def judged_as(dtype: QType) -> QType:
    """Return the format that estimates a range: histograms hold magnitudes, so zero points do not apply."""
    return INT8 if dtype.has_zero_point else dtype


@lru_cache(maxsize=_RANGES)
def _symmetric(largest: float, dtype: QType, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return amax and scale of a range; the settings of a search have many ranges in common."""
    amax = torch.tensor(largest, dtype=torch.float32)
    scale = scale_of(amax, dtype, scale_dtype)
    if dtype.is_float:
        # The precision of FP8 is relative to the value: too large a range costs only the smallest values.
        scale = scale.clamp(min=torch.finfo(scale_dtype).smallest_normal)
    return amax, scale


@lru_cache(maxsize=_RANGES)
def _asymmetric(
    minimum: float, maximum: float, largest: float, dtype: QType, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, int]:
    """Return amax, scale and zero point of an observed range, extended to include 0 and clipped at -amax and amax."""
    limit = torch.tensor(largest, dtype=torch.float32)
    amax = float(limit)
    low, high = max(min(minimum, 0.0), -amax), min(max(maximum, 0.0), amax)
    # The width of the range replaces amax: the integers from 0 to qmax cover it.
    scale = scale_of(torch.tensor(high - low, dtype=torch.float32), dtype, scale_dtype)
    # If the scale was rounded down to its float type, the zero point may come out above qmax.
    return limit, scale, min(round(-low / float(scale)), int(dtype.qmax)) if high > low else 0
