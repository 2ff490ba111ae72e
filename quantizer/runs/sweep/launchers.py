"""Runs of a sweep as jobs of a cluster, which submitit hands to Slurm, or on this machine where there is none."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quantizer.common.child_process import safe_children
from quantizer.config.sweep import SweepRun
from quantizer.errors import MissingDependencyError
from quantizer.runs.sweep.logged_runs import LOGS, logged_runs
from quantizer.runs.sweep.one_run import Outcome, is_done
from quantizer.runs.sweep.processes import parts_of

_MINUTES = 24 * 60
"""The limit of a job where ``SBATCH_TIMELIMIT`` names none: submitit's own would end it after five minutes."""


def require_launcher() -> Any:
    """Return submitit.

    Raises:
        MissingDependencyError: it is not installed.
    """
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
