"""The records of a placement by measured time: what each group takes, and the plans between fast and accurate."""

from __future__ import annotations

from dataclasses import dataclass

from quantizer.report.record_base import Record


@dataclass(frozen=True, kw_only=True)
class GroupTime(Record):
    """The time of one group of sites."""

    group: str
    """Its name."""
    low_us: float
    """Microseconds in low precision, with the conversions that it causes."""
    float_us: float
    """Microseconds in float."""
    slower: str | None = None
    """Why it is float, if low precision makes it slower; null if it does not."""


@dataclass(frozen=True, kw_only=True)
class PlacementPoint(Record):
    """A plan between everything in low precision and everything in float."""

    back: int
    """How many groups are float in it."""
    milliseconds: float
    """Its predicted latency."""
    error: float
    """The sum of the errors of the groups that stay quantized, by the measure of the sensitivity."""


@dataclass(frozen=True, kw_only=True)
class SpeedCheck(Record):
    """An engine that was timed against ``fallback.min_speedup``."""

    predicted: float
    """How many times as fast as in float the plan was predicted to be at least."""
    groups: int
    """How many groups were float for the accuracy."""
    speedup: float
    """How many times as fast as in float it was."""


@dataclass(frozen=True, kw_only=True)
class Placement(Record):
    """The times of all groups of a plan, and the plan that was taken."""

    where: str
    """The backend, the shape and the threads of the times."""
    low_ms: float
    """Milliseconds of the engine with all groups in low precision."""
    float_ms: float
    """Milliseconds of the engine of the float model."""
    predicted_ms: float
    """Predicted milliseconds of the plan that was taken."""
    back: int
    """How many groups are float in it."""
    groups: tuple[GroupTime, ...]
    """The groups, the largest gain in low precision first."""
    frontier: tuple[PlacementPoint, ...] = ()
    """The plans that put one group more back at a time, the highest error per microsecond first; empty without
    sensitivity."""
    min_speedup: float | None = None
    """How many times as fast as in float the engine had to be; null if that was not asked for."""
    checks: tuple[SpeedCheck, ...] = ()
    """The engines that were timed against it, the last of them delivered."""

    @property
    def speedup(self) -> float | None:
        """Speed of the delivered engine, in that of the float one; None: none was asked for, or it was not timed."""
        return self.checks[-1].speedup if self.min_speedup is not None and self.checks else None
