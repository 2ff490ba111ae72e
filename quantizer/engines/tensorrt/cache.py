"""Timing cache of TensorRT: kernel times on this GPU, kept in a file from one build to the next.

Untested on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantizer.engines.engine_file import whole_file
from quantizer.errors import EngineError


def use_cache(config: Any, path: Path) -> None:
    """Give the cache in ``path`` to a builder's configuration; an empty one if there is no such file.

    Raises:
        EngineError: the file is not a cache of this release and GPU.
    """
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    # With ignore_mismatch a cache of another GPU would be accepted, with wrong times.
    if cache is None or not config.set_timing_cache(cache, False):
        raise EngineError(f"{path} is no timing cache of this TensorRT and this GPU: delete it, or name another file")


def save_cache(config: Any, path: Path) -> None:
    """Write the cache of a configuration after a build, whole or not at all.

    Raises:
        EngineError: the file cannot be written.
    """
    with whole_file(path) as part:
        part.write_bytes(memoryview(config.get_timing_cache().serialize()))
