"""A placement by measured time as sentences."""

from __future__ import annotations

from quantizer.report.placement_record import Placement
from quantizer.report.tables import text


def placement_lines(placement: Placement) -> list[str]:
    """Return what low precision wins, what the plan is predicted to take, and how a goal was met, in sentences."""
    low, plain, taken = (
        text.milliseconds(value) for value in (placement.low_ms, placement.float_ms, placement.predicted_ms)
    )
    lines = [f"measured: {placement.where}; everything in low precision takes {low}, the float model {plain}"]
    slower = sum(group.slower is not None for group in placement.groups)
    if slower:
        lines.append(f"{text.counted(slower, 'group')} went back because low precision makes the engine slower there")
    if placement.back:
        lines.append(f"with {text.counted(placement.back, 'group')} in float the plan is predicted to take {taken}")
    if placement.min_speedup is not None and placement.speedup is not None:
        met = "reached" if placement.speedup >= placement.min_speedup else "not reached"
        asked, got = text.times(placement.min_speedup), text.times(placement.speedup)
        lines.append(f"asked for {asked} the speed of float: the engine has {got}, {met}")
    return lines
