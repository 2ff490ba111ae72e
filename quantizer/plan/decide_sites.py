"""Decide for each site whether to quantize it, and group the operands that change precision together.

A group holds both operands of a matrix multiplication. Layers that read the same tensor (query, key, value) form one
group, and so do the MatMuls of one attention (two activations, in one function of one module). Each operand of a
residual add is its own group. The output of a convolution is in the group of the convolution, together with operations
that the engine fuses into integer kernels. A recurrent layer with both its directions is one group, because its loop is
one operator.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from quantizer.errors import ConfigError
from quantizer.numerics.formats import INT8, UINT8, Format, qtype
from quantizer.observe.statistics import Seen, SiteStatistics
from quantizer.plan.decide_operands import PlanSettings, operand_plans
from quantizer.plan.reasons import ReasonCode, RuleKind, ran
from quantizer.plan.selection import by_kind
from quantizer.plan.site_plan import OperandPlan, Plan, SitePlan, summary, without_orphans
from quantizer.plan.targets import TargetProfile
from quantizer.proxy.generated_classes import original_class
from quantizer.proxy.recurrence import RecurrentLayer
from quantizer.proxy.site import OUTPUT, Site, SourceCall
from quantizer.rewrite.product_sizes import weighted
from quantizer.utils.records import is_of_torch

if TYPE_CHECKING:
    from quantizer.plan.site_plan import SitePlan


_RECURRENT = ("input_product", "recurrent_product")


def group_names(plan: Mapping[str, SitePlan]) -> dict[tuple[str, str], str]:
    """Return the precision group of each operand of a quantized site, by (site name, operand name)."""
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
            source = _source_of_output(path, plan)
            group = (
                names.get((source, plan[source].operands[0].name), source)
                if plan[source].kind != "residual_add"
                else source
            )
            names.update({(path, operand.name): group for operand in site.operands})
    return names


def _source_of_output(path: str, plan: Mapping[str, SitePlan]) -> str:
    """Return the convolution or add that produces an output site."""
    while plan[path].kind == "output":
        path = plan[path].follows[0]
    return path


def _key(site: SitePlan) -> str:
    """Return the group key of a site: sites with equal keys form one group."""
    layer = recurrent_layer(site)
    if layer is not None:
        return f"recurrence {layer}"
    if any(operand.role == "weight" for operand in site.operands):
        shared = next((operand.range_group for operand in site.operands if operand.role == "activation"), None)
        return f"input {shared}" if shared is not None else f"weight of {site.name}"
    return f"function {site.name.rpartition('.')[0]}"


def recurrent_layer(site: SitePlan) -> str | None:
    """Return the path of the recurrent layer of a site, without its direction; None for other sites."""
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
    """Return the length of the common prefix of all sequences."""
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*sequences, strict=False)))


_MASKED = torch.finfo(torch.float32).min / 2
"""Values at or below this limit count as those of an attention mask."""


def decide(
    proxy: nn.Module,
    sites: Iterable[Site],
    observation: Seen,
    refused: Mapping[str, str],
    settings: PlanSettings,
) -> Plan:
    """Return the plan of an observation: the formats and ranges of each site, or the reason why it is not quantized."""
    plan: Plan = {}
    indivisible: list[str] = []
    followed = {path for record in observation.records.values() for path in record.follows}
    calls = [module for module in proxy.modules() if isinstance(module, SourceCall)]
    gates = {f"{call.path}.{OUTPUT}" for call in calls if call.operation.is_gate}
    last = _last_of_few_channels(observation) if settings.profile.quantizes_outputs else frozenset()
    running = {
        site.host_path for site in sites if is_of_torch(site.source.file) and observation.records[site.path].calls
    }
    for site in sites:
        host = proxy.get_submodule(site.host_path)
        record = observation.records[site.path]
        if site.operation.name == OUTPUT and not record.operands:
            # No operation quantized it, or a normalization follows.
            continue
        if site.path in gates and site.path not in followed:
            continue
        kind = record.kind or site.operation.kind
        requested = _recurrent_format(host, settings.formats.of(site.path, kind), settings)
        calibrated = observation.batches > 0
        reason, rule = _refusal(site, host, record, refused, settings, requested, calibrated=calibrated)
        if record.calls == 0 and _is_other_branch(site, host, running, calibrated):
            reason, rule = ReasonCode.OTHER_BRANCH.text(), None
        if not reason and site.path in last:
            reason, rule = ReasonCode.FEW_RESULTS.text(), settings.profile.rule
        operands = () if reason else operand_plans(site, host, record, refused, settings, requested, indivisible)
        # A computed weight is computed outside of its site.
        operands = tuple(
            replace(o, read_outside=None if o.computation else observation.read_outside.get(o.parameter or ""))
            for o in operands
        )
        if not reason:
            reason, rule = _one_sided_add(record, operands, settings), settings.profile.rule
        if not reason:
            reason = _refusal_of_operands(site, operands, requested)
            rule = requested.rule or (
                settings.profile.rule if reason is None else _configured_rule(site, operands, refused, settings)
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
    plan = without_orphans(_without_shared_tables(_whole_recurrences(plan), settings))
    names = group_names(plan)
    return {
        path: replace(entry, operands=tuple(replace(o, group=names.get((path, o.name))) for o in entry.operands))
        for path, entry in plan.items()
    }


_FEW = 4
"""The most output channels of a convolution whose result may be a box."""


def _last_of_few_channels(observation: Seen) -> frozenset[str]:
    """Return the convolutions of few output channels whose result no other layer reads.

    In 8 bits, the distances of boxes cost YOLO26n 0.4 points of mAP; see benchmarks/results/detectors.md.
    """
    records = observation.records
    outputs = {path: record.follows for path, record in records.items() if record.kind == "output"}
    read = {
        name.rpartition(".")[0]
        for path, record in records.items()
        if path not in outputs
        for operand in record.operands.values()
        if operand.group is not None
        for name in operand.group.operands
    }.intersection(outputs)

    def is_read(path: str) -> bool:
        # A site may follow itself, where a loop joins its results.
        reached, number = {path}, 0
        while len(reached) > number:
            number = len(reached)
            reached |= {output for output, follows in outputs.items() if not reached.isdisjoint(follows)}
        return not reached.isdisjoint(read)

    few = (path for path, record in records.items() if record.kind == "conv" and 0 < (record.width or 0) <= _FEW)
    return frozenset(path for path in few if not is_read(path))


def _refusal(
    site: Site,
    host: nn.Module,
    record: SiteStatistics,
    refused: Mapping[str, str],
    settings: PlanSettings,
    requested: Format,
    *,
    calibrated: bool,
) -> tuple[str | None, str | None]:
    """Return the reason and the rule that keep a site in float regardless of its ranges; (None, None) if none do."""
    if record.calls == 0 and calibrated:
        # This reason comes first: other reasons do not matter for a branch that never runs.
        return ReasonCode.NEVER_RAN.text(), None
    if record.calls == 0 and site.source.counts:
        return ReasonCode.NOT_TENSORS.text(), None
    if site.path in refused:
        return ReasonCode.EXCLUDED.text(), refused[site.path]
    kind = record.kind or site.operation.kind
    switch = by_kind(settings.switches, kind)
    if switch is not None:
        return ReasonCode.SWITCHED_OFF.text(), switch
    table = _table_refusal(kind, host, record, settings, requested)
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
    if record.width == 1 and any(operand.softmax for operand in record.operands.values()):
        # Rounded to 8 bits, it costs YOLO11n 0.6 points of mAP, for 0.02% of the multiply-adds; see
        # benchmarks/results/detectors.md.
        return ReasonCode.EXPECTED_VALUE.text(), None
    follows_convolution = settings.profile.quantizes_outputs and (
        kind == "output" or (kind == "residual_add" and record.follows)
    )
    if kind not in settings.profile.site_kinds and not follows_convolution:
        return ReasonCode.NO_GAIN.text(target=settings.profile.name), settings.profile.rule
    if isinstance(host, RecurrentLayer) and not host.is_cell:
        recurrent = settings.profile.recurrence_reason(host.kind, host.weights, projects=host.projects)
        recurrent = recurrent or _unfit_for_steps(requested, settings)
        if recurrent is not None:
            return recurrent, settings.profile.rule
    if requested.dynamic and kind not in ("embedding", "output"):
        dynamic = settings.profile.dynamic_reason(kind, record.depth or 0)
        if dynamic is not None:
            return dynamic, settings.profile.rule
    if kind == "output" and (requested.activations is None or requested.dynamic):
        return ReasonCode.NO_GAIN.text(target=settings.profile.name), settings.profile.rule
    if kind not in ("residual_add", "embedding", "output"):
        # A dimension that varies with the data is not checked: it may be large in use.
        depth, width = (size or settings.profile.min_gemm_dim or 1 for size in (record.depth, record.width))
        too_small = settings.profile.gemm_reason(depth, width, record.rows or 0)
        if too_small is not None:
            return too_small, settings.profile.rule
    missing = settings.profile.kernel_reason(site.operation.name)
    if missing is not None and requested.activations is not None:
        return missing, settings.profile.rule
    wrong = _wrong_convolution(site, record, settings) if requested.activations is not None else None
    return (None, None) if wrong is None else (wrong, settings.profile.rule)


def _is_other_branch(site: Site, host: nn.Module, running: Set[str], calibrated: bool) -> bool:
    """Return whether a site without calls is a branch in the code of torch that its module does not take.

    Args:
        site: the site.
        host: its module.
        running: the paths of modules that ran a site of torch's code.
        calibrated: whether calls were counted.
    """
    if isinstance(host, RecurrentLayer):
        return not host.projects and site.source.name.endswith("recurrent_product_1")
    if not is_of_torch(site.source.file):
        return False
    if isinstance(host, _ConvNd) and site.source.name.startswith("_conv_forward."):
        # The first call is behind F.pad, the second one pads with zeros.
        return site.source.name.endswith("_0") == (host.padding_mode == "zeros")
    if site.operation.kind == "residual_add" and (calibrated or isinstance(host, _ConvTransposeNd)):
        # A counter of batches, or sizes: not the values of a model.
        return True
    # The attention of torch reads the weight of its layer out_proj, and does not call the layer.
    return bool(running & {site.host_path, site.host_path.rpartition(".")[0]})


def _recurrent_format(host: nn.Module, requested: Format, settings: PlanSettings) -> Format:
    at_run_time = settings.profile.recurrences.at_run_time
    if not isinstance(host, RecurrentLayer) or host.is_cell or not at_run_time or requested.activations is None:
        return requested
    return requested if requested.activations.is_float else replace(requested, activations=UINT8, dynamic=True)


def _unfit_for_steps(requested: Format, settings: PlanSettings) -> str | None:
    """Return why a recurrent layer cannot be quantized in these formats; None if it can."""
    plain = requested.activations is not None and requested.block_size is None and not requested.weights.is_packed
    fits = plain and requested.dynamic == settings.profile.recurrences.at_run_time
    return None if fits else ReasonCode.RECURRENT_FORMAT.text()


def _wrong_convolution(site: Site, record: SiteStatistics, settings: PlanSettings) -> str | None:
    """Return why the target would compute a convolution incorrectly; None if it would not."""
    operand = record.operands.get("weight")
    if site.operation.geometry is not weighted or operand is None or operand.weight is None:
        return None
    shape = operand.weight.shape
    return settings.profile.convolution_reason(shape[1], shape[-1]) if site.operation.kind == "conv" else None


def _table_refusal(
    kind: str, host: nn.Module, record: SiteStatistics, settings: PlanSettings, requested: Format
) -> str | None:
    """Return why 'auto' keeps an embedding table in float; None if it does not."""
    if kind != "embedding" or settings.switches["embedding"] != "auto":
        return None
    table = record.operands["weight"].weight if "weight" in record.operands else None
    reason = settings.profile.table_reason(None if table is None else math.prod(table.shape))
    if reason is None and (requested.weights != INT8 or requested.block_size is not None or not settings.per_channel):
        return ReasonCode.TABLE_CODES.text()
    limited = reason is None and getattr(host, "max_norm", None) is not None
    return ReasonCode.TABLE_LIMITED.text() if limited else reason


def _without_shared_tables(plan: Plan, settings: PlanSettings) -> Plan:
    """Return the plan without tables that 'auto' would store twice because other code reads them in float."""
    if settings.switches["embedding"] != "auto":
        return plan
    unquantized: Plan = {}
    for entry in plan.values():
        if entry.kind != "embedding" or not entry.quantized:
            continue
        table = entry.operands[0]
        readers = (other.name for other in plan.values() if not other.quantized and table.parameter in other.reads)
        where = next(readers, table.read_outside)
        if where is not None:
            rule = RuleKind.SWITCH.text(key="embedding", value="auto")
            unquantized[entry.name] = _floated(entry, ReasonCode.TABLE_READ.text(where=where), rule)
    return {**plan, **unquantized}


def _refusal_of_operands(site: Site, operands: tuple[OperandPlan, ...], requested: Format) -> str | None:
    """Return why the plans of its operands keep a site in float; None if they do not."""
    missing = [operand for operand in operands if not operand.quantized]
    if site.operation.kind != "residual_add":
        if len(operands) < len(site.operation.operands):
            return ReasonCode.OPERAND_UNSEEN.text()
        if requested.activations is None and any(operand.quantized for operand in operands):
            return None
        return missing[0].reason if missing else None
    if any(operand.minimum is not None and operand.minimum <= _MASKED for operand in operands):
        return ReasonCode.ADD_MASK.text()
    return (missing[0].reason if missing else ReasonCode.NONE_SEEN.text()) if len(missing) == len(operands) else None


def _one_sided_add(record: SiteStatistics, operands: tuple[OperandPlan, ...], settings: PlanSettings) -> str | None:
    """Return why a residual add is not quantized if only the layer's side can be quantized; None if none."""
    if settings.switches["residual_add"] != "auto":
        return None
    quantized = [operand for operand in operands if operand.quantized]
    missing = next((operand for operand in operands if not operand.quantized), None)
    if missing is None or len(quantized) != 1 or not record.operands[quantized[0].name].ends_branch:
        return None
    return settings.profile.add_reason(missing.name, missing.reason or "")


def _configured_rule(
    site: Site, operands: tuple[OperandPlan, ...], refused: Mapping[str, str], settings: PlanSettings
) -> str | None:
    """Return the configured rule that keeps quantizable operands in float; None if there is none."""
    excluded = (refused.get(f"{site.path}.{operand.name}") for operand in operands)
    rule = next((each for each in excluded if each is not None), None)
    auto = site.operation.kind == "residual_add" and settings.switches["residual_add"] == "auto"
    return rule or (RuleKind.SWITCH.text(key="residual_add", value="auto") if auto and operands else None)


def _products_by_function(plan: Plan) -> Iterable[list[SitePlan]]:
    """Return the MatMuls of two activations that ran, grouped by their function."""
    functions: dict[str, list[SitePlan]] = defaultdict(list)
    for entry in plan.values():
        if entry.kind == "matmul" and ran(entry.reason):
            functions[entry.name.rpartition(".")[0]].append(entry)
    return functions.values()


def _fused_attention(plan: Plan, observation: Seen, profile: TargetProfile) -> Plan:
    unquantized: Plan = {}
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
            unquantized.update(
                {entry.name: _floated(entry, reason, profile.rule) for entry in entries if entry.quantized}
            )
    return {**plan, **unquantized}


def _floated(entry: SitePlan, reason: str, rule: str | None) -> SitePlan:
    operands = tuple(replace(operand, quantized=False) for operand in entry.operands)
    return replace(entry, quantized=False, reason=reason, rule=rule, operands=operands)


def _whole_attention(plan: Plan, profile: TargetProfile) -> Plan:
    """Return the plan with the FP8 MatMuls of an attention in float unless all of its MatMuls are FP8."""
    partial = [
        entry
        for entries in _products_by_function(plan)
        if any(map(_in_fp8, entries)) and not all(map(_in_fp8, entries))
        for entry in entries
        if _in_fp8(entry)
    ]
    reason = ReasonCode.TORN_ATTENTION.text()
    return {**plan, **{entry.name: _floated(entry, reason, profile.rule) for entry in partial}}


def _whole_recurrences(plan: Plan) -> Plan:
    """Return the plan with a recurrent layer in float unless all its MatMuls are quantized."""
    layers: dict[str, list[SitePlan]] = defaultdict(list)
    for entry in plan.values():
        layer = recurrent_layer(entry)
        if layer is not None and ran(entry.reason):
            layers[layer].append(entry)
    unquantized: Plan = {}
    for entries in layers.values():
        in_float = next((entry for entry in entries if not entry.quantized), None)
        if in_float is not None:
            reason = ReasonCode.TORN_RECURRENCE.text(why=in_float.reason)
            unquantized.update(
                {entry.name: _floated(entry, reason, in_float.rule) for entry in entries if entry.quantized}
            )
    return {**plan, **unquantized}


def _in_fp8(entry: SitePlan) -> bool:
    return entry.quantized and all(qtype(operand.dtype).is_float for operand in entry.operands)
