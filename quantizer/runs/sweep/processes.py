"""Runs of a sweep in several processes, each of which shares what its own runs have in common."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

from rich.console import Console

from quantizer.config.sweep import SweepRun
from quantizer.runs.sweep.one_run import Outcome
from quantizer.runs.sweep.one_run import carry_out_one
from quantizer.runs.sweep.shared_work import shared_work

__all__ = ["LOGS", "in_processes", "logged_runs", "parts_of"]

LOGS = "logs"
"""The folder with what the processes print, a file for each run."""


def in_processes(
    runs: Sequence[SweepRun], folder: Path, force: bool, jobs: int, tell: Callable[[Outcome], None]
) -> list[Outcome]:
    """Carry out runs in ``jobs`` processes, neighbours in the same one, and return what became of them.

    A process that ends, as the system ends one without memory, fails the run that it was at; another one goes on.
    """
    done: queue.Queue[Outcome] = queue.Queue()
    workers = [_Worker(part, folder, force, jobs, done) for part in parts_of(runs, jobs)]
    try:
        for worker in workers:
            worker.start()
        outcomes: list[Outcome] = []
        while len(outcomes) < len(runs):
            outcomes.append(done.get())
            tell(outcomes[-1])
    finally:
        for worker in workers:
            worker.stop()
    return outcomes


def parts_of(runs: Sequence[SweepRun], jobs: int) -> list[Sequence[SweepRun]]:
    """Return runs in at most ``jobs`` parts of about equal size, neighbours together."""
    jobs = min(jobs, len(runs))
    bounds = [len(runs) * job // jobs for job in range(jobs + 1)]
    return [runs[low:high] for low, high in pairwise(bounds)]


def logged_runs(runs: Sequence[SweepRun], folder: Path, force: bool) -> Iterator[Outcome]:
    """Carry out runs one after the other in this process, and yield what became of each; all it prints is logged."""
    with shared_work(folder) as shared:
        for run in runs:
            with (folder / LOGS / f"{run.name}.log").open("w", encoding="utf-8") as log:
                yield carry_out_one(run, folder, force, shared, Console(file=log, width=120))


class _Worker(threading.Thread):
    """A process for some of the runs, and the thread that waits for it."""

    def __init__(
        self, runs: Sequence[SweepRun], folder: Path, force: bool, jobs: int, done: queue.Queue[Outcome]
    ) -> None:
        super().__init__(daemon=True)
        self._runs = list(runs)
        self._given = (folder, force, jobs)
        self._done = done
        self._stopped = False
        self._process: multiprocessing.process.BaseProcess | None = None

    def run(self) -> None:
        """Start a process, and another one for the rest if it ends before its time."""
        try:
            self._carry_out()
        except (OSError, RuntimeError, ValueError) as error:
            # Whoever waits for the outcomes would wait for ever.
            for run in self._runs:
                self._done.put(Outcome(run.name, f"{type(error).__name__}: {error}"))

    def _carry_out(self) -> None:
        while self._runs and not self._stopped:
            spawning = multiprocessing.get_context("spawn")
            mine, its = spawning.Pipe(duplex=False)
            self._process = spawning.Process(target=_work, args=(self._runs, *self._given, its))
            self._process.start()
            its.close()
            self._wait(mine)

    def _wait(self, mine: Connection) -> None:
        assert self._process is not None
        while self._runs:
            try:
                outcome: Outcome = mine.recv()
            except EOFError:
                self._process.join()
                if self._stopped:
                    return
                code = self._process.exitcode
                outcome = Outcome(self._runs[0].name, f"its process ended with exit code {code}, see its log")
                self._runs.pop(0)
                self._done.put(outcome)
                return
            self._runs.pop(0)
            self._done.put(outcome)
        self._process.join()

    def stop(self) -> None:
        """End the process, which removes what it has not completed."""
        self._stopped = True
        if self._process is not None and self._process.is_alive():
            self._process.terminate()
            self._process.join()


def _work(runs: Sequence[SweepRun], folder: Path, force: bool, jobs: int, out: Connection) -> None:
    """Carry out runs, in a process of its own."""
    import torch

    signal.signal(signal.SIGTERM, _end)
    # Ctrl-C reaches all processes of a terminal; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    try:
        for outcome in logged_runs(runs, folder, force):
            out.send(outcome)
    except KeyboardInterrupt:
        # The process that started this one says so.
        return


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt
