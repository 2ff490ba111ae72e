"""A speed-up that the engine reaches, too: groups are quantized again until it is as fast as asked."""

from __future__ import annotations

from quantizer.report.record import Placement, SpeedCheck
from quantizer.runs.progress.stage_timer import StageTimer
from quantizer.runs.run_engines import RunEngines

_CHECKS = 3
"""How often an engine is built for one goal."""

_MARGIN = 1.01


def missed_speed(placement: Placement | None) -> str | None:
    """Return why the goal of a placement is missed, in words; None if it is reached, or there is none."""
    if placement is None or placement.min_speedup is None or placement.speedup is None:
        return None
    if placement.speedup >= placement.min_speedup:
        return None
    return (
        f"fallback.min_speedup: {placement.min_speedup:g} is not reached: the fastest plan found is "
        f"{placement.speedup:.2f} times as fast as in float, with {placement.checks[-1].groups} groups in float for "
        "the accuracy"
    )


class SpeedGoal:
    """Goal for how many times as fast as in float an engine is, and what predictions must promise for it.

    Attributes:
        asked: the goal; None: there is none.
        checks: the engines that were timed, in order.
    """

    def __init__(self, asked: float | None, timer: StageTimer) -> None:
        self.asked = asked
        self.checks: list[SpeedCheck] = []
        self._timer = timer
        self._target = asked or 0.0

    def next_speedup(self, engines: RunEngines, groups: int) -> float | None:
        """Return the speed-up to predict now; None if the engine reaches the goal, or nothing is left to quantize."""
        if self.asked is None:
            return None
        with self._timer("time the engine against its goal"):
            paths = {"engine": engines.files("engine").engine, "float": engines.files("float").engine}
            latency = engines.timing.latencies(paths)
        reached = latency["float"] / latency["engine"]
        self.checks.append(SpeedCheck(groups=groups, speedup=reached))
        self._timer.tell(f"{reached:.2f} times as fast as in float with {groups} groups put back")
        if reached >= self.asked or groups == 0 or len(self.checks) == _CHECKS:
            return None
        self._target *= _MARGIN * self.asked / reached
        return self._target
