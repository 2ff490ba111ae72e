"""The spread of the times behind a median, and whether it is too wide to trust the median."""

from __future__ import annotations

from quantizer.report.ratios import quantized_entry, reference_entry
from quantizer.report.record import Latency, LatencyEntry
from quantizer.report.tables.text import milliseconds, percent

_NOISY = 0.15
"""The share of the median that the middle half of the times may span."""


def spread_words(entry: LatencyEntry) -> str:
    """Return the middle half of the times: ``44.1 to 47.9 ms``; all of them where there are too few for quartiles."""
    low, high = _limits(entry)
    return f"{milliseconds(low).removesuffix(' ms')} to {milliseconds(high)}"


def noise_sentence(latency: Latency | None) -> str:
    """Return what to think of a measurement whose times vary by more than 15% of their median; empty if they do not."""
    entries = () if latency is None else (quantized_entry(latency.engines), reference_entry(latency.engines))
    noisy = [entry for entry in entries if entry is not None and _share(entry) > _NOISY]
    if not noisy:
        return ""
    worst = max(noisy, key=_share)
    return (
        f"The timing is noisy: the middle half of the times of {worst.name} spans {percent(_share(worst))} of their "
        f"median ({spread_words(worst)}); measure again on a machine that does nothing else."
    )


def _share(entry: LatencyEntry) -> float:
    low, high = _limits(entry)
    return (high - low) / entry.median_ms


def _limits(entry: LatencyEntry) -> tuple[float, float]:
    return entry.quartiles_ms or (entry.min_ms, entry.max_ms)
