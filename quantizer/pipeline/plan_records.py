"""The sites of a coverage and the placement of a plan, as records of a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quantizer.algorithms.sensitivity import Fallback
from quantizer.algorithms.sensitivity.prices import Prices, frontier
from quantizer.report.record import Placement, PlacementPoint
from quantizer.utils.records import GroupSensitivity, GroupTime, Site


def site_records(coverage: Iterable[Site]) -> tuple[Site, ...]:
    """Return the rows of a coverage that are not quiet."""
    return tuple(row for row in coverage if not row.quiet)


def placement_record(prices: Prices, rows: Sequence[GroupSensitivity], chosen: Fallback | None) -> Placement:
    """Return the record of a plan that was placed by its prices."""
    slower, back = prices.slower(), [] if chosen is None else list(chosen.reasons())
    return Placement(
        where=prices.where,
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
            for point in (frontier(rows, prices) if rows else ())
        ),
    )
