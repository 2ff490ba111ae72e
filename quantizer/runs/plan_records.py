"""The sites of a plan and its placement, as records of a report."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import fields
from dataclasses import replace

from quantizer.plan.site_plan import OperandPlan
from quantizer.plan.site_plan import Plan
from quantizer.report.placement_record import GroupTime
from quantizer.report.placement_record import Placement
from quantizer.report.placement_record import PlacementPoint
from quantizer.report.record import Operand
from quantizer.report.record import SensitivityRow
from quantizer.report.record import Site
from quantizer.sensitivity import Fallback
from quantizer.sensitivity import GroupSensitivity
from quantizer.sensitivity.prices.by_speed import frontier
from quantizer.sensitivity.prices.group_prices import Prices

__all__ = ["placement_record", "site_records"]


def site_records(coverage: Iterable[Site], plan: Plan) -> tuple[Site, ...]:
    """Return a record for each row of a coverage that is not quiet, with its operands in the plan."""
    return tuple(
        replace(row, operands=tuple(map(_operand, plan[row.name].operands)) if row.name in plan else ())
        for row in coverage
        if not row.quiet
    )


def _operand(operand: OperandPlan) -> Operand:
    return Operand(
        name=operand.name,
        role=operand.role,
        quantized=operand.quantized,
        dtype=operand.dtype,
        dynamic=operand.dynamic,
        block_size=operand.block_size,
        zero_point=operand.zero_point,
        minimum=operand.minimum,
        maximum=operand.maximum,
        amax=operand.largest_amax,
        scale=operand.largest_scale,
        channels=operand.scales,
        sqnr_db=operand.sqnr_db,
        clipped=operand.clipped,
        estimate=operand.estimate,
        group=operand.group,
    )


def placement_record(prices: Prices, rows: Sequence[SensitivityRow], chosen: Fallback | None) -> Placement:
    """Return the record of a plan that was placed by its prices.

    Args:
        prices: the times of all groups.
        rows: the errors of the groups; empty if they were not measured.
        chosen: the groups that are float.
    """
    slower, back = prices.slower(), [] if chosen is None else list(chosen.reasons())
    names = [field.name for field in fields(GroupSensitivity)]
    ranking = [GroupSensitivity(**{name: getattr(row, name) for name in names}) for row in rows]
    return Placement(
        where=prices.where,
        estimated=prices.estimated,
        low_ms=prices.low_us / 1000,
        float_ms=prices.float_us / 1000,
        predicted_ms=prices.time_us(back) / 1000,
        back=len(back),
        groups=tuple(
            GroupTime(group=one.group, low_us=one.low_us, float_us=one.float_us, slower=slower.get(one.group))
            for one in sorted(prices.groups.values(), key=lambda one: -one.gain_us)
        ),
        frontier=tuple(
            PlacementPoint(back=point.back, milliseconds=point.time_us / 1000, error=point.error)
            for point in (frontier(ranking, prices) if ranking else ())
        ),
    )
