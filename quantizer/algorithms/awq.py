"""AWQ factors for linear layers whose weight alone is quantized (see ``numerics/weight_codes.py``).

As in the paper, inputs come from the float model, on stored batches and without padding. Linear layers that read one
tensor share their factors, so export folds them into the normalization or layer before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantizer.algorithms.algorithm import UNREACHED, Algorithm, Work, with_all_batches
from quantizer.algorithms.replay import Replay
from quantizer.algorithms.smoothquant import held_factors
from quantizer.functional import fake_quantize
from quantizer.numerics.weight_codes import awq_share, input_factors
from quantizer.observe.calibrators import make_calibrator
from quantizer.observe.range_group import Migration, OperandRecord, RangeGroup, RoundedWeight
from quantizer.observe.replay_batches import MANY
from quantizer.observe.statistics import with_zeroed_padding
from quantizer.plan.decide_operands import PlanSettings
from quantizer.plan.site_plan import OperandPlan, Plan
from quantizer.plan.weight_scales import as_rounded, scaled_for
from quantizer.proxy.site import Site
from quantizer.utils.progress import counted


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Linear:
    """A linear layer whose weight alone is quantized."""

    site: Site
    place: int
    weight: OperandPlan
    record: OperandRecord
    activation: OperandRecord
    name: str

    def rows(self, settings: PlanSettings) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the weight W [N, K], and a function from s [K] to Q(W s) / s."""
        assert self.record.weight is not None
        assert self.record.inner is not None
        weight, inner = self.record.weight.tensor().detach().float(), self.record.inner

        def rounded(s: Tensor) -> Tensor:
            smoothed = replace(self.weight, smooth=s.float(), smooth_axis=inner)
            scaled = scaled_for(smoothed, weight, settings.scale_dtype, settings.profile.weight_qmax)
            assert scaled.scale is not None
            values = fake_quantize(
                as_rounded(scaled, weight), scaled.scale, scaled.dtype, axis=scaled.axis, block_size=scaled.block_size
            )
            return values.movedim(inner, -1) / s

        return weight.movedim(inner, -1), rounded


def choose_factors(plan: Plan, work: Work) -> Plan:
    """Choose the factors of linear layers whose weight alone is quantized: set ``smoothed`` of their inputs' records.

    Other weights get no factors, and ``rounded`` of their records has the reason.
    """
    with with_all_batches(work):
        by_site = {linear.site: unit for unit in _units(plan, work) for linear in unit}
        passes = Replay(work.proxy, work.kept)
        order = list({id(by_site[site]): by_site[site] for site in passes.in_order(by_site)}.values())
        with counted(order, "scaling inputs", unit="tensor") as steps:
            for unit in steps:
                _scale(unit, passes, work.planned)
    for unit in by_site.values():
        for linear in unit:
            linear.record.rounded = linear.record.rounded or _not_scaled(UNREACHED)
    return work.plan()


def _not_scaled(why: str) -> RoundedWeight:
    return RoundedWeight(codes=None, text=f"not scaled by awq: {why}")


def _units(plan: Plan, work: Work) -> Iterator[list[_Linear]]:
    """Yield the linear layers that read one tensor; record why other weights get no factors."""
    units: Mapping[RangeGroup, list[_Linear]] = defaultdict(list)
    for site in work.proxy.planned(plan):
        entry, records = plan[site.path], work.observed.records[site.path].operands
        weight = next((o for o in entry.operands if o.quantized and o.role == "weight"), None)
        if weight is None or entry.kind == "embedding":
            continue
        other = next((o for o in entry.operands if o.name != weight.name), None)
        group = None if other is None else records[other.name].group
        if entry.kind != "linear" or group is None or group.channels is None or records[weight.name].inner is None:
            records[weight.name].rounded = _not_scaled("the channels of its input are not the last axis")
        elif other is not None and other.quantized:
            records[weight.name].rounded = _not_scaled(
                "its input is also quantized and uses the factors of activations.smoothquant_alpha"
            )
        else:
            assert other is not None
            linear = _Linear(
                site=site,
                place=[operand.name for operand in site.operation.operands].index(other.name),
                weight=weight,
                record=records[weight.name],
                activation=records[other.name],
                name=f"{site.path}.{other.name}",
            )
            units[group].append(linear)
    yield from units.values()


def _scale(unit: list[_Linear], passes: Replay, settings: PlanSettings) -> None:
    """Choose the factors of linear layers that read one tensor."""
    first = unit[0]
    hessian: Tensor | None = None
    magnitude: Tensor | None = None

    def visit(site: Site, args: list[Any], keywords: dict[str, Any], mask: Tensor | None) -> None:
        nonlocal hessian, magnitude
        x = with_zeroed_padding(site.argument(first.place, args, keywords), mask, channels_last=True)
        rows = x.float().reshape(-1, x.shape[-1])
        squares, sizes = (rows.mT @ rows).double(), rows.abs().sum(0).double()
        hessian = squares if hessian is None else hessian + squares
        magnitude = sizes if magnitude is None else magnitude + sizes

    passes.visit(first.site, visit)
    if hessian is None or magnitude is None:
        return
    choice = awq_share([linear.rows(settings) for linear in unit], magnitude, hessian)
    if choice is None:
        for linear in unit:
            linear.record.rounded = _not_scaled("no factors reduce the error")
        return
    alpha, error = choice
    factors = held_factors(input_factors(magnitude, alpha).reciprocal(), settings.scale_dtype)
    smoothed = _smoothed(unit, Migration(alpha=alpha, factors=factors))
    for linear in unit:
        linear.activation.smoothed = smoothed
        linear.record.rounded = RoundedWeight(
            codes=None, text=f"awq, alpha {alpha:g}: {error:.2f} of the error of rounding to nearest"
        )


def _smoothed(unit: list[_Linear], migration: Migration) -> RangeGroup:
    """Return the range group of x / s, with its bounds over all of calibration."""
    group = unit[0].activation.group
    assert group is not None
    assert group.channels is not None
    calibrator = make_calibrator("max")
    calibrator.observe(torch.stack([group.channels.low, group.channels.high]) / migration.factors)
    return RangeGroup(calibrator=calibrator, operands=[linear.name for linear in unit], migration=migration)


ALGORITHM = Algorithm(
    wanted=lambda settings: settings.rounding == "awq",
    run=choose_factors,
    batches=MANY,
    channels=lambda settings: ("linear",),
    needs_batches=lambda settings: True,
)
