"""The time that a sweep still takes, told by the runs that it has carried out.

Runs of a sweep in several processes, each of which shares what its own runs have in common.

Runs of a sweep as jobs of a cluster, which submitit hands to Slurm, or on this machine where there is none.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from quantizer.common.child_process import child_environment, python_command, safe_children
from quantizer.config.sweep import SweepRun
from quantizer.errors import MissingDependencyError
from quantizer.runs.progress.stage_timer import rounded_time
from quantizer.runs.sweep.logged_runs import LOGS, logged_runs
from quantizer.runs.sweep.one_run import Outcome, is_done
from quantizer.runs.sweep.shared_work import needs
from quantizer.runs.sweep.worker import plain_config


class Pace:
    """The pace of runs that follow one another: the first of a model makes what the others take from it."""

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


_MINUTES = 24 * 60
"""The limit of a job where ``SBATCH_TIMELIMIT`` names none: submitit's own would end it after five minutes."""


def require_launcher() -> Any:
    """Return submitit."""
    try:
        return importlib.import_module("submitit")
    except ModuleNotFoundError as error:
        raise MissingDependencyError("submitit", "submitit") from error


def in_jobs(
    runs: Sequence[SweepRun], folder: Path, force: bool, jobs: int, tell: Callable[[Outcome], None]
) -> list[Outcome]:
    """Carry out runs in ``jobs`` jobs, neighbours in the same one, and return what became of them.

    Slurm takes partition, account and the like from its own variables, such as ``SBATCH_PARTITION``. A job that ends
    before its time, as one does at its limit, fails its runs that are not complete. Ctrl-C cancels all jobs.
    """
    submitit = require_launcher()
    executor = submitit.AutoExecutor(folder / LOGS)
    parts = parts_of(runs, jobs)
    on_cluster = executor.cluster == "slurm"
    if on_cluster:
        executor.update_parameters(slurm_time=os.environ.get("SBATCH_TIMELIMIT", _MINUTES), name="quantizer")
    else:
        executor.update_parameters(timeout_min=_MINUTES)
    threads = None if on_cluster else max(1, (os.cpu_count() or 1) // len(parts))
    given = {}
    outcomes: list[Outcome] = []
    try:
        # Its jobs are started by "python -m", and inherit the environment, on a cluster too.
        with safe_children():
            for part in parts:
                given[executor.submit(_work, part, folder, force, threads)] = part
        for job in submitit.helpers.as_completed(list(given)):
            for outcome in outcomes_of(job, given[job], folder):
                outcomes.append(outcome)
                tell(outcome)
    except BaseException:
        for job in given:
            job.cancel()
        raise
    return outcomes


def _work(runs: Sequence[SweepRun], folder: Path, force: bool, threads: int | None) -> list[Outcome]:
    """Carry out runs in a job, where the folder has the same path."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    return list(logged_runs(runs, folder, force))


def outcomes_of(job: Any, runs: Sequence[SweepRun], folder: Path) -> list[Outcome]:
    """Return what became of the runs of a job that has ended."""
    error = job.exception()
    if error is None:
        outcomes: list[Outcome] = job.result()
        return outcomes
    last = str(error).strip().splitlines()[-1:] or [type(error).__name__]
    text = f"its job {job.job_id} ended: {last[0]}; see {job.paths.stderr}"
    return [Outcome(run.name, None if is_done(run, folder) else text) for run in runs]
