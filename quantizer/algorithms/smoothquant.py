"""SmoothQuant, the migration of outliers from activations to weights (Xiao et al. 2023, arXiv:2211.10438).

Legend: x [.., K] an activation, W the weights of the linear layers that read it, s [K] > 0; channel j is index j along
K.

    (x / s) (W * s) = x W        s_j = m_j**alpha / max|W_j|**(1 - alpha)        (equation 4 of the paper)

In the paper m_j is max|x_j|; here it is at least 1.5 times the median of max|x_j| over all channels. Without this floor
each of a thousand quiet channels would fill the range, and values that calibration did not observe would be clipped.

An activation has one scale for all its channels, so a few channels with huge values reduce the precision of all others.
Weights have few outliers, and precision to spare. All linear layers that read x must divide it by the same s, so
max|W_j| is over all of them, and any other site that reads x must read it in float.

The largest magnitude of each channel is exact over all of calibration. The distribution of x / s comes from the stored
batches, because s is known only at the end; its bounds are exact, and so is the range of calibrator ``max``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quantizer.algorithms.algorithm import Work
from quantizer.algorithms.replay import SiteCall, visit_calls
from quantizer.observe.range_group import Migration, OperandRecord, RangeGroup
from quantizer.observe.snapshot import add_over_ranks
from quantizer.observe.statistics import Seen
from quantizer.plan.site_plan import Plan

ALPHAS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.85)
"""The values of alpha among which ``auto`` chooses, besides no smoothing."""

_FLOOR = 1.5
"""The smallest magnitude of a channel, in medians over all channels; see docs/design/calibration.md."""

_LEAST = 1e-5
"""The smallest magnitude as a share of the largest, so that channels of zeros have a finite factor."""


def migration_factors(activation: Tensor, weight: Tensor, alpha: float, dtype: torch.dtype) -> Tensor:
    """Return the SmoothQuant factor of each channel, s [K] in float32.

        s_j = max(activation_j, floor)**alpha / weight_j**(1 - alpha)

    The floor is 1.5 times the median of ``activation``, and at least 1e-5 of its largest value. Weights have a floor of
    1e-5 of the largest as well. If all activations or all weights are 0, all factors are 1.

    Args:
        activation: max|x_j|, [K].
        weight: max|W_j| over all weights that multiply x, [K].
        alpha: the migration strength, in (0, 1]; 1 moves all outliers into the weights.
        dtype: the float type of 1 / s on the target; the result is the inverse of 1 / s rounded to it.
    """
    if not bool(activation.any()) or not bool(weight.any()):
        return torch.ones_like(activation, dtype=torch.float32)
    floor = max(_FLOOR * float(activation.double().median()), _LEAST * float(activation.max()))
    # Saved ranges are on the CPU.
    activation = activation.to(weight.device)
    x, w = activation.double().clamp(min=floor), weight.double().clamp(min=_LEAST * float(weight.max()))
    return held_factors(w ** (1 - alpha) / x**alpha, dtype)


def held_factors(inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return s such that the target's float type represents 1 / s exactly."""
    info = torch.finfo(dtype)
    return inverse.clamp(info.smallest_normal, info.max).to(dtype).double().reciprocal().float()


def fit_migrations(observation: Seen, dtype: torch.dtype) -> None:
    """Round all SmoothQuant factors such that ``dtype``, the float type of a target, represents 1 / s exactly.

    The factors change in place. The ranges do not change.
    """
    for group in observation.groups:
        if group.migration is not None:
            factors = held_factors(group.migration.factors.double().reciprocal(), dtype)
            group.migration = replace(group.migration, factors=factors)
    for site in observation.records.values():
        for record in site.operands.values():
            if record.spread is not None:
                record.spread = held_factors(record.spread.double().reciprocal(), dtype)


@dataclass(kw_only=True, slots=True, eq=False)
class _Readers:
    """The linear layers that read one tensor.

    Attributes:
        sites: the names of the layers.
        operands: the name of the activation in each, ``SITE.OPERAND``.
        records: the record of the activation in each.
        group: the range group of the activation, with a range per channel.
        weight: max|W_j| over all their weights, [K].
        ranges: the range group of x / s by alpha.
    """

    sites: list[str]
    operands: list[str]
    records: list[OperandRecord]
    group: RangeGroup
    weight: Tensor
    ranges: dict[float, RangeGroup] = field(default_factory=dict)

    def take(self, alpha: float | None) -> None:
        for record in self.records:
            record.smoothed = None if alpha is None else self.ranges[alpha]

    def leave(self, reason: str) -> None:
        """Use the range without smoothing, and record why."""
        self.take(None)
        for record in self.records:
            record.left = f"not smoothed: {reason}"


class Smoothing:
    """The activations of linear layers that can be smoothed, with their ranges for several alphas.

    The constructor sets ``left`` of the other activations of linear layers to the reason; ``take`` smooths.

    Under ``torch.distributed`` all ranks must construct it; ranges come from the stored batches of all ranks.
    """

    def __init__(self, work: Work, plan: Plan, shares: Sequence[float]) -> None:
        """Compute the ranges for ``shares``, the values of alpha for ``take``; ``plan`` has no smoothing yet."""
        dtype, make = work.planned.scale_dtype, work.settings.make_calibrator
        candidates = list(_readers(plan, work.observed))
        for readers in candidates:
            for alpha in shares:
                assert readers.group.channels is not None
                factors = migration_factors(readers.group.channels.magnitude, readers.weight, alpha, dtype)
                migration = Migration(alpha=alpha, factors=factors)
                readers.ranges[alpha] = readers.group.migrated(migration, readers.operands, make)
        _estimate(work, candidates)
        self._readers = []
        for readers in candidates:
            if all(group.calibrator.count for group in readers.ranges.values()):
                self._readers.append(readers)
            else:
                readers.leave("no stored batch reaches it")

    def take(self, share: float | None) -> None:
        """Smooth all tensors with one alpha; None: none of them."""
        for readers in self._readers:
            readers.take(share)

    def leave(self, reason: str) -> None:
        """Smooth no tensor, and record why."""
        for readers in self._readers:
            readers.leave(reason)


def _readers(plan: Plan, observation: Seen) -> Iterator[_Readers]:
    """Yield the tensors that only linear layers read in low precision; record the reason for other activations."""
    members: dict[RangeGroup, list[tuple[str, str, OperandRecord]]] = defaultdict(list)
    for path, entry in plan.items():
        for operand in entry.operands:
            record = observation.records[path].operands[operand.name]
            if operand.quantized and record.group is not None:
                members[record.group].append((path, operand.name, record))
    for group, readers in members.items():
        linears = [(path, name, record) for path, name, record in readers if plan[path].kind == "linear"]
        if not linears:
            continue
        others = [path for path, _, _ in readers if plan[path].kind != "linear"]
        weights = [weight for path, _, _ in linears if (weight := weight_record(observation, path)) is not None]
        reason = None
        if others:
            reason = f"{others[0]} reads the same tensor in low precision"
        elif len(weights) < len(linears):
            reason = "its weight is computed, so factors cannot be folded into it"
        elif any(weight.inner is None for weight in weights):
            reason = "its channels are not the last axis"
        elif group.channels is None:
            reason = "its number of channels varies"
        if reason is not None or group.channels is None:
            for _, _, record in linears:
                record.left = f"not smoothed: {reason}"
            continue
        yield _Readers(
            sites=[path for path, _, _ in linears],
            operands=[f"{path}.{name}" for path, name, _ in linears],
            records=[record for _, _, record in linears],
            group=group,
            weight=torch.stack([_magnitude(weight) for weight in weights]).amax(0),
        )


def weight_record(observation: Seen, path: str) -> OperandRecord | None:
    """Return the record of the weight of a site; None without one."""
    records = observation.records[path].operands.values()
    return next((record for record in records if record.weight is not None), None)


def _magnitude(record: OperandRecord) -> Tensor:
    """Return max|W_j|, [K]."""
    assert record.weight is not None
    assert record.inner is not None
    weight = record.weight.tensor().float().abs()
    return weight.movedim(record.inner, -1).flatten(0, -2).amax(0) if weight.dim() > 1 else weight


def _estimate(work: Work, candidates: Sequence[_Readers]) -> None:
    """Observe x / s of the stored batches, and its bounds over all of calibration."""
    by_site = {path: readers for readers in candidates for path in readers.sites}

    def visit(call: SiteCall) -> None:
        readers = by_site[call.site.path]
        place = readers.sites.index(call.site.path)
        x = call.operand(readers.operands[place].rpartition(".")[2])
        if isinstance(x, Tensor):
            for group in readers.ranges.values():
                group.observe(x / _factors(group).to(x.device), readers.records[place].tensor_of(call.number))

    sites = [site for site in work.proxy.sites if site.path in by_site]
    visit_calls(work.proxy.module, sites, work.kept.few(), visit, "smoothing")
    groups = [(readers.group, group) for readers in candidates for group in readers.ranges.values()]
    pairs = [
        pair
        for original, group in groups
        for pair in zip((original, *original.parts), (group, *group.parts), strict=True)
    ]
    add_over_ranks([group.calibrator for _, group in pairs])
    for original, group in pairs:
        if original.channels is not None and group.calibrator.count:
            low, high = original.channels.low / _factors(group), original.channels.high / _factors(group)
            group.calibrator.widen(*torch.stack((low.min(), high.max())).tolist())


def _factors(group: RangeGroup) -> Tensor:
    assert group.migration is not None
    return group.migration.factors
