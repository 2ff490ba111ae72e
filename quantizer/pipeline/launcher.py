"""Reader of what a launcher such as ``torchrun`` tells this process in its environment; it needs no torch."""

from __future__ import annotations

import os


def launched() -> tuple[str, int]:
    """Return the rank of this process as it is told, ``?`` if it is not, and the number of processes, 1 by itself."""
    size = os.environ.get("WORLD_SIZE", "1")
    count = int(size) if size.isdecimal() else 1
    return (os.environ.get("RANK", "?"), count) if count > 1 else ("0", 1)
