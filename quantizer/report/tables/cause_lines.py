"""The lines on causes and cures at the top of a report."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quantizer.report.cause_record import Cause
from quantizer.report.placement_record import Placement
from quantizer.report.record import RunRecord
from quantizer.report.shown_setting import is_from_python, shown_setting
from quantizer.report.tables import text


def lines_of_causes(record: RunRecord) -> list[str]:
    """Return the lines on what costs most in a run, or on why this is not known."""
    lines = cause_lines(record.causes, record.placement, python=is_from_python(record))
    if record.causes_problem is not None:
        lines.append(f"what costs most is not known, as the search for it failed: {record.causes_problem}")
    return lines


def cause_lines(causes: Sequence[Cause], placement: Placement | None = None, *, python: bool = False) -> list[str]:
    """Return a line for each cause, numbered.

    Args:
        causes: the groups that cost most.
        placement: the times of the groups, for what it costs to leave one in float.
        python: whether a setting is shown as a keyword of a call in Python, and not as YAML of a run.
    """
    return [f"{number}. {_line(cause, placement, python=python)}" for number, cause in enumerate(causes, start=1)]


def _line(cause: Cause, placement: Placement | None, *, python: bool) -> str:
    parts = [f"{cause.group}: {text.decibels(cause.sqnr_db)} dB alone", *cause.findings, *cause.notes]
    cure = cause.cure
    if cure is None:
        parts.append("no setting that was tried gains" if cause.findings else "nothing stands out in its inputs")
    elif math.isinf(cure.alone_db):
        gain = f"measured gain {text.decibels(cure.gain_db)} dB"
        setting = shown_setting(cure.setting, python=python)
        parts.append(f"cure: leave it in float, {setting}, {gain}{_cost(cause.group, placement)}")
    else:
        setting = shown_setting(cure.setting, python=python)
        parts.append(f"cure: {setting}, measured gain {text.decibels(cure.gain_db)} dB, no time")
    return "; ".join(parts)


def _cost(group: str, placement: Placement | None) -> str:
    """Return what a group takes more in float than in low precision, in words; empty: it was not timed."""
    taken = [one for one in placement.groups if one.group == group] if placement else []
    if placement is None or not taken:
        return ""
    more = taken[0].float_us - taken[0].low_us
    if more <= 0:
        # What is faster in float by more than noise is float in the plan already.
        return ", no more time within noise (measured)"
    return f", {more:.0f} us more a batch (measured)"
