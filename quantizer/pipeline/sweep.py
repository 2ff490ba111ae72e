"""``quantizer sweep``: many runs in one folder, in processes of their own.

``python -m quantizer.pipeline.sweep`` is one of these processes. It reads one JSON document, and writes a line
of JSON for each run. What libraries print goes to stderr.

Causes and fixes of a run whose folder is complete without them.

They are the longest stage of a run and the only one that changes nothing else in its folder. A sweep looks for them
when the folder is in its place, so that a kill costs the causes alone.

One run of a sweep: whether it is done already, and carrying it out so that its failure leaves the others.

The time that a sweep still takes, told by the runs that it has carried out.

Runs of a sweep in several processes, each of which shares what its own runs have in common.

Runs of a sweep as jobs of a cluster, which submitit hands to Slurm, or on this machine where there is none.

Checks of a sweep before its first run: what a later run lacks is told before the hours that come before it.

A sweep: its runs into folders below one, and their comparison at the end.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console

from quantizer.config import RunConfig, dump_yaml
from quantizer.config.sweep import SweepRun
from quantizer.errors import ConfigError, MissingDependencyError, QuantizerError
from quantizer.pipeline.compare_outputs import refusal
from quantizer.pipeline.faults import Looks, require_package
from quantizer.pipeline.job import QUANTIZER
from quantizer.pipeline.latency_fallback import missed_speed
from quantizer.pipeline.load_workload import LoadedWork, needs, shared_work
from quantizer.pipeline.make_record import write_reports
from quantizer.pipeline.preflight import ready_to_run
from quantizer.pipeline.progress import StageTimer, rounded_time
from quantizer.pipeline.resume import ResumeFiles, resume_files
from quantizer.pipeline.run import RUN, carry_out
from quantizer.pipeline.search_max_drop import DIAGNOSE, wants_diagnosis, with_diagnosis
from quantizer.pipeline.workload import Workload
from quantizer.quantizer import Quantizer
from quantizer.report import RunRecord, read_record, text
from quantizer.report.compare import ComparedRun, Comparison, compare, failed_run, read_run
from quantizer.report.compare_shown import write_comparison
from quantizer.report.trackers import print_tracked
from quantizer.report.verdict import USABLE, verdict_of
from quantizer.utils.child_process import child_environment, python_command, safe_children
from quantizer.utils.files import restore_folder
from quantizer.utils.files.temporary import read_marker

if TYPE_CHECKING:
    from quantizer.config import RunConfig


def main() -> int:
    """Carry out the runs; 0 also where it was ended, which the process that started this one says."""
    # Ctrl-C reaches all processes of a terminal; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    try:
        with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
            os.dup2(2, 1)
            _carry_out(json.load(sys.stdin), out)
    except KeyboardInterrupt:
        return 0
    return 0


def plain_config(config: RunConfig) -> dict[str, Any]:
    """Return a configuration as plain values; ``config_of`` makes an equal one of them, of the same fields set."""
    return config.model_dump(mode="json", exclude_unset=True)


def config_of(plain: dict[str, Any]) -> RunConfig:
    """Return the configuration of plain values."""
    from quantizer.config import RunConfig

    return RunConfig.model_validate(plain)


def _carry_out(asked: dict[str, Any], out: TextIO) -> None:
    # Imported here, so that a signal in the seconds that these imports take ends the process quietly.
    from dataclasses import asdict
    from pathlib import Path

    import torch

    from quantizer.config.sweep import SweepRun

    torch.set_num_threads(asked["threads"])
    runs = [SweepRun(name, config_of(plain)) for name, plain in asked["runs"]]
    for outcome in logged_runs(runs, Path(asked["folder"]), asked["force"]):
        print(json.dumps(asdict(outcome)), file=out, flush=True)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


LOGS = "logs"
"""The folder with what the processes print, a file for each run."""


def logged_runs(runs: Sequence[SweepRun], folder: Path, force: bool) -> Iterator[Outcome]:
    """Carry out runs one after the other in this process, and yield what became of each; all it prints is logged."""
    with shared_work(folder) as shared:
        for run in runs:
            with (folder / LOGS / f"{run.name}.log").open("w", encoding="utf-8") as log:
                yield carry_out_one(run, folder, force, shared, Console(file=log, width=120))


def lacks_diagnosis(record: RunRecord, config: RunConfig) -> bool:
    """Return whether a run of a sweep still needs its causes: among many runs the usable ones need no fix."""
    looked = record.diagnosis_error is not None or any(stage.name == DIAGNOSE for stage in record.stages)
    return not looked and wants_diagnosis(config) and verdict_of(record).level != USABLE


def diagnosed(record: RunRecord, config: RunConfig, folder: Path, shared: LoadedWork, console: Console) -> RunRecord:
    """Look for the causes of a run, and write its reports anew with them; return its record."""
    timer = StageTimer(console)
    with resume_files(folder, searches=False, trains=False) as kept:
        with nullcontext() if shared.has(config) else timer("load model and data"):
            work = shared.load(config, timer, kept, folder)
        quantizer = Quantizer.load(folder / QUANTIZER)
        batches = work.graphs.calibration(work.context.feed.batches(work.examples.calibration))
        record = with_diagnosis(record, work.context, config, quantizer, batches)
    record = replace(record, stages=(*record.stages, *timer.done))
    write_reports(record, config.report.formats, folder)
    return record


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


def lacks_only_diagnosis(run: SweepRun, folder: Path) -> bool:
    """Return whether a run that is done still needs its causes; False for one that cannot be read."""
    try:
        return lacks_diagnosis(read_record(folder / run.name / "report.json"), run.config)
    except QuantizerError:
        # The comparison says so.
        return False


def carry_out_one(run: SweepRun, folder: Path, force: bool, shared: LoadedWork, console: Console) -> Outcome:
    """Carry out one run into its folder below ``folder``; whatever it fails of is in what is returned.

    Of a run that is done only the causes are looked for, if it lacks them.
    """
    start, place, is_there = time.perf_counter(), folder / run.name, False

    def load(timer: StageTimer, kept: ResumeFiles, target: Path) -> Workload:
        (target / _ASKED).write_text(_asked(run), encoding="utf-8")
        return shared.load(run.config, timer, kept, target)

    try:
        if force or not is_done(run, folder):
            made = carry_out(run.config, place, force, console, load)
            assert made is not None  # A sweep is of one process.
            record = made
        else:
            console.print(f"{run.name}: only its causes are left", markup=False, highlight=False, soft_wrap=True)
            record = read_record(place / "report.json")
        is_there = True
        if lacks_diagnosis(record, run.config):
            record = diagnosed(record, run.config, place, shared, console)
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
                python_command("quantizer.pipeline.sweep"),
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
    others are carried out one after the other. The runs of one model and its samples follow one another, and these are
    loaded, scored and calibrated on once.
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
    return [run for run in runs if is_done(run, folder) and not lacks_only_diagnosis(run, folder)]


def _progress(runs: Sequence[SweepRun], folder: Path) -> str:
    """Return how many runs are complete, in words."""
    there, complete = sum(is_done(run, folder) for run in runs), len(_complete(runs, folder))
    rest = f", {there - complete} more but for the causes" if there > complete else ""
    return f"{complete} of {text.counted(len(runs), 'run')} complete{rest}, in {folder}"


def _neighbours(runs: Sequence[SweepRun]) -> list[SweepRun]:
    """Return the runs with those of one model and its samples beside each other."""
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
    missed = None if record is None else missed_speed(record.latency_fallback)
    wrong = "; ".join(filter(None, [outcome.error, refused, missed]))
    return found.with_error(wrong) if wrong else found


def _plain(config: RunConfig) -> dict[str, object]:
    return config.model_dump(mode="json")


if __name__ == "__main__":
    sys.exit(main())
