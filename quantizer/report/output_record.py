"""The record of how far the outputs of the quantized model are from those of the float model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantizer.report.record_base import Record

__all__ = ["ALIKE_DB", "FURTHER_DB", "OutputDistance", "worst_output"]

ALIKE_DB = 30.0
"""SQNR of an engine's output to its proxy's that is always enough for a quantized model."""

FURTHER_DB = 3.0
"""Sums in another order move a few values to the neighbouring step, and these move others in later layers. A correct
engine's error is then another sample of the quantization error: as large as the proxy's, but different. So an engine
is right, too, if the power of its error against the float model is at most twice that of the proxy."""


@dataclass(frozen=True, kw_only=True)
class OutputDistance(Record):
    """The distance of one output to that of the float model, on one batch."""

    output: str
    """Name of the output."""
    batch: int
    """Rows of the batch."""
    sequence: int | None = None
    """Tokens in a row of it; null: rows are no texts."""
    sqnr_db: float | None = None
    """SQNR in dB of the engine's output, or of the proxy's if the engine did not run; null: there is no difference."""
    cosine: float
    """Mean cosine of its vectors to the float model's."""
    proxy_sqnr_db: float | None = None
    """SQNR in dB of the proxy's output; null: there is no difference."""
    engine_to_proxy_db: float | None = None
    """SQNR in dB of the engine's output to the proxy's; null: there is no difference, or the engine did not run."""
    engine: bool
    """Whether the engine ran."""


def worst_output(outputs: Sequence[OutputDistance]) -> OutputDistance | None:
    """Return the output with the lowest SQNR; None: there is none."""
    return min(outputs, key=lambda one: math.inf if one.sqnr_db is None else one.sqnr_db, default=None)
