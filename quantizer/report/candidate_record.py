"""The records of a choice between engines: what was tried, how fast each was, and why the others were not taken."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quantizer.report.record_base import Record

_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Candidate(Record):
    """An engine that was tried."""

    backend: str
    """Its backend, such as ``openvino``."""
    format: str
    """What its products are in: ``int8``, ``int8+bfloat16`` where all else is in bfloat16, ``int8 dynamic`` with ranges
    that are taken at run time; ``float32`` or ``bfloat16`` for an engine of the float model."""
    milliseconds: tuple[float, ...] = ()
    """Median latency at each shape of the choice, all candidates in turns; empty if it failed, and without the last
    shapes if it was too slow at those before."""
    score_difference: float | None = None
    """Its score less that of the float model, on the rows with labels; null where there are none."""
    sqnr_db: float | None = None
    """The least SQNR of its outputs in dB against the float model's in PyTorch at the shapes of the choice; null if
    they are equal or it failed."""
    verdict: str = ""
    """Why it was chosen, or why not."""

    @property
    def name(self) -> str:
        """Backend and format."""
        return f"{self.backend} {self.format}"

    @property
    def is_float(self) -> bool:
        """True for an engine of the float model."""
        return self.format in _FLOATS

    def times_of(self, other: Candidate) -> float:
        """Return how many times as long as another one it takes: the geometric mean over the shapes that both have."""
        pairs = list(zip(self.milliseconds, other.milliseconds, strict=False))
        return math.exp(sum(math.log(mine / its) for mine, its in pairs) / len(pairs))


@dataclass(frozen=True, kw_only=True)
class EngineChoice(Record):
    """A choice of the fastest engine that computes what it should."""

    headline: str
    """What was chosen, and the fastest engine in float, or why nothing in low precision is faster."""
    instructions: str | None
    """The CPU's instruction sets for which the choice holds; null if the system does not tell."""
    shapes: tuple[str, ...]
    """The shapes at which all were timed."""
    candidates: tuple[Candidate, ...]
    """All that were tried, the chosen one first, then by time; those that failed at the end."""
    deploy: str = ""
    """The file of a run's folder that is the fastest in the end, and its speed beside the other one's; empty if it was
    not compared."""
    missing: tuple[str, ...] = ()
    """Candidates whose library is not installed, and what installs it."""
