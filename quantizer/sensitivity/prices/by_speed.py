"""The most accurate plan that is fast enough: groups go back to float while the predicted time allows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quantizer.errors import SensitivityError
from quantizer.sensitivity.fallback import Fallback, fallback_of, per_cost
from quantizer.sensitivity.measurement import GroupSensitivity
from quantizer.sensitivity.prices.group_prices import Prices


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPoint:
    """A plan between everything in low precision and everything in float.

    Attributes:
        back: how many groups are float.
        time_us: its predicted time, in microseconds.
        error: the sum of the errors of the groups that stay quantized.
    """

    back: int
    time_us: float
    error: float


def frontier(ranking: Sequence[GroupSensitivity], prices: Prices) -> tuple[PlanPoint, ...]:
    """Return the plans that put one group more back at a time, highest error per microsecond first.

    Errors of groups add up in the measures ``gradient`` and ``local``, and do so closely in the others.
    """
    ordered = [entry for entry, _ in per_cost(ranking, _costs(ranking, prices))]
    back: list[str] = []
    rest = sum(entry.error for entry in ordered)
    points = [PlanPoint(back=0, time_us=prices.time_us(()), error=rest)]
    for entry in ordered:
        back += entry.parts
        rest -= entry.error
        points.append(PlanPoint(back=len(back), time_us=prices.time_us(back), error=max(rest, 0.0)))
    return tuple(points)


def by_speed(ranking: Sequence[GroupSensitivity], prices: Prices, min_speedup: float) -> Fallback:
    """Return the fallback with the least error among those that it finds at least ``min_speedup`` times as fast.

    The groups of ``prices.slower()`` are float already. The others go back by their error per microsecond, each if the
    time allows it. If everything in low precision is too slow, what comes back is the fastest plan, and its ``met`` is
    False.

    Raises:
        SensitivityError: ``min_speedup`` is no number above 0.
    """
    if isinstance(min_speedup, bool) or not isinstance(min_speedup, int | float) or not 0 < min_speedup < math.inf:
        raise SensitivityError(f"min_speedup={min_speedup!r}: expected a number above 0, such as 2.0")
    allowed = prices.float_us / min_speedup
    chosen: list[GroupSensitivity] = []
    back = list(prices.slower())
    for entry, _ in per_cost(ranking, _costs(ranking, prices)):
        if prices.time_us([*back, *entry.parts]) <= allowed:
            chosen.append(entry)
            back += entry.parts
    made = fallback_of(sorted(chosen, key=lambda entry: entry.rank), f"min_speedup={min_speedup:g}")
    return replace(made, min_speedup=float(min_speedup), speedup=prices.speedup(back))


def _costs(ranking: Sequence[GroupSensitivity], prices: Prices) -> dict[str, float]:
    return prices.gains({entry.group: entry.parts for entry in ranking})
