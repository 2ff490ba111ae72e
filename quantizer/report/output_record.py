"""The record of how far the outputs of the quantized model are from those of the float model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantizer.report.record_base import Record

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
    noise_sqnr_db: float | None = None
    """Least SQNR in dB of the proxy's output with the noise of float sums; null: it was not needed, or not taken."""
    engine: bool
    """Whether the engine ran."""

    @property
    def is_alike(self) -> bool:
        """True for an engine that computes what its proxy does, with sums in an order of its own, or did not run."""
        if self.engine_to_proxy_db is None or self.engine_to_proxy_db >= ALIKE_DB or self.sqnr_db is None:
            return True
        return is_no_further(self.sqnr_db, (self.proxy_sqnr_db, self.noise_sqnr_db), FURTHER_DB)


def is_no_further(engine: float | None, pytorch: Sequence[float | None], decibels: float) -> bool:
    """Return whether an engine is at most so much further from the float model than PyTorch at its worst.

    Args:
        engine: the SQNR in dB of the engine's output; None: there is no difference.
        pytorch: those of PyTorch's, likewise.
        decibels: how much further.
    """
    known = [one for one in pytorch if one is not None]
    return engine is None or (bool(known) and engine >= min(known) - decibels)


def worst_output(outputs: Sequence[OutputDistance]) -> OutputDistance | None:
    """Return the output with the lowest SQNR; None: there is none."""
    return min(outputs, key=lambda one: math.inf if one.sqnr_db is None else one.sqnr_db, default=None)
