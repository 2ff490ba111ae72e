"""Times that no machine decides: an engine in integers takes half the time of one in float, and all layers the same.

Measured times of small models are noise. It chooses engines, keeps groups in float, ranks groups and changes verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from quantizer.pipeline import benchmark, fastest_engine
from quantizer.pipeline.time_groups import Timing


def _interleaved_latency(calls: Mapping[str, Callable[[], object]], **_: Any) -> dict[str, list[float]]:
    for call in calls.values():
        call()
    return {name: [0.001 if name == "engine" or "int8" in name else 0.002] for name in calls}


def _latencies(_: Timing, paths: Mapping[str, Path]) -> dict[str, float]:
    return dict.fromkeys(paths, 40.0)


def _of_places(
    _: Timing, engines: Mapping[str, Any], places: Collection[str], *more: object
) -> dict[str, dict[str, float]]:
    return {engine: dict.fromkeys(places, 10.0) for engine in engines}


def fix(patch: Callable[[Any, str, Any], object]) -> None:
    """Set the times with ``setattr``, or with that of a ``MonkeyPatch``."""
    for module in (benchmark, fastest_engine):
        patch(module, "interleaved_latency", _interleaved_latency)
    patch(Timing, "latencies", _latencies)
    patch(Timing, "of_places", _of_places)
