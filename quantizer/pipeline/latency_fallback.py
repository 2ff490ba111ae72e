"""Latency-aware fallback of a run: latency costs of the groups, and the goal of ``fallback.min_speedup``.

If the engine misses the goal, groups are quantized again and the engine is rebuilt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from quantizer.algorithms.sensitivity import Fallback
from quantizer.algorithms.sensitivity.latency_costs import LatencyCosts, frontier
from quantizer.config import RunConfig
from quantizer.pipeline.context import RunContext
from quantizer.pipeline.model_graphs import Graphs
from quantizer.pipeline.processes import from_first_rank
from quantizer.pipeline.progress import StageTimer
from quantizer.pipeline.run_engines import RunEngines
from quantizer.pipeline.time_groups import GroupTimer
from quantizer.quantizer import Quantizer
from quantizer.report.record import FallbackPoint, LatencyFallback, SpeedCheck
from quantizer.utils.records import GroupSensitivity, GroupTime


class RunLatencyFallback:
    """Latency costs and the speed goal of a run.

    Attributes:
        latency_costs: the measured costs; None if no engine runs on this machine, or it does not report layer times.
    """

    def __init__(self, context: RunContext, config: RunConfig, folder: Path, graphs: Graphs) -> None:
        self.latency_costs: LatencyCosts | None = None
        self._context = context
        self._config = config
        self._folder = folder
        self._graphs = graphs
        self._goal = SpeedGoal(None if config.fallback is None else config.fallback.min_speedup, context.timer)

    def measured(self, quantizer: Quantizer, engines: RunEngines) -> LatencyCosts | None:
        """Return the latency costs of the plan's groups; None if they cannot be measured."""
        if not engines.runs_here or self._graphs.several:
            return None
        known_us = None if engines.timing.exact else engines.usual_us
        if known_us is not None and sum(known_us.values()) > _LONG_CALLS_US:
            seconds = sum(known_us.values()) / 1e6
            self._context.timer.tell(
                f"latency costs: not measured, because a call of both engines takes {seconds:.1f} s"
            )
            return None
        with self._context.timer("quantize"):
            quantized = quantizer.quantize(self._context.model)
        engines.build(quantizer, quantized)
        low, plain = engines.files("engine"), engines.files("float")
        placer = GroupTimer(
            model=self._context.model,
            example=self._context.feed.example(),
            timing=engines.timing,
            times=self._context.resume.times,
            # self._config may name the backend from before the choice.
            build=partial(self._context.timer.build, quantizer.config.backend, options=engines.options()),
            folder=self._folder,
            opset=self._config.export.opset,
            axes=self._context.feed.sizes,
            say=self._context.timer.tell,
            known_us=known_us,
        )
        with self._context.timer("measure latency costs"):
            return placer.latency_costs(quantizer, quantized, low, plain)

    def is_fast_enough(self, quantizer: Quantizer, proxy: nn.Module | None, engines: RunEngines) -> bool:
        """Return whether the engine reaches the speed goal; if not, choose groups to quantize again."""
        chosen = quantizer.chosen_fallback
        groups = 0 if chosen is None else len(chosen.groups)
        next_speedup = from_first_rank(lambda: self._goal.next_speedup(engines, groups), float | None)
        if next_speedup is not None:
            quantizer.fallback(proxy, min_speedup=next_speedup, latency_costs=self.latency_costs)
        return next_speedup is None

    def record(self, quantizer: Quantizer) -> LatencyFallback | None:
        """Return the record; None without latency costs."""
        if self.latency_costs is None:
            return None
        ranking = quantizer.sensitivity.rows if self._config.amp is not None else ()
        result = latency_fallback_record(self.latency_costs, ranking, quantizer.chosen_fallback)
        return replace(result, min_speedup=self._goal.asked, checks=tuple(self._goal.checks))


_LONG_CALLS_US = 5e5
"""Microseconds of a call of both engines from which latency costs are measured for a fallback only.

They need dozens of calls. The time of a call hardly varies between runs, so that these agree.
"""

_CHECKS = 3
"""Maximum number of engines built for one goal."""

_MARGIN = 1.01


def missed_speed(latency_fallback: LatencyFallback | None) -> str | None:
    """Return a sentence on a missed speed goal; None if the goal is reached or missing."""
    if latency_fallback is None or latency_fallback.min_speedup is None or latency_fallback.speedup is None:
        return None
    if latency_fallback.speedup >= latency_fallback.min_speedup:
        return None
    return (
        f"fallback.min_speedup: {latency_fallback.min_speedup:g} is not reached: the fastest plan found is "
        f"{latency_fallback.speedup:.2f} times as fast as in float, with {latency_fallback.checks[-1].groups} "
        f"groups in float for "
        "the accuracy"
    )


class SpeedGoal:
    """The goal of ``fallback.min_speedup``, and the predicted speed-up required to reach it.

    Attributes:
        asked: the goal; None without one.
        checks: the measured engines, in order.
    """

    def __init__(self, asked: float | None, timer: StageTimer) -> None:
        self.asked = asked
        self.checks: list[SpeedCheck] = []
        self._timer = timer
        self._target = asked or 0.0

    def next_speedup(self, engines: RunEngines, groups: int) -> float | None:
        """Return the speed-up to predict next; None if the engine reaches the goal, or every group is quantized."""
        if self.asked is None:
            return None
        with self._timer("check the speed goal"):
            paths = {"engine": engines.files("engine").engine, "float": engines.files("float").engine}
            latency = engines.timing.latencies(paths)
        reached = latency["float"] / latency["engine"]
        self.checks.append(SpeedCheck(groups=groups, speedup=reached))
        self._timer.tell(f"{reached:.2f} times as fast as in float with {groups} groups kept in float")
        if reached >= self.asked or groups == 0 or len(self.checks) == _CHECKS:
            return None
        self._target *= _MARGIN * self.asked / reached
        return self._target


def latency_fallback_record(
    latency_costs: LatencyCosts, rows: Sequence[GroupSensitivity], chosen: Fallback | None
) -> LatencyFallback:
    """Return the record of a plan with latency costs."""
    slower, in_float = latency_costs.slower(), [] if chosen is None else list(chosen.reasons())
    return LatencyFallback(
        conditions=latency_costs.where,
        low_ms=latency_costs.low_us / 1000,
        float_ms=latency_costs.float_us / 1000,
        predicted_ms=latency_costs.time_us(in_float) / 1000,
        float_groups=len(in_float),
        groups=tuple(
            GroupTime(
                group=group_time.group,
                low_us=group_time.low_us,
                float_us=group_time.float_us,
                slower_reason=slower.get(group_time.group),
            )
            for group_time in sorted(latency_costs.groups.values(), key=lambda group_time: -group_time.gain_us)
        ),
        frontier=tuple(
            FallbackPoint(float_groups=point.back, milliseconds=point.time_us / 1000, error=point.error)
            for point in (frontier(rows, latency_costs) if rows else ())
        ),
    )
