"""Functions called from several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Call ``work`` with 0, 1, 2, ... in as many threads, which begin together; raise what one of them raised."""
    gate = threading.Barrier(count)

    def begin(number: int) -> object:
        gate.wait()
        return work(number)

    with ThreadPoolExecutor(count) as threads:
        for future in [threads.submit(begin, number) for number in range(count)]:
            future.result()
