"""The record of how far the outputs of the quantized model are from those of the float model."""

from __future__ import annotations

from dataclasses import dataclass

from quantizer.report.record_base import Record

__all__ = ["OutputDistance"]


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
