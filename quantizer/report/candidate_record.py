"""The records of a choice between engines: what was tried, how fast each was, and why the others were not taken."""

from __future__ import annotations

from dataclasses import dataclass

from quantizer.report.record_base import Record

__all__ = ["Candidate", "EngineChoice"]


@dataclass(frozen=True, kw_only=True)
class Candidate(Record):
    """An engine that was tried."""

    backend: str
    """Its backend, such as ``openvino``."""
    format: str
    """What its products are in: ``int8``, or ``float32`` for an engine of the float model."""
    milliseconds: tuple[float, ...] = ()
    """Median latency at each shape of the choice, all candidates in turns; empty if it failed."""
    score_difference: float | None = None
    """Its score less that of the float model, on the rows with labels; null where there are none."""
    sqnr_db: float | None = None
    """The least SQNR of its outputs in dB against the float model's in PyTorch; null if they are equal or it failed."""
    verdict: str = ""
    """Why it was chosen, or why not."""

    @property
    def name(self) -> str:
        """Backend and format."""
        return f"{self.backend} {self.format}"


@dataclass(frozen=True, kw_only=True)
class EngineChoice(Record):
    """A choice of the fastest engine that computes what it should."""

    headline: str
    """What was chosen, and what it gains over the fastest engine in float, or why nothing does."""
    instructions: str | None
    """The CPU's instruction sets for which the choice holds; null if the system does not tell."""
    shapes: tuple[str, ...]
    """The shapes at which all were timed."""
    candidates: tuple[Candidate, ...]
    """All that were tried, the chosen one first, then by time; those that failed at the end."""
    missing: tuple[str, ...] = ()
    """Candidates whose library is not installed, and what installs it."""
