"""Runs of a sweep one after the other in one process, each with a log of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from quantizer.config.sweep import SweepRun
from quantizer.runs.sweep.one_run import Outcome, carry_out_one
from quantizer.runs.sweep.shared_work import shared_work

LOGS = "logs"
"""The folder with what the processes print, a file for each run."""


def logged_runs(runs: Sequence[SweepRun], folder: Path, force: bool) -> Iterator[Outcome]:
    """Carry out runs one after the other in this process, and yield what became of each; all it prints is logged."""
    with shared_work(folder) as shared:
        for run in runs:
            with (folder / LOGS / f"{run.name}.log").open("w", encoding="utf-8") as log:
                yield carry_out_one(run, folder, force, shared, Console(file=log, width=120))
