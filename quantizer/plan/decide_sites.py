"""The decision for each site, and the groups of operands that change precision together.

A group has both operands of a product. Weighted products that read the same tensor (query, key, value) form one group,
and so do the products of one attention (activation by activation, in one function of one module). Each operand of a
residual add is its own group: the product before it stays as it is. The result of a convolution is in its group, with
those of operations that the engine computes in integers along with it. A recurrent layer, with both its directions, is
one group: its loop is one operator.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from quantizer.errors import ConfigError
from quantizer.numerics.formats import INT8, UINT8, Format, qtype
from quantizer.observe.statistics import Seen, SiteStatistics
from quantizer.plan.decide_operands import PlanSettings, operand_plans
from quantizer.plan.reasons import ReasonCode, RuleKind
from quantizer.plan.selection import by_kind
from quantizer.plan.site_plan import OperandPlan, Plan, SitePlan, summary, without_orphans
from quantizer.plan.targets import TargetProfile
from quantizer.proxy.generated_classes import original_class
from quantizer.proxy.recurrence import RecurrentLayer
from quantizer.proxy.site import OUTPUT, Site, SourceCall
from quantizer.rewrite.product_sizes import weighted

if TYPE_CHECKING:
    from quantizer.plan.site_plan import SitePlan


_RECURRENT = ("input_product", "recurrent_product")


def group_names(plan: Mapping[str, SitePlan]) -> dict[tuple[str, str], str]:
    """Return the group of each operand of a quantized site, by (site name, operand name)."""
    keys: dict[str, list[str]] = defaultdict(list)
    names: dict[tuple[str, str], str] = {}
    for path, site in plan.items():
        if site.kind == "residual_add":
            names.update({(path, operand.name): f"{path}.{operand.name}" for operand in site.operands})
        elif site.quantized and site.kind != "output":
            keys[_key(site)].append(path)
    for members in keys.values():
        name = _common_name(members)
        for path in members:
            names.update({(path, operand.name): name for operand in plan[path].operands})
    for path, site in plan.items():
        if site.kind == "output" and site.quantized:
            of = _product(path, plan)
            group = names.get((of, plan[of].operands[0].name), of) if plan[of].kind != "residual_add" else of
            names.update({(path, operand.name): group for operand in site.operands})
    return names


def _product(path: str, plan: Mapping[str, SitePlan]) -> str:
    """Return the convolution, or the add, from which an output comes."""
    while plan[path].kind == "output":
        path = plan[path].follows[0]
    return path


def _key(site: SitePlan) -> str:
    """Return the key of a site's group: sites with the same key form one group."""
    layer = recurrent_layer(site)
    if layer is not None:
        return f"recurrence {layer}"
    if any(operand.role == "weight" for operand in site.operands):
        shared = next((operand.range_group for operand in site.operands if operand.role == "activation"), None)
        return f"input {shared}" if shared is not None else f"weight of {site.name}"
    return f"function {site.name.rpartition('.')[0]}"


def recurrent_layer(site: SitePlan) -> str | None:
    """Return the path of the recurrent layer that a site is a product of, without its direction; None if of none."""
    host = site.name.rpartition(".forward.")[0]
    return host.removesuffix("_reverse") if site.operation in _RECURRENT else None


def _common_name(paths: Iterable[str]) -> str:
    """Return ``a.{query,key}.linear_0`` for ``a.query.linear_0`` and ``a.key.linear_0``."""
    split = [path.split(".") for path in paths]
    if len(split) == 1:
        return ".".join(split[0])
    head = _shared(split)
    tails = [parts[head:] for parts in split]
    shared = _shared([tail[::-1] for tail in tails])
    middles = [".".join(tail[: len(tail) - shared]) for tail in tails]
    end = split[0][len(split[0]) - shared :]
    return ".".join([*split[0][:head], "{" + ",".join(middles) + "}", *end])


def _shared(sequences: Sequence[Sequence[str]]) -> int:
    """Return how many first entries all sequences have in common."""
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*sequences, strict=False)))


_MASKED = torch.finfo(torch.float32).min / 2
"""The limit at or below which a value is taken for that of a mask, which hides a score from a softmax."""


def decide(
    proxy: nn.Module,
    sites: Iterable[Site],
    observation: Seen,
    refused: Mapping[str, str],
    settings: PlanSettings,
) -> Plan:
    """Return the plan of all sites, decided from the statistics."""
    plan: Plan = {}
    indivisible: list[str] = []
    followed = {path for record in observation.records.values() for path in record.follows}
    calls = [module for module in proxy.modules() if isinstance(module, SourceCall)]
    gates = {f"{call.path}.{OUTPUT}" for call in calls if call.operation.is_gate}
    for site in sites:
        host = proxy.get_submodule(site.host_path)
        record = observation.records[site.path]
        if site.operation.name == OUTPUT and not record.operands:
            # Nothing quantized it, or it is normalized first.
            continue
        if site.path in gates and site.path not in followed:
            continue
        kind = record.kind or site.operation.kind
        wanted = _recurrent_format(host, settings.formats.of(site.path, kind), settings)
        reason, rule = _refusal(site, host, record, refused, settings, wanted, calibrated=observation.batches > 0)
        operands = () if reason else operand_plans(site, host, record, refused, settings, wanted, indivisible)
        # A computed weight is computed outside of its site.
        operands = tuple(
            replace(o, read_outside=None if o.computation else observation.read_outside.get(o.parameter or ""))
            for o in operands
        )
        if not reason:
            reason, rule = _product_alone(record, operands, settings), settings.profile.rule
        if not reason:
            reason = _whole(site, operands, wanted)
            rule = wanted.rule or (
                settings.profile.rule if reason is None else _rule(site, operands, refused, settings)
            )
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
            follows=tuple(sorted(record.follows)) if settings.profile.quantizes_outputs else (),
            beyond_half=observation.regions.wide.get(site.host_path),
            operands=operands,
        )
    if indivisible:
        raise ConfigError(indivisible)
    plan = _whole_attention(_fused_attention(plan, observation, settings.profile), settings.profile)
    plan = without_orphans(_tables_alone(_whole_recurrences(plan), settings))
    names = group_names(plan)
    return {
        path: replace(entry, operands=tuple(replace(o, group=names.get((path, o.name))) for o in entry.operands))
        for path, entry in plan.items()
    }


def _refusal(
    site: Site,
    host: nn.Module,
    record: SiteStatistics,
    refused: Mapping[str, str],
    settings: PlanSettings,
    wanted: Format,
    *,
    calibrated: bool,
) -> tuple[str | None, str | None]:
    """Return why a site is not quantized regardless of its ranges, and by which rule; (None, None) if it need not."""
    if record.calls == 0 and calibrated:
        # Whatever else holds for it: a branch that never runs counts for nothing.
        return ReasonCode.NEVER_RAN.text(), None
    if record.calls == 0 and site.source.counts:
        return ReasonCode.NOT_TENSORS.text(), None
    if site.path in refused:
        return ReasonCode.EXCLUDED.text(), refused[site.path]
    kind = record.kind or site.operation.kind
    off = by_kind(settings.switches, kind)
    if off is not None:
        return ReasonCode.SWITCHED_OFF.text(), off
    table = _table(kind, host, record, settings, wanted)
    if table is not None:
        return table, RuleKind.SWITCH.text(key="embedding", value="auto")
    if record.calls == 0:
        return ReasonCode.NOT_CALIBRATED.text(), None
    # An empty batch among others does not matter, and a number in an add is passed through: a sum that starts from 0
    # has tensors only in its later calls. Any other such call would round values that were not observed.
    harmless = {ReasonCode.EMPTY} | ({ReasonCode.NOT_TENSORS} if kind == "residual_add" else set())
    reasons = [reason for reason in record.reasons if record.fit == 0 or ReasonCode.of(reason) not in harmless]
    if reasons:
        return next((why for why in reasons if ReasonCode.of(why) is ReasonCode.TRANSFORMED), reasons[0]), None
    if record.left is not None:
        return record.left, None
    behind = settings.profile.quantizes_outputs and (kind == "output" or (kind == "residual_add" and record.follows))
    if kind not in settings.profile.site_kinds and not behind:
        return ReasonCode.NO_GAIN.text(target=settings.profile.name), settings.profile.rule
    if isinstance(host, RecurrentLayer) and not host.is_cell:
        whole = settings.profile.recurrence_reason(host.kind, host.weights, projects=host.projects)
        whole = whole or _unfit_for_steps(wanted, settings)
        if whole is not None:
            return whole, settings.profile.rule
    if wanted.dynamic and kind not in ("embedding", "output"):
        without = settings.profile.dynamic_reason(kind, record.depth or 0)
        if without is not None:
            return without, settings.profile.rule
    if kind == "output" and (wanted.activations is None or wanted.dynamic):
        return ReasonCode.NO_GAIN.text(target=settings.profile.name), settings.profile.rule
    if kind not in ("residual_add", "embedding", "output"):
        # A dimension that varies with the data is not checked: it may be large in use.
        depth, width = (size or settings.profile.min_gemm_dim or 1 for size in (record.depth, record.width))
        too_small = settings.profile.gemm_reason(depth, width, record.rows or 0)
        if too_small is not None:
            return too_small, settings.profile.rule
    missing = settings.profile.kernel_reason(site.operation.name)
    if missing is not None and wanted.activations is not None:
        return missing, settings.profile.rule
    wrong = _wrong_convolution(site, record, settings) if wanted.activations is not None else None
    return (None, None) if wrong is None else (wrong, settings.profile.rule)


def _recurrent_format(host: nn.Module, wanted: Format, settings: PlanSettings) -> Format:
    """Return the formats of a site; in a recurrent layer whose kernel takes ranges at run time, those of the kernel."""
    at_run_time = settings.profile.recurrences.at_run_time
    if not isinstance(host, RecurrentLayer) or host.is_cell or not at_run_time or wanted.activations is None:
        return wanted
    return wanted if wanted.activations.is_float else replace(wanted, activations=UINT8, dynamic=True)


def _unfit_for_steps(wanted: Format, settings: PlanSettings) -> str | None:
    """Return why a recurrent layer is not quantized in these formats; None if there is a loop with them."""
    plain = wanted.activations is not None and wanted.block_size is None and not wanted.weights.is_packed
    fits = plain and wanted.dynamic == settings.profile.recurrences.at_run_time
    return None if fits else ReasonCode.RECURRENT_FORMAT.text()


def _wrong_convolution(site: Site, record: SiteStatistics, settings: PlanSettings) -> str | None:
    """Return why the target would compute a convolution wrongly; None if it would not, or the weight is not known."""
    operand = record.operands.get("weight")
    if site.operation.geometry is not weighted or operand is None or operand.weight is None:
        return None
    shape = operand.weight.shape
    return settings.profile.convolution_reason(shape[1], shape[-1]) if site.operation.kind == "conv" else None


def _table(kind: str, host: nn.Module, record: SiteStatistics, settings: PlanSettings, wanted: Format) -> str | None:
    """Return why 'auto' leaves the table of an embedding in float; None if it does not."""
    if kind != "embedding" or settings.switches["embedding"] != "auto":
        return None
    table = record.operands["weight"].weight if "weight" in record.operands else None
    reason = settings.profile.table_reason(None if table is None else math.prod(table.shape))
    if reason is None and (wanted.weights != INT8 or wanted.block_size is not None or not settings.per_channel):
        return ReasonCode.TABLE_CODES.text()
    limited = reason is None and getattr(host, "max_norm", None) is not None
    return ReasonCode.TABLE_LIMITED.text() if limited else reason


def _tables_alone(plan: Plan, settings: PlanSettings) -> Plan:
    """Return the plan with the tables in float that 'auto' would store twice: others read them as floats."""
    if settings.switches["embedding"] != "auto":
        return plan
    left: Plan = {}
    for entry in plan.values():
        if entry.kind != "embedding" or not entry.quantized:
            continue
        table = entry.operands[0]
        tied = (other.name for other in plan.values() if not other.quantized and table.parameter in other.reads)
        where = next(tied, table.read_outside)
        if where is not None:
            rule = RuleKind.SWITCH.text(key="embedding", value="auto")
            left[entry.name] = _floated(entry, ReasonCode.TABLE_READ.text(where=where), rule)
    return {**plan, **left}


def _whole(site: Site, operands: tuple[OperandPlan, ...], wanted: Format) -> str | None:
    """Return why a whole site is not quantized; None if not. A product quantizes all operands, none, or weights
    only."""
    missing = [operand for operand in operands if not operand.quantized]
    if site.operation.kind != "residual_add":
        if len(operands) < len(site.operation.operands):
            return ReasonCode.OPERAND_UNSEEN.text()
        if wanted.activations is None and any(operand.quantized for operand in operands):
            return None
        return missing[0].reason if missing else None
    if any(operand.minimum is not None and operand.minimum <= _MASKED for operand in operands):
        return ReasonCode.ADD_MASK.text()
    return (missing[0].reason if missing else ReasonCode.NONE_SEEN.text()) if len(missing) == len(operands) else None


def _product_alone(record: SiteStatistics, operands: tuple[OperandPlan, ...], settings: PlanSettings) -> str | None:
    """Return why a residual add is not quantized if only its product's side can be quantized; None if it need not."""
    if settings.switches["residual_add"] != "auto":
        return None
    quantized = [operand for operand in operands if operand.quantized]
    missing = next((operand for operand in operands if not operand.quantized), None)
    if missing is None or len(quantized) != 1 or not record.operands[quantized[0].name].ends_branch:
        return None
    return settings.profile.add_reason(missing.name, missing.reason or "")


def _rule(
    site: Site, operands: tuple[OperandPlan, ...], refused: Mapping[str, str], settings: PlanSettings
) -> str | None:
    """Return the rule that keeps operands in float that could be quantized; None if there is none."""
    excluded = (refused.get(f"{site.path}.{operand.name}") for operand in operands)
    found = next((rule for rule in excluded if rule is not None), None)
    auto = site.operation.kind == "residual_add" and settings.switches["residual_add"] == "auto"
    return found or (RuleKind.SWITCH.text(key="residual_add", value="auto") if auto and operands else None)


def _products_by_function(plan: Plan) -> Iterable[list[SitePlan]]:
    """Return the products of two activations that ran, grouped by the function that they are in."""
    functions: dict[str, list[SitePlan]] = defaultdict(list)
    for entry in plan.values():
        if entry.kind == "matmul" and ReasonCode.of(entry.reason) is not ReasonCode.NEVER_RAN:
            functions[entry.name.rpartition(".")[0]].append(entry)
    return functions.values()


def _fused_attention(plan: Plan, observation: Seen, profile: TargetProfile) -> Plan:
    """Return the plan with all products of an attention in float if the target does not fuse it in its format."""
    left: Plan = {}
    for entries in _products_by_function(plan):
        records = [observation.records[entry.name] for entry in entries]
        if not any(operand.softmax for record in records for operand in record.operands.values()):
            continue
        reasons = (
            profile.attention_reason(operand.dtype, record.head or 0, record.sequence)
            for entry, record in zip(entries, records, strict=True)
            for operand in entry.operands
            if operand.quantized
        )
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is not None:
            left.update({entry.name: _floated(entry, reason, profile.rule) for entry in entries if entry.quantized})
    return {**plan, **left}


def _floated(entry: SitePlan, reason: str, rule: str | None) -> SitePlan:
    operands = tuple(replace(operand, quantized=False) for operand in entry.operands)
    return replace(entry, quantized=False, reason=reason, rule=rule, operands=operands)


def _whole_attention(plan: Plan, profile: TargetProfile) -> Plan:
    """Return the plan with FP8 products in float if others of their attention are not in FP8: it is fused whole."""
    torn = [
        entry
        for entries in _products_by_function(plan)
        if any(map(_in_fp8, entries)) and not all(map(_in_fp8, entries))
        for entry in entries
        if _in_fp8(entry)
    ]
    reason = ReasonCode.TORN_ATTENTION.text()
    return {**plan, **{entry.name: _floated(entry, reason, profile.rule) for entry in torn}}


def _whole_recurrences(plan: Plan) -> Plan:
    """Return the plan with all products of a recurrent layer in float if one of them is: its loop is one operator."""
    layers: dict[str, list[SitePlan]] = defaultdict(list)
    for entry in plan.values():
        layer = recurrent_layer(entry)
        if layer is not None and ReasonCode.of(entry.reason) is not ReasonCode.NEVER_RAN:
            layers[layer].append(entry)
    left: Plan = {}
    for entries in layers.values():
        out = next((entry for entry in entries if not entry.quantized), None)
        if out is not None:
            reason = ReasonCode.TORN_RECURRENCE.text(why=out.reason)
            left.update({entry.name: _floated(entry, reason, out.rule) for entry in entries if entry.quantized})
    return {**plan, **left}


def _in_fp8(entry: SitePlan) -> bool:
    return entry.quantized and all(qtype(operand.dtype).is_float for operand in entry.operands)
