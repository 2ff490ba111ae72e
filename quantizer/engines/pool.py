"""Objects of a library that serve one call at a time, shared by any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Pool(Generic[T]):
    """Objects of one kind, each in use by at most one call: a call takes a free one, or makes one.

    There are as many as there were calls at one time, whatever threads those came from: threads that end leave nothing
    behind. The last one that came back is the next one taken, whose memory is still in the cache.

    Taking and giving back are one operation of a list each, which no other thread interrupts, so no lock is needed.
    """

    def __init__(self, make: Callable[[], T], *first: T) -> None:
        self._make = make
        self._free = [*first]

    def take(self) -> T:
        """Return an object for the caller alone, who gives it back unless its call failed."""
        try:
            return self._free.pop()
        except IndexError:
            return self._make()

    def give_back(self, one: T) -> None:
        """Return an object to the pool."""
        self._free.append(one)
