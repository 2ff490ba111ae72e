"""All that makes torch's exporter faster without another result."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from quantizer.export.decompositions import replaced_in_place
from quantizer.export.exporter_cache import exporter_cache


@contextmanager
def quick_exporter() -> Iterator[None]:
    """Let the exporter find nothing out twice, trace no graph anew without need, and search for no cycles."""
    with exporter_cache(), replaced_in_place(), _without_collection():
        yield


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause Python's search for cycles: it goes again and again through a graph that stays, 8% of an export's time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
