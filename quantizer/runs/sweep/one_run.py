"""One run of a sweep: whether it is done already, and carrying it out so that its failure leaves the others."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from quantizer.config import RunConfig, dump_yaml
from quantizer.config.sweep import SweepRun
from quantizer.errors import QuantizerError
from quantizer.files import restore_folder
from quantizer.files.marker import read_marker
from quantizer.report import read_record
from quantizer.report.trackers import print_tracked
from quantizer.runs.progress.stage_timer import StageTimer
from quantizer.runs.run import RUN, carry_out
from quantizer.runs.run_context import ResumeFiles
from quantizer.runs.sweep.late_causes import lacks_causes, with_causes
from quantizer.runs.sweep.shared_work import SharedWork
from quantizer.runs.workload.workload import Workload

_ASKED = "asked.yaml"
"""The configuration of a run before anything was chosen in it, by which the same sweep knows its run again."""


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Attributes:
        name: its name.
        error: why it failed; None: its folder is complete.
        is_there: whether its folder is complete all the same, but for the causes.
    """

    name: str
    error: str | None
    is_there: bool = False


def is_done(run: SweepRun, folder: Path) -> bool:
    """Return whether the folder of the sweep holds this run, complete and of the same configuration."""
    place = folder / run.name
    restore_folder(place)
    if not place.exists():
        return False
    marker, asked = read_marker(place), place / _ASKED
    if marker is not None and marker.kind == RUN and asked.is_file():
        if asked.read_text(encoding="utf-8") == _asked(run):
            return True
        what = "holds a run of another configuration"
    else:
        what = "is no run of this sweep"
    raise QuantizerError(f"{place} {what}; choose another folder by --output, or replace its runs by --force")


def lacks_only_causes(run: SweepRun, folder: Path) -> bool:
    """Return whether a run that is done still needs its causes; False for one that cannot be read."""
    try:
        return lacks_causes(read_record(folder / run.name / "report.json"), run.config)
    except QuantizerError:
        # The comparison says so.
        return False


def carry_out_one(run: SweepRun, folder: Path, force: bool, shared: SharedWork, console: Console) -> Outcome:
    """Carry out one run into its folder below ``folder``; whatever it fails of is in what is returned.

    Of a run that is done only the causes are looked for, if it lacks them.
    """
    start, place, is_there = time.perf_counter(), folder / run.name, False

    def load(timer: StageTimer, kept: ResumeFiles, target: Path) -> Workload:
        (target / _ASKED).write_text(_asked(run), encoding="utf-8")
        return shared.load(run.config, timer, kept, target)

    try:
        if force or not is_done(run, folder):
            record = carry_out(run.config, place, force, console, load)
        else:
            console.print(f"{run.name}: only its causes are left", markup=False, highlight=False, soft_wrap=True)
            record = read_record(place / "report.json")
        is_there = True
        if lacks_causes(record, run.config):
            record = with_causes(record, run.config, place, shared, console)
        print_tracked(run.config.report.track, record, place, console)
    except Exception as error:  # noqa: BLE001 - whatever one run fails of, the others go on
        plain = isinstance(error, QuantizerError)
        text = str(error) if plain else f"{type(error).__name__}: {error}"
        console.print(f"{run.name} failed: {text}", markup=False, highlight=False, soft_wrap=True)
        return Outcome(run.name, text, is_there)
    seconds = time.perf_counter() - start
    console.print(f"{run.name}: done in {seconds:.0f} s", markup=False, highlight=False, soft_wrap=True)
    return Outcome(run.name, None)


def _asked(run: SweepRun) -> str:
    config: RunConfig = run.config.model_copy(update={"output": run.name})
    return dump_yaml(config)
