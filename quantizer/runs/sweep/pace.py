"""The time that a sweep still takes, told by the runs that it has carried out."""

from __future__ import annotations

from collections.abc import Sequence

from quantizer.config.sweep import SweepRun
from quantizer.runs.progress.outlook import rounded_time
from quantizer.runs.sweep.shared_work import needs


class Pace:
    """The pace of runs that follow one another: the first of a model makes what the others take from it.

    Args:
        runs: the runs, in their order.
    """

    def __init__(self, runs: Sequence[SweepRun]) -> None:
        models = [needs(run.config) for run in runs]
        self._first = [model not in models[:place] for place, model in enumerate(models)]
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    def add(self, place: int, seconds: float) -> None:
        """Note what the run at a place, from 0, took."""
        self._seconds[self._first[place]].append(seconds)

    def left(self, place: int) -> str:
        """Return the time until the end in words, as the run at a place begins; empty where nothing is known."""
        known = {first: sum(taken) / len(taken) for first, taken in self._seconds.items() if taken}
        if not known:
            return ""
        ahead = self._first[place:]
        words = rounded_time(sum(known.get(first, max(known.values())) for first in ahead))
        # Nothing is known yet of a run that takes something from another one.
        most = "at most " if False in ahead and False not in known else ""
        return f"{most}about {words} left in all" if words else ""


def time_left(done: int, count: int, seconds: float) -> str:
    """Return the time until the end of runs in several processes, in words; empty where nothing is known.

    Args:
        done: how many runs have ended.
        count: how many there are.
        seconds: the time since they began.
    """
    words = rounded_time(seconds / done * (count - done)) if done else ""
    return f"about {words} left in all" if words else ""
