"""Outlook of a command: its stages, told before it starts, and how long each of them takes, where that is known."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

from quantizer.report import Stage

_MINUTE = 60


class Outlook:
    """The stages ahead of a command.

    Stages may be left out, which skips their numbers, or come again as a search goes on, under the number that was
    reached: the number of all of them stays. What a stage takes is told by an earlier run of the same command, or by
    itself where it comes again; nothing else tells it.

    Args:
        stages: the names of the stages, in order; empty: not known, and stages have no numbers.
        earlier: the stages of an earlier run of the same command.
    """

    def __init__(self, stages: Sequence[str] = (), earlier: Iterable[Stage] = ()) -> None:
        self._ahead = list(stages)
        self._count = len(self._ahead)
        self._seconds: dict[str, deque[float]] = {}
        for stage in earlier:
            self._seconds.setdefault(stage.name, deque()).append(stage.seconds)

    def begin(self, name: str) -> None:
        """Begin a stage; those that were to come before it are left out."""
        self._started = time.perf_counter()
        if name in self._ahead:
            del self._ahead[: self._ahead.index(name) + 1]
        self._name, self._expected = name, self._next(name)

    def end(self) -> float:
        """End the stage, and return the seconds that it took."""
        taken = self.elapsed
        # As an estimate, should it come again: a search repeats the export and the build of its engine.
        times = self._seconds.setdefault(self._name, deque())
        if times:
            times.popleft()
        if not times:
            times.append(taken)
        return taken

    @property
    def head(self) -> str:
        """Number and name of the stage: ``[4/12] export``."""
        number = max(self._count - len(self._ahead), 1)
        return f"[{number}/{self._count}] {self._name}" if self._count else self._name

    @property
    def elapsed(self) -> float:
        """Seconds since the stage began."""
        return time.perf_counter() - self._started

    @property
    def expected(self) -> float | None:
        """Seconds that the stage takes in all; None: not known."""
        return self._expected

    @property
    def left(self) -> str:
        """The time until the command ends, in words; empty where nothing is known of it.

        Where only some of the stages have a time, it is the least that is left.
        """
        if not self._count:
            return ""
        ahead = [self._next(name) for name in self._ahead]
        current = None if self._expected is None else max(self._expected - self.elapsed, 0)
        known = [seconds for seconds in (current, *ahead) if seconds is not None]
        words = rounded_time(sum(known))
        if not words:
            return ""
        return f"{words} left in all" if len(known) == len(ahead) + 1 else f"{words} or more left in all"

    def _next(self, name: str) -> float | None:
        times = self._seconds.get(name)
        return times[0] if times else None


def rounded_time(seconds: float) -> str:
    """Return an estimate as it may be trusted: ``3 s``, ``25 s``, ``1.5 min``, ``12 min``; empty under a second."""
    if seconds < 1:
        return ""
    fives = 5 * round(seconds / 5)
    if fives < _MINUTE:
        return f"{seconds if seconds < 10 else fives:.0f} s"
    minutes = seconds / _MINUTE
    number, unit = (minutes, "min") if minutes < 90 else (minutes / 60, "h")
    return f"{round(2 * number) / 2:g} {unit}" if number < 10 else f"{number:.0f} {unit}"
