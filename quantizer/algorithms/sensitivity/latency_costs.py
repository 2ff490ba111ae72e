"""Latency costs: the time of each group in low precision and in float, in one engine on one machine.

``by_speed`` finds the most accurate plan that is fast enough: groups fall back to float while the predicted time allows
it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from quantizer.algorithms.fallback import Fallback, fallback_of, per_cost
from quantizer.errors import SensitivityError
from quantizer.plan.reasons import ReasonCode
from quantizer.plan.site_plan import Plan
from quantizer.utils.records import GroupSensitivity

_LEAST_GAIN = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLatency:
    """The latency of one group, in microseconds.

    Attributes:
        group: its name in the plan.
        low_us: with the group in low precision, including the conversions that it causes.
        float_us: with the group in float.
        is_table: whether it is an embedding table, which is quantized to save memory.
    """

    group: str
    low_us: float
    float_us: float
    is_table: bool = False

    @property
    def gain_us(self) -> float:
        """The microseconds saved by low precision; negative if low precision is slower."""
        return self.float_us - self.low_us


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyCosts:
    """The latency costs of all groups of a plan in the engines of one backend.

    Attributes:
        groups: one entry for each group of the plan, by name.
        low_us: the latency of the engine with all groups in low precision, in microseconds.
        float_us: the latency of the engine of the float model, in microseconds.
        where: the backend, the shape and how the times were measured, in words.
        least_loss_us: the loss from which a group counts as slower; smaller losses may be noise.
    """

    groups: Mapping[str, GroupLatency]
    low_us: float
    float_us: float
    where: str
    least_loss_us: float = 30.0

    def __repr__(self) -> str:
        times = f"{self.low_us / 1000:.2f} ms in low precision, {self.float_us / 1000:.2f} ms in float"
        return f"LatencyCosts({len(self.groups)} groups, {times}, {self.where})"

    def time_us(self, back: Collection[str]) -> float:
        """Return the predicted latency in microseconds with the groups ``back`` in float.

        Gains of groups are added; a conversion between two groups counts for one of them.
        """
        if strange := [group for group in back if group not in self.groups]:
            raise SensitivityError(
                f"{strange[0]!r} has no latency cost; the groups that have are {', '.join(self.groups)}"
            )
        return self.low_us + sum(self.groups[group].gain_us for group in set(back))

    def speedup(self, back: Collection[str]) -> float:
        """Return the predicted speedup over the float engine with the groups ``back`` in float."""
        return self.float_us / self.time_us(back)

    def slower(self) -> dict[str, str]:
        """Return the groups that low precision makes slower, by more than noise, with the reason."""
        return {
            name: ReasonCode.SLOWER.text(low=f"{latency.low_us:.0f}", float=f"{latency.float_us:.0f}", where=self.where)
            for name, latency in self.groups.items()
            if latency.gain_us < -self.least_loss_us and latency.float_us > 0 and not latency.is_table
        }

    def gains(self, parts: Mapping[str, Collection[str]]) -> dict[str, float]:
        """Return the microseconds that low precision saves, by name, at least a tenth of the mean.

        Gains near 0 are noise: divided by them, errors would rank groups first that hardly affect accuracy.
        """
        saved = {name: max(sum(self.groups[part].gain_us for part in groups), 0.0) for name, groups in parts.items()}
        least = _LEAST_GAIN * sum(saved.values()) / max(len(saved), 1)
        return {name: max(gain, least) for name, gain in saved.items()}


def latency_costs_from_layers(
    plan: Plan,
    hosts: Mapping[str, str],
    low: Mapping[str, float],
    plain: Mapping[str, float],
    *,
    low_us: float,
    float_us: float,
    where: str,
) -> LatencyCosts:
    """Return the latency costs of a plan's groups from the times of layers in two engines.

    Timing layers one by one takes longer than running the engine, so each engine's times are scaled to its own latency.
    A layer that several groups share is split by their multiply-adds. Time outside of the groups' layers cancels out of
    predictions if it is equal in both engines.

    Args:
        plan: the plan, with all groups quantized.
        hosts: the layer of each site of the plan.
        low: the time of each layer in the engine of the plan.
        plain: the time of each layer in the engine of the float model.
        low_us: the latency of the engine of the plan, in microseconds.
        float_us: the latency of the engine of the float model, in microseconds.
        where: the backend and the shape, in words.
    """
    shares = _shares(plan, hosts)
    low, plain = _scaled(low, low_us), _scaled(plain, float_us)
    times: dict[str, list[float]] = {group: [0.0, 0.0] for groups in shares.values() for group in groups}
    for place, groups in shares.items():
        for group, share in groups.items():
            times[group][0] += share * low.get(place, 0.0)
            times[group][1] += share * plain.get(place, 0.0)
    computed = {operand.group for site in plan.values() if site.kind != "embedding" for operand in site.operands}
    measured = {
        group: GroupLatency(group=group, low_us=both[0], float_us=both[1], is_table=group not in computed)
        for group, both in times.items()
    }
    return LatencyCosts(groups=measured, low_us=low_us, float_us=float_us, where=where)


def _scaled(times: Mapping[str, float], latency: float) -> dict[str, float]:
    total = sum(times.values())
    return {place: time * latency / total for place, time in times.items()} if total else {}


def _shares(plan: Plan, hosts: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Return the groups of each layer, with their share of its work; shares add up to 1."""
    work: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for site in plan.values():
        names = (operand.group for operand in site.operands if operand.quantized and operand.group is not None)
        groups = dict.fromkeys(names)
        for group in groups:
            # A residual add multiplies nothing, and still takes time where it is alone.
            work[hosts[site.name]][group] += max(site.multiply_adds, 1) / len(groups)
    return {
        place: {group: amount / sum(groups.values()) for group, amount in groups.items()}
        for place, groups in work.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPoint:
    """A plan between everything in low precision and everything in float.

    Attributes:
        back: the number of groups in float.
        time_us: its predicted latency, in microseconds.
        error: the sum of the errors of the groups that stay quantized.
    """

    back: int
    time_us: float
    error: float


def frontier(ranking: Sequence[GroupSensitivity], latency_costs: LatencyCosts) -> tuple[PlanPoint, ...]:
    """Return the plans that keep one more group in float at a time, highest error per microsecond first.

    Errors of groups add up in the measures ``gradient`` and ``local``, and approximately in the others.
    """
    ordered = [entry for entry, _ in per_cost(ranking, _costs(ranking, latency_costs))]
    in_float: list[str] = []
    error_left = sum(entry.error for entry in ordered)
    points = [PlanPoint(back=0, time_us=latency_costs.time_us(()), error=error_left)]
    for entry in ordered:
        in_float += entry.parts
        error_left -= entry.error
        points.append(
            PlanPoint(back=len(in_float), time_us=latency_costs.time_us(in_float), error=max(error_left, 0.0))
        )
    return tuple(points)


def by_speed(ranking: Sequence[GroupSensitivity], latency_costs: LatencyCosts, min_speedup: float) -> Fallback:
    """Return the fallback with the least error among those found with a speedup of at least ``min_speedup``.

    The groups of ``latency_costs.slower()`` are float already. The others fall back by their error per microsecond, if
    the time allows it. If everything in low precision is too slow, the result is the fastest plan, and its ``met`` is
    False.
    """
    if isinstance(min_speedup, bool) or not isinstance(min_speedup, int | float) or not 0 < min_speedup < math.inf:
        raise SensitivityError(f"min_speedup={min_speedup!r}: expected a number above 0, such as 2.0")
    allowed = latency_costs.float_us / min_speedup
    chosen: list[GroupSensitivity] = []
    in_float = list(latency_costs.slower())
    for entry, _ in per_cost(ranking, _costs(ranking, latency_costs)):
        if latency_costs.time_us([*in_float, *entry.parts]) <= allowed:
            chosen.append(entry)
            in_float += entry.parts
    fallback = fallback_of(sorted(chosen, key=lambda entry: entry.rank), f"min_speedup={min_speedup:g}")
    return replace(fallback, min_speedup=float(min_speedup), speedup=latency_costs.speedup(in_float))


def _costs(ranking: Sequence[GroupSensitivity], latency_costs: LatencyCosts) -> dict[str, float]:
    return latency_costs.gains({entry.group: entry.parts for entry in ranking})
