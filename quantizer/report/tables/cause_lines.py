"""The lines on causes and cures at the top of a report."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quantizer.report.cause_record import Cause
from quantizer.report.tables import text

__all__ = ["cause_lines"]


def cause_lines(causes: Sequence[Cause]) -> list[str]:
    """Return a line for each cause, numbered."""
    return [f"{number}. {_line(cause)}" for number, cause in enumerate(causes, start=1)]


def _line(cause: Cause) -> str:
    parts = [f"{cause.group}: {text.decibels(cause.sqnr_db)} dB alone", *cause.findings, *cause.notes]
    if cause.cure is not None:
        last = "leave it in float, " if math.isinf(cause.cure.alone_db) else ""
        parts.append(f"cure: {last}{cause.cure.setting}, measured gain {text.decibels(cause.cure.gain_db)} dB")
    elif cause.findings:
        parts.append("no setting that was tried gains")
    return "; ".join(parts)
