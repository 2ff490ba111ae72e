"""Checks of a sweep before its first run: what a later run lacks is told before the hours that come before it.

A sweep: its runs into folders below one, and their comparison at the end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from quantizer.config import RunConfig
from quantizer.config.sweep import SweepRun
from quantizer.errors import ConfigError, QuantizerError
from quantizer.files.marker import read_marker
from quantizer.report import text
from quantizer.report.compare import ComparedRun, Comparison, compare, failed_run, read_run
from quantizer.report.compare_shown import write_comparison
from quantizer.runs.outputs.right_engine import refusal
from quantizer.runs.placement.speed_goal import missed_speed
from quantizer.runs.preflight.faults import Looks, require_package
from quantizer.runs.preflight.run_ready import ready_to_run
from quantizer.runs.run import RUN
from quantizer.runs.sweep.logged_runs import LOGS
from quantizer.runs.sweep.one_run import Outcome, carry_out_one, is_done, lacks_only_causes
from quantizer.runs.sweep.processes import Pace, in_jobs, in_processes, require_launcher, time_left
from quantizer.runs.sweep.shared_work import needs, shared_work

_ESTIMATES = 4
"""How many runs are estimated: an estimate takes longer than all other checks of a run."""


@dataclass(frozen=True)
class SweepReady:
    """A sweep of which one run at least can start.

    Attributes:
        notes: what is worth knowing before it does, with an estimate of one run alone for each of the first
            models and rows.
        faults: why runs cannot start, by their names.
    """

    notes: tuple[str, ...]
    faults: dict[str, str]


def ready_to_sweep(runs: Sequence[SweepRun]) -> SweepReady:
    """Check all that each run needs besides its loaded model."""
    notes: dict[str, None] = {}
    estimated: set[str] = set()
    faults: dict[str, str] = {}
    looks = Looks()
    for run in runs:
        estimates = len(estimated) < _ESTIMATES and needs(run.config) not in estimated
        folder = Path(run.config.output).absolute()
        try:
            ready = ready_to_run(run.config, folder, RUN, force=True, looks=looks, estimated=estimates)
        except QuantizerError as error:
            faults[run.name] = str(error)
            continue
        notes.update(dict.fromkeys(ready.notes))
        if ready.estimate is not None:
            estimated.add(needs(run.config))
            notes[f"{run.name}, alone: {ready.estimate}"] = None
    if runs and len(faults) == len(runs):
        raise QuantizerError(faults[runs[0].name])
    return SweepReady(tuple(notes), faults)


COMPARISON, TABLE = "comparison.html", "comparison.csv"
"""The page and the figures, in the folder of the sweep."""


def carry_out_sweep(
    runs: Sequence[SweepRun],
    folder: Path,
    console: Console,
    *,
    force: bool = False,
    jobs: int = 1,
    launcher: str | None = None,
) -> Comparison:
    """Carry out the runs of a sweep, and return their comparison, which lies in the folder too.

    A run whose folder is complete, of the same configuration, is left as it is, or gets the causes that it lacks; the
    others are carried out one after the other, those of one model and its rows together, which are loaded, scored and
    calibrated on once.
    """
    folder = folder.absolute()
    _check(runs, folder)
    if launcher is not None:
        require_launcher()
    kept = [] if force else _complete(runs, folder)
    names = {run.name for run in kept}
    ready = ready_to_sweep([run for run in runs if run.name not in names])
    todo = _neighbours([run for run in runs if run.name not in names and run.name not in ready.faults])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QuantizerError(f"{folder} cannot be written: {error.strerror}; choose another folder") from error
    if kept:
        console.print(f"{len(kept)} of {len(runs)} runs are complete in {folder} and stay", highlight=False)
    for line in ready.notes:
        console.print(line, markup=False, highlight=False)
    for name, fault in ready.faults.items():
        console.print(f"{name} cannot start: {fault}", markup=False, highlight=False, soft_wrap=True)
    try:
        outcomes = _carried_out(todo, folder, force, jobs, launcher, console)
    except KeyboardInterrupt as stop:
        raise type(stop)(f"{_progress(runs, folder)}; the same command goes on with the others") from stop
    ended = {outcome.name: outcome for outcome in outcomes}
    ended |= {name: Outcome(name, fault) for name, fault in ready.faults.items()}
    found = compare([_compared(run, folder, ended.get(run.name, Outcome(run.name, None))) for run in runs])
    write_comparison(found, folder / COMPARISON, folder / TABLE, folder.name)
    return found


def _check(runs: Sequence[SweepRun], folder: Path) -> None:
    """Raise for what would come after the first run otherwise."""
    marker = read_marker(folder) if folder.is_dir() else None
    if marker is not None:
        raise QuantizerError(f"{folder} holds a {marker.kind}, and a sweep has its own folder: name it by --output")
    for tracker in {run.config.report.track for run in runs} - {None}:
        require_package(str(tracker), str(tracker))
    if any("json" not in run.config.report.formats for run in runs):
        raise ConfigError(["report.formats: json is missing; expected it in every run of a sweep, which compares them"])


def _complete(runs: Sequence[SweepRun], folder: Path) -> list[SweepRun]:
    """Return the runs of which nothing is left to do."""
    return [run for run in runs if is_done(run, folder) and not lacks_only_causes(run, folder)]


def _progress(runs: Sequence[SweepRun], folder: Path) -> str:
    """Return how many runs are complete, in words."""
    there, complete = sum(is_done(run, folder) for run in runs), len(_complete(runs, folder))
    rest = f", {there - complete} more but for the causes" if there > complete else ""
    return f"{complete} of {text.counted(len(runs), 'run')} complete{rest}, in {folder}"


def _neighbours(runs: Sequence[SweepRun]) -> list[SweepRun]:
    """Return the runs with those of one model and its rows beside each other."""
    order: dict[str, int] = {}
    for run in runs:
        order.setdefault(needs(run.config), len(order))
    return sorted(runs, key=lambda run: order[needs(run.config)])


def _carried_out(
    runs: Sequence[SweepRun], folder: Path, force: bool, jobs: int, launcher: str | None, console: Console
) -> list[Outcome]:
    if not runs:
        return []
    if jobs > 1 or launcher is not None:
        what = "processes" if launcher is None else f"jobs of {launcher}"
        console.print(f"{len(runs)} runs in {min(jobs, len(runs))} {what}; logs in {folder / LOGS}", highlight=False)
        (folder / LOGS).mkdir(exist_ok=True)

        ended, start = 0, time.perf_counter()

        def tell(outcome: Outcome) -> None:
            nonlocal ended
            ended += 1
            what = "done" if outcome.error is None else f"failed: {outcome.error}"
            # Jobs of a cluster tell all their runs at once.
            left = time_left(ended, len(runs), time.perf_counter() - start) if launcher is None else ""
            console.print(
                ", ".join(filter(None, [f"{outcome.name}: {what}", f"{ended} of {len(runs)}", left])),
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

        return (in_processes if launcher is None else in_jobs)(runs, folder, force, jobs, tell)
    return _one_by_one(runs, folder, force, console)


def _one_by_one(runs: Sequence[SweepRun], folder: Path, force: bool, console: Console) -> list[Outcome]:
    """Carry out runs in this process, each begun with its number and the time that is left for all."""
    outcomes: list[Outcome] = []
    pace = Pace(runs)
    with shared_work(folder) as shared:
        for place, run in enumerate(runs):
            words = [f"run {place + 1} of {len(runs)}: {run.name}", pace.left(place)]
            console.print(", ".join(filter(None, words)), markup=False, highlight=False, soft_wrap=True)
            start, resumes = time.perf_counter(), not force and is_done(run, folder)
            outcomes.append(carry_out_one(run, folder, force, shared, console))
            # A failure, and causes alone, tell nothing of the others.
            if outcomes[-1].error is None and not resumes:
                pace.add(place, time.perf_counter() - start)
    return outcomes


def _compared(run: SweepRun, folder: Path, outcome: Outcome) -> ComparedRun:
    place = folder / run.name
    if outcome.error is not None and not outcome.is_there:
        return failed_run(run.name, place, _plain(run.config), outcome.error)
    try:
        found = read_run(place, run.name)
    except QuantizerError as unreadable:
        return failed_run(run.name, place, _plain(run.config), str(unreadable))
    record = found.record
    refused = None if record is None or record.engine_refused is None else refusal(record.engine_refused)
    missed = None if record is None else missed_speed(record.placement)
    wrong = "; ".join(filter(None, [outcome.error, refused, missed]))
    return found.with_error(wrong) if wrong else found


def _plain(config: RunConfig) -> dict[str, object]:
    return config.model_dump(mode="json")
