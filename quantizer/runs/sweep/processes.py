"""Runs of a sweep in several processes, each of which shares what its own runs have in common."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from quantizer.common.child_process import child_environment, python_command
from quantizer.config.sweep import SweepRun
from quantizer.runs.sweep.one_run import Outcome
from quantizer.runs.sweep.worker import plain_config


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


class _Worker(threading.Thread):
    """A process for some of the runs, and the thread that waits for it."""

    def __init__(
        self, runs: Sequence[SweepRun], folder: Path, force: bool, jobs: int, done: queue.Queue[Outcome]
    ) -> None:
        super().__init__(daemon=True)
        self._runs = list(runs)
        threads = max(1, (os.cpu_count() or 1) // jobs)
        self._given = {"folder": str(folder), "force": force, "threads": threads}
        self._done = done
        self._stopped = False
        self._process: subprocess.Popen[bytes] | None = None

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
            self._process = subprocess.Popen(
                python_command("quantizer.runs.sweep.worker"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(),
            )
            with self._process as process:
                self._wait(process)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        # A process that ends at once closes the pipe; its exit code says more.
        with suppress(BrokenPipeError), process.stdin as its:
            runs = [(run.name, plain_config(run.config)) for run in self._runs]
            its.write(json.dumps({"runs": runs, **self._given}).encode())
        while self._runs:
            line = process.stdout.readline()
            if line.endswith(b"\n"):
                outcome = Outcome(**json.loads(line))
            else:
                code = process.wait()
                if self._stopped:
                    return
                outcome = Outcome(self._runs[0].name, f"its process ended with exit code {code}, see its log")
                self._runs.pop(0)
                self._done.put(outcome)
                return
            self._runs.pop(0)
            self._done.put(outcome)

    def stop(self) -> None:
        """End the process, which removes what it has not completed."""
        self._stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
