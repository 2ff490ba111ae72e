"""Entries of raw measurements with their ratios, which only this file computes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

from quantizer.errors import QuantizerError
from quantizer.report.record import Latency, LatencyEntry, MemoryEntry, SizeEntry

_FEWEST_FOR_QUARTILES = 4

Entry = TypeVar("Entry", LatencyEntry, SizeEntry, MemoryEntry)


def latency_entries(times_ms: Mapping[str, Sequence[float]]) -> tuple[LatencyEntry, ...]:
    """Return median, extremes, quartiles and speed-up of each engine, from the times of all its batches."""
    empty = [name for name, times in times_ms.items() if not times]
    if empty:
        raise QuantizerError(f"latency of {empty[0]!r}: no times; give at least one")
    medians = {name: float(statistics.median(times)) for name, times in times_ms.items()}
    ratios = _ratios(medians, "latency")
    return tuple(
        LatencyEntry(
            name=name,
            median_ms=medians[name],
            min_ms=float(min(times)),
            max_ms=float(max(times)),
            quartiles_ms=_quartiles(times),
            ratio_to_float=ratios[name],
        )
        for name, times in times_ms.items()
    )


def size_entries(sizes_bytes: Mapping[str, int]) -> tuple[SizeEntry, ...]:
    """Return size and ratio of each form; errors are those of :func:`latency_entries`."""
    ratios = _ratios(sizes_bytes, "size")
    return tuple(SizeEntry(name=name, bytes=int(size), ratio=ratios[name]) for name, size in sizes_bytes.items())


def memory_entries(peaks_mib: Mapping[str, float]) -> tuple[MemoryEntry, ...]:
    """Return peak memory and ratio of each form; errors are those of :func:`latency_entries`."""
    ratios = _ratios(peaks_mib, "memory")
    return tuple(MemoryEntry(name=name, peak_mib=float(peak), ratio=ratios[name]) for name, peak in peaks_mib.items())


def reference_entry(entries: Sequence[Entry]) -> Entry | None:
    """Return the entry named ``float``, else the first one; None if there is none."""
    named = [entry for entry in entries if entry.name == "float"]
    return next(iter(named or entries), None)


def quantized_entry(entries: Sequence[Entry]) -> Entry | None:
    """Return the entry of the headline: that named ``engine``, else the last one that is not the reference."""
    named = [entry for entry in entries if entry.name == "engine"]
    reference = reference_entry(entries)
    others = [entry for entry in entries if entry is not reference]
    return next(iter(named or others[::-1]), None)


def reference_words(latency: Latency) -> str:
    """Return what speed-ups are relative to: ``the float engine (openvino bfloat16)``, ``the model in PyTorch``."""
    told = latency.reference
    if told is not None and told.startswith("PyTorch"):
        return "the model in PyTorch, in float"
    return "the float engine" if told is None else f"the float engine ({told})"


def _quartiles(times: Sequence[float]) -> tuple[float, float] | None:
    if len(times) < _FEWEST_FOR_QUARTILES:
        return None
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


def _ratios(values: Mapping[str, float], what: str) -> dict[str, float]:
    if "float" not in values:
        raise QuantizerError(f"{what}: no entry 'float' to take ratios to; there are: {', '.join(values)}")
    wrong = [name for name, value in values.items() if not value > 0]
    if wrong:
        raise QuantizerError(f"{what} of {wrong[0]!r} is {values[wrong[0]]}; expected a number above 0")
    return {name: float(values["float"] / value) for name, value in values.items()}
