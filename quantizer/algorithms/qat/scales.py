"""Scales in training: fixed, learned, or moving averages of the scale that each step needs.

Legend: x [*] the operand; s its scale [], [C] or in blocks; z its zero point (0 if there is none).

    s' = max(max(x) / (qmax - z), -min(x) / (z - qmin))        the smallest scale that clips nothing
    s  <- MOMENTUM * s + (1 - MOMENTUM) * s'

A learned scale is the calibrated scale times a factor, whose parameter starts at 0 (LSQ, Esser et al. 2020,
arXiv:1902.08153). Operands that read one tensor share a parameter, as they share one Q in the exported file.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from quantizer.errors import ConfigError
from quantizer.numerics.formats import qtype
from quantizer.numerics.granularity import beside, in_blocks
from quantizer.observe.statistics import read_mask, without_padding
from quantizer.plan.replace_scales import scale_group
from quantizer.plan.selection import matches
from quantizer.plan.site_plan import OperandPlan, Plan
from quantizer.proxy.build import quantizers_of, sites_of
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.utils.distributed import all_reduce_tensor

MOMENTUM = 0.9


class Padding:
    """The mask of the current batch, which separates real tokens from padding.

    Attributes:
        mask: [B, S]; None: all tokens are real.
    """

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self._warned_of_mask = False

    def read(self, keywords: Mapping[str, Any], args: tuple[Any, ...]) -> None:
        """Store the mask of a batch; if its meaning is doubtful, store None and warn once."""
        self.mask, doubt = read_mask(keywords, args)
        if doubt is not None and not self._warned_of_mask:
            self._warned_of_mask = True
            warnings.warn(doubt, stacklevel=2)

    def keep(self, proxy: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Store the mask of the batch, as a forward pre-hook of ``proxy``.

        It is a method, not a closure, so that a copy of the proxy has a copy of this object.
        """
        self.read(keywords, args)


class MovingAverage:
    """The moving average of one scale, and the quantizers of the operands that share it.

    It keeps the maximum of all values until the next ``step``, so that gradient checkpointing and gradient accumulation
    do not count values twice. A pass counts if gradients are recorded, in train and in eval mode, because some
    trainings run in eval mode; run evaluations under ``torch.no_grad()``.
    """

    def __init__(self, padding: Padding) -> None:
        self.quantizers: list[OperandQuantizer] = []
        self._padding = padding
        self._needed: Tensor | None = None

    def __call__(self, x: Tensor, quantizer: OperandQuantizer) -> None:
        if quantizer.of_samples:
            x = without_padding(x, self._padding.mask)
        if x.numel() == 0:
            return
        needed = least_scale(x, quantizer)
        # No scale can cover infinities or NaN, and they would stay in the average.
        needed = torch.where(needed.isfinite(), needed, 0)
        self._needed = needed if self._needed is None else torch.maximum(self._needed, needed)

    def step(self) -> None:
        """Move the scale towards the range of all values since the last step, over all ranks."""
        scale = self.quantizers[0].scale
        assert scale is not None
        needed = torch.zeros_like(scale) if self._needed is None else self._needed
        needed = all_reduce_tensor(needed, largest=True)
        self._needed = None
        # Without values, or with zeros only, the scale does not change.
        moved = torch.where(needed > 0, MOMENTUM * scale + (1 - MOMENTUM) * needed, scale)
        for quantizer in self.quantizers:
            assert quantizer.scale is not None
            quantizer.scale.copy_(moved)


def step_averages(quantizers: Iterable[OperandQuantizer]) -> None:
    """Move each scale that is a moving average once, also if several quantizers share it."""
    averages = {id(q.watcher): q.watcher for q in quantizers if isinstance(q.watcher, MovingAverage)}
    for average in averages.values():
        average.step()


def least_scale(x: Tensor, quantizer: OperandQuantizer) -> Tensor:
    """Return the smallest scale, in the shape of the quantizer's, that clips no value of x."""
    scale, kind = quantizer.scale, qtype(quantizer.dtype)
    assert scale is not None
    zero = 0 if quantizer.zero_point is None else int(quantizer.zero_point)
    # Without a zero point int8 is symmetric: qmax determines the range, although the lowest integer is -qmax - 1.
    low = -kind.qmax if quantizer.zero_point is None else kind.qmin - zero
    values = in_blocks(x.float(), quantizer.axis, quantizer.block_size)
    shape = beside(scale, x.dim(), quantizer.axis, quantizer.block_size).shape
    axes = [axis for axis in range(values.dim()) if not shape or shape[axis] == 1]
    needed = values.amax(axes) / max(kind.qmax - zero, 1)
    if low:
        needed = torch.maximum(needed, values.amin(axes) / low)
    return needed.clamp_min(0).reshape(scale.shape).to(scale.dtype)


ScaleKind = Literal["fixed", "average", "learned"]

Scales = ScaleKind | Mapping[str, ScaleKind]
"""One kind for all scales, or kinds by pattern of a site's or operand's name (``**.add_*``, ``**.weight``).

The last matching pattern decides; scales that no pattern matches are fixed.
"""


def kinds_of(plan: Plan, scales: Scales) -> dict[str, ScaleKind]:
    """Return the kind of each scale of a plan, by ``SITE.OPERAND``.

    Raises:
        ConfigError: a kind is unknown, a pattern matches nothing, or operands that share a scale have several kinds;
            the message lists all problems.
    """
    rules: Mapping[str, Any] = {"**": scales} if isinstance(scales, str) else scales
    known = get_args(ScaleKind)
    problems = [
        f"qat(scales={scales!r}): unknown kind {kind!r}; expected {', '.join(known)}, or a mapping from patterns to "
        "these"
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
                f"qat(scales=...): {other} is {kinds[other]} and {name} is {kinds[name]}, but they read the same "
                "tensor and share a scale; use the same kind for both"
            )
    if problems:
        raise ConfigError(problems)
    return kinds


def set_up_scales(proxy: nn.Module, plan: Plan, kinds: Mapping[str, ScaleKind], scale_dtype: torch.dtype) -> None:
    """Set up each scale of a proxy by its kind; the plan must be applied to the proxy.

    Args:
        proxy: the proxy to train.
        plan: the plan of the proxy.
        kinds: the kinds of the scales, by ``SITE.OPERAND``.
        scale_dtype: the float type of scales on the target; training uses scales of this type.
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
    """Return the scales that differ from the plan's, by ``SITE.OPERAND``."""
    planned = {name: operand for name, operand, _, _ in _scaled(proxy, plan)}
    now: dict[str, list[Tensor]] = defaultdict(list)
    for name, _, _, quantizer in _scaled(proxy, plan):
        now[name].append(quantizer.current_scale())
    scales = {
        name: torch.stack(values) if planned[name].several_ranges else values[0].clone() for name, values in now.items()
    }
    former = {
        name: operand.call_scales if operand.several_ranges else operand.scale for name, operand in planned.items()
    }
    return {name: scale for name, scale in scales.items() if not _same(scale, former[name])}


def fix_scales(proxy: nn.Module) -> None:
    """Fix all scales at their current values; call it again after each later step of the optimizer."""
    quantizers = quantizers_of(proxy)
    for quantizer in quantizers:
        quantizer.fix_scale()
    # The optimizer's momentum still moves the parameters, which a checkpoint would store as a change of the scale.
    with torch.no_grad():
        for quantizer in quantizers:
            if quantizer.change is not None:
                quantizer.change.zero_()


def _same(scale: Tensor, planned: Tensor | None) -> bool:
    return planned is not None and torch.equal(scale.detach().cpu(), planned.cpu())


def _scaled(proxy: nn.Module, plan: Plan) -> Iterator[tuple[str, OperandPlan, Hashable, OperandQuantizer]]:
    """Yield every scale of a quantized operand: name, plan, key of operands that share the scale, and quantizer.

    An operand whose calls have ranges of their own yields one scale for each call.
    """
    for site in sites_of(proxy):
        for operand in plan[site.path].operands:
            if not operand.quantized or operand.dynamic:
                continue
            name, quantizer = f"{site.path}.{operand.name}", site.quantizer_of(operand.name)
            shared = None if operand.range_group is None else scale_group(replace(operand, calls=()))
            for number, call in enumerate(operand.calls):
                # Calls with the common range share it with no other operand.
                key = (name, number) if call.tensor < 0 else (shared, call.tensor)
                yield name, operand, key, quantizer.of_call(number)
            if not operand.calls:
                yield name, operand, shared or name, quantizer
