"""The choice between engines by their measured time: the fastest of those whose outputs are right."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import replace

from quantizer.engines import Inspection
from quantizer.engines.cpu import cpu_flags
from quantizer.engines.int8_saturation import saturates
from quantizer.errors import EngineError
from quantizer.report import collect_machine
from quantizer.report.candidate_record import Candidate
from quantizer.report.candidate_record import EngineChoice
from quantizer.report.tables import text

__all__ = ["FLOAT", "bound", "choose"]

FLOAT = "float32"
"""The format of a candidate that is not quantized."""


def choose(candidates: Sequence[Candidate], shapes: Sequence[str], missing: Sequence[str]) -> EngineChoice:
    """Return the choice of the candidate with the least time, in the geometric mean of its ratios over all shapes.

    Args:
        candidates: what was tried; those that failed have no times, and say why in ``verdict``.
        shapes: the names of the shapes.
        missing: what is not installed.

    Raises:
        EngineError: all failed; the message holds the reason of each.
    """
    ran = sorted((candidate for candidate in candidates if candidate.milliseconds), key=_time)
    failed = [candidate for candidate in candidates if not candidate.milliseconds]
    if not ran:
        reasons = "; ".join(f"{candidate.name}: {candidate.verdict}" for candidate in failed)
        raise EngineError(f"no engine is right and runs here: {reasons}")
    best = ran[0]
    ratios = [text.times(_time(candidate) / _time(best)) for candidate in ran[1:]]
    slower = [replace(one, verdict=f"{ratio} the time") for one, ratio in zip(ran[1:], ratios, strict=True)]
    return EngineChoice(
        headline=_headline(ran),
        instructions=str(collect_machine()["instructions"] or "") or None,
        shapes=tuple(shapes),
        candidates=(replace(best, verdict="chosen"), *slower, *failed),
        missing=tuple(missing),
    )


def _time(candidate: Candidate) -> float:
    """Return the geometric mean of the times, with which the mean of ratios does not depend on what they refer to."""
    return math.exp(sum(map(math.log, candidate.milliseconds)) / len(candidate.milliseconds))


def _headline(ran: Sequence[Candidate]) -> str:
    """Return what the first of them, the fastest, gains over float."""
    best = ran[0]
    floats = [candidate for candidate in ran if candidate.format == FLOAT]
    quantized = [candidate for candidate in ran if candidate.format != FLOAT]
    if best.format == FLOAT and quantized:
        lost = text.times(_time(quantized[0]) / _time(best))
        return (
            f"nothing in INT8 is faster than float here, and {best.name} is delivered: {quantized[0].name} takes "
            f"{lost} its time"
        )
    if best.format == FLOAT or not floats:
        return f"{best.name} is the fastest"
    gain = text.times(_time(floats[0]) / _time(best))
    return f"{best.name} is the fastest, {gain} as fast as the fastest engine in float, {floats[0].name}"


def bound(choice: EngineChoice, inspect: Callable[[Candidate], Inspection]) -> EngineChoice:
    """Return the choice; where float won over INT8, with what bounds the fastest engine in INT8 in its first line.

    Args:
        choice: what was chosen.
        inspect: inspects the engine of a candidate, with the times of its layers.
    """
    best, *others = choice.candidates
    lost = [candidate for candidate in others if candidate.format != FLOAT and candidate.milliseconds]
    if best.format != FLOAT or not lost:
        return choice
    shares = {share.precision: share.time_share for share in inspect(lost[0]).shares if share.time_share is not None}
    said = [f"{text.percent(share)} in {precision}" for precision, share in shares.items()]
    why = f"This CPU ({choice.instructions or 'of unknown instructions'})"
    why += " has no VNNI, and multiplies bytes in several steps" if saturates() else " has VNNI" if _vnni() else ""
    why = f"{why}; the time of {lost[0].name} is spent {', '.join(said)}" if said else why
    return replace(choice, headline=f"{choice.headline}. {why}")


def _vnni() -> bool:
    return any("vnni" in flag for flag in cpu_flags())
