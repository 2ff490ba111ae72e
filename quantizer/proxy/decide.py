"""Deciding what becomes of every site, once, from what calibration saw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from quantizer.errors import ConfigError
from quantizer.numerics.qtype import qtype
from quantizer.proxy.classes import original_class
from quantizer.proxy.formats import Format
from quantizer.proxy.groups import group_names
from quantizer.proxy.observe import EMPTY
from quantizer.proxy.observe import Observation
from quantizer.proxy.observe import SiteRecord
from quantizer.proxy.operand_plans import PlanSettings
from quantizer.proxy.operand_plans import operand_plans
from quantizer.proxy.plan import NEVER_RAN
from quantizer.proxy.plan import NOT_CALIBRATED
from quantizer.proxy.plan import OperandPlan
from quantizer.proxy.plan import Plan
from quantizer.proxy.plan import SitePlan
from quantizer.proxy.plan import summary
from quantizer.proxy.rules import by_kind
from quantizer.proxy.site import Site

__all__ = ["decide"]


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
        operands = () if reason else operand_plans(site, host, record, refused, settings, wanted, indivisible)
        if not reason:
            reason = _whole(site, operands, wanted)
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
            reason=reason or summary(operands),
            rule=rule,
            multiply_adds=record.multiply_adds,
            reads=tuple(sorted(record.reads)),
            beyond_half=observation.magnitudes.wide.get(site.host_path),
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


def _whole(site: Site, operands: tuple[OperandPlan, ...], wanted: Format) -> str | None:
    """Why the site as a whole stays float: a product has all operands in low precision or none, or weights alone."""
    missing = [operand for operand in operands if not operand.quantized]
    if site.operation.kind != "residual_add":
        if len(operands) < len(site.operation.operands):
            return "an operand was not observed"
        if wanted.activations is None and any(operand.quantized for operand in operands):
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
