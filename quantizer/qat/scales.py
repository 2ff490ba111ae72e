"""The kinds of scales in training: fixed, following the operand's range, or learned.

A learned scale is the calibrated scale times a factor, whose parameter starts at 0 (LSQ, Esser et al. 2020,
arXiv:1902.08153). Operands that read one tensor share a parameter, as they share one Q in the exported file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from quantizer.errors import ConfigError
from quantizer.plan.replace_scales import scale_group
from quantizer.plan.selection import matches
from quantizer.plan.site_plan import OperandPlan, Plan
from quantizer.proxy.build import quantizers_of, sites_of
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.qat.moving_average import MovingAverage, Padding

ScaleKind = Literal["fixed", "average", "learned"]

Scales = ScaleKind | Mapping[str, ScaleKind]
"""One kind for all scales, or kinds by pattern of a site's or operand's name (``**.add_*``, ``**.weight``). If several
patterns match, the last decides; scales that no pattern matches are fixed."""


def kinds_of(plan: Plan, scales: Scales) -> dict[str, ScaleKind]:
    """Return the kind of each scale of a plan, by ``SITE.OPERAND``.

    Raises:
        ConfigError: a kind is unknown, a pattern matches nothing, or operands that share a scale have several kinds;
            all problems are listed.
    """
    rules: Mapping[str, Any] = {"**": scales} if isinstance(scales, str) else scales
    known = get_args(ScaleKind)
    problems = [
        f"qat(scales={scales!r}): {kind!r} is no kind of scales; expected {', '.join(known)}, or such by pattern"
        for kind in rules.values()
        if kind not in known
    ]
    operands = [
        (path, f"{path}.{operand.name}", scale_group(operand))
        for path, entry in plan.items()
        for operand in entry.operands
        if operand.quantized and not operand.dynamic
    ]
    kinds: dict[str, ScaleKind] = {name: "fixed" for _, name, _ in operands}
    for pattern, kind in rules.items():
        hits = [name for path, name, _ in operands if matches(pattern, path) or matches(pattern, name)]
        if not hits and operands:
            problems.append(f"qat(scales=...): {pattern!r} matches no quantized site or operand; q.coverage lists them")
        kinds |= dict.fromkeys(hits, kind)
    shared: dict[Hashable, str] = {}
    for _, name, group in operands:
        other = shared.setdefault(group, name) if group is not None else name
        if kinds[other] != kinds[name]:
            problems.append(
                f"qat(scales=...): {other} is {kinds[other]} and {name} is {kinds[name]}, but they read one tensor and "
                "share one scale; give both the same kind"
            )
    if problems:
        raise ConfigError(problems)
    return kinds


def set_up_scales(proxy: nn.Module, plan: Plan, kinds: Mapping[str, ScaleKind], scale_dtype: torch.dtype) -> None:
    """Set up each scale of a proxy by its kind; the plan must have been applied to the proxy.

    Args:
        proxy: the proxy to train.
        plan: the plan of the proxy.
        kinds: the kinds of the scales, by ``SITE.OPERAND``.
        scale_dtype: the float type of scales on the target; training rounds with scales of this type.
    """
    changes: dict[Hashable, nn.Parameter] = {}
    averages: dict[Hashable, MovingAverage] = {}
    padding = Padding()
    for name, operand, group, quantizer in _scaled(proxy, plan):
        assert quantizer.scale is not None
        quantizer.of_samples = operand.role != "weight"
        quantizer.scale_dtype = None if kinds[name] == "fixed" else scale_dtype
        if kinds[name] == "learned":
            parameter = nn.Parameter(torch.zeros_like(quantizer.scale))
            quantizer.learn_scale(changes.setdefault(group, parameter))
        elif kinds[name] == "average":
            quantizer.watcher = average = averages.setdefault(group, MovingAverage(padding))
            average.quantizers.append(quantizer)
    if averages:
        proxy.register_forward_pre_hook(padding.keep, with_kwargs=True)


def changed_scales(proxy: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """Return the scales that differ from the plan's now, by ``SITE.OPERAND``."""
    planned = {name: operand for name, operand, _, _ in _scaled(proxy, plan)}
    now: dict[str, list[Tensor]] = defaultdict(list)
    for name, _, _, quantizer in _scaled(proxy, plan):
        now[name].append(quantizer.current_scale())
    scales = {
        name: torch.stack(found) if planned[name].several_ranges else found[0].clone() for name, found in now.items()
    }
    former = {
        name: operand.call_scales if operand.several_ranges else operand.scale for name, operand in planned.items()
    }
    return {name: scale for name, scale in scales.items() if not _same(scale, former[name])}


def fix_scales(proxy: nn.Module) -> None:
    """Fix all scales at their current values. Call it again after each later step of the optimizer."""
    quantizers = quantizers_of(proxy)
    for quantizer in quantizers:
        quantizer.fix_scale()
    # The optimizer's momentum still moves the parameters; a checkpoint would hold that as a change of the scale.
    with torch.no_grad():
        for quantizer in quantizers:
            if quantizer.change is not None:
                quantizer.change.zero_()


def _same(scale: Tensor, planned: Tensor | None) -> bool:
    return planned is not None and torch.equal(scale.detach().cpu(), planned.cpu())


def _scaled(proxy: nn.Module, plan: Plan) -> Iterator[tuple[str, OperandPlan, Hashable, OperandQuantizer]]:
    """Yield every scale of a quantized operand: its name, plan and quantizer, and a key that those that share it have.

    An operand whose calls have ranges of their own has a scale for each call, and comes as often.
    """
    for site in sites_of(proxy):
        for operand in plan[site.path].operands:
            if not operand.quantized or operand.dynamic:
                continue
            name, quantizer = f"{site.path}.{operand.name}", site.quantizer_of(operand.name)
            shared = None if operand.range_group is None else scale_group(replace(operand, calls=()))
            for number, call in enumerate(operand.calls):
                # Calls with the range of all calls share it with no other operand.
                key = (name, number) if call.tensor < 0 else (shared, call.tensor)
                yield name, operand, key, quantizer.of_call(number)
            if not operand.calls:
                yield name, operand, shared or name, quantizer
