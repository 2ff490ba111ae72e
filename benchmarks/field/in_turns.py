"""Latency of a run beside that of the reference: their calls take turns in one process."""

from __future__ import annotations

import statistics
from functools import partial

from subjects import Batch, Run

from quantizer.engines import interleaved_latency

__all__ = ["in_turns"]


def in_turns(run: Run, reference: Run, batch: Batch, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of both, and the speed-up: the median of ratios of calls that follow each other.

    Args:
        run: what is measured.
        reference: what it is measured beside.
        batch: what both are given.
        rounds: how often each is called.
    """
    calls = {"this": partial(run, batch), "reference": partial(reference, batch)}
    taken = interleaved_latency(calls, rounds=rounds, warmup=1)
    return {
        "ms": 1000 * statistics.median(taken["this"]),
        "reference_ms": 1000 * statistics.median(taken["reference"]),
        "speedup": statistics.median(b / a for a, b in zip(taken["this"], taken["reference"], strict=True)),
        "rounds": rounds,
    }
