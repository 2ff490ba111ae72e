"""Sweeps: many runs in one folder, and their comparison.

All runs are checked first. Then they run in this process, in several processes, or as Slurm jobs. A failed run does not
stop the others. Runs of one model share the loaded model, float scores and calibrations.

``python -m quantizer.pipeline.sweep`` is one of these processes. It reads a JSON document from stdin, and writes one
line of JSON per run to stdout. Output of libraries goes to stderr.
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
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console

from quantizer.config import RunConfig, dump_yaml
from quantizer.config.sweep import SweepRun
from quantizer.errors import ConfigError, MissingDependencyError, QuantizerError
from quantizer.pipeline.compare_outputs import refusal
from quantizer.pipeline.latency_fallback import missed_speed
from quantizer.pipeline.load_workload import LoadedWork, calibrations_of, needs, shared_work
from quantizer.pipeline.preflight import ready_to_run
from quantizer.pipeline.preflight_checks import ReadCache, require_package
from quantizer.pipeline.progress import StageTimer, rounded_time
from quantizer.pipeline.resume import ResumeFiles
from quantizer.pipeline.run import RUN, carry_out
from quantizer.pipeline.workload import Workload
from quantizer.report import text
from quantizer.report.compare import ComparedRun, Comparison, compare, failed_run, read_run
from quantizer.report.compare_shown import write_comparison
from quantizer.report.trackers import print_tracked
from quantizer.utils.child_process import child_environment, python_command, safe_children
from quantizer.utils.files import restore_folder
from quantizer.utils.files.temporary import read_marker

if TYPE_CHECKING:
    from quantizer.config import RunConfig


def main() -> int:
    """Carry out the runs of one process, and return the exit code; 0 also after SIGTERM, which the parent reports."""
    # Ctrl-C reaches all processes of a terminal; the parent ends this process.
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
    """Return a configuration as plain values; ``config_of`` restores it, including which fields are set."""
    return config.model_dump(mode="json", exclude_unset=True)


def config_of(plain: dict[str, Any]) -> RunConfig:
    """Return the configuration of plain values."""
    from quantizer.config import RunConfig

    return RunConfig.model_validate(plain)


def _carry_out(request: dict[str, Any], out: TextIO) -> None:
    # Imported here, so that a signal during these slow imports ends the process quietly.
    from dataclasses import asdict
    from pathlib import Path

    import torch

    from quantizer.config.sweep import SweepRun

    torch.set_num_threads(request["threads"])
    runs = [SweepRun(name, config_of(plain)) for name, plain in request["runs"]]
    for outcome in logged_runs(runs, Path(request["folder"]), request["force"]):
        print(json.dumps(asdict(outcome)), file=out, flush=True)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


LOGS = "logs"
"""The folder with the output of the runs, one file each."""


def logged_runs(runs: Sequence[SweepRun], folder: Path, force: bool) -> Iterator[Outcome]:
    """Carry out runs one after the other in this process, log their output, and yield their outcomes."""
    with shared_work(folder) as shared:
        for run in runs:
            with (folder / LOGS / f"{run.name}.log").open("w", encoding="utf-8") as log:
                yield carry_out_one(run, folder, force, shared, Console(file=log, width=120))


_CONFIG_FILE = "asked.yaml"
"""The file with the unresolved configuration of a run, by which a repeated sweep recognizes it."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        name: the name of the run.
        error: the reason of a failure; None on success.
        is_there: the folder is complete although the experiment tracker failed.
    """

    name: str
    error: str | None
    is_there: bool = False


def is_done(run: SweepRun, folder: Path) -> bool:
    """Return whether the folder of the sweep contains this run, complete and with the same configuration."""
    place = folder / run.name
    restore_folder(place)
    if not place.exists():
        return False
    marker, config_file = read_marker(place), place / _CONFIG_FILE
    if marker is not None and marker.kind == RUN and config_file.is_file():
        if config_file.read_text(encoding="utf-8") == _config_text(run):
            return True
        problem = "contains a run of another configuration"
    else:
        problem = "is not a run of this sweep"
    raise QuantizerError(f"{place} {problem}; choose another folder with --output, or replace its runs with --force")


def carry_out_one(run: SweepRun, folder: Path, force: bool, shared: LoadedWork, console: Console) -> Outcome:
    """Carry out one run of a sweep, and return its outcome, including any error."""
    start, place, is_there = time.perf_counter(), folder / run.name, False

    def load(timer: StageTimer, kept: ResumeFiles, target: Path) -> Workload:
        (target / _CONFIG_FILE).write_text(_config_text(run), encoding="utf-8")
        return shared.load(run.config, timer, kept, target)

    try:
        record = carry_out(run.config, place, force, console, load)
        assert record is not None  # A sweep runs in one process.
        is_there = True
        print_tracked(run.config.report.track, record, place, console)
    except Exception as error:  # noqa: BLE001 - whatever one run fails of, the others go on
        plain = isinstance(error, QuantizerError)
        text = str(error) if plain else f"{type(error).__name__}: {error}"
        console.print(f"{run.name} failed: {text}", markup=False, highlight=False, soft_wrap=True)
        return Outcome(run.name, text, is_there)
    seconds = time.perf_counter() - start
    console.print(f"{run.name}: done in {seconds:.0f} s", markup=False, highlight=False, soft_wrap=True)
    return Outcome(run.name, None)


def _config_text(run: SweepRun) -> str:
    config: RunConfig = run.config.model_copy(update={"output": run.name})
    return dump_yaml(config)


class Pace:
    """Estimator of the remaining time of consecutive runs; the first run of a model takes longer than the others."""

    def __init__(self, runs: Sequence[SweepRun]) -> None:
        models = [needs(run.config) for run in runs]
        self._first = [model not in models[:place] for place, model in enumerate(models)]
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    def add(self, place: int, seconds: float) -> None:
        """Note the duration of a run, by its index."""
        self._seconds[self._first[place]].append(seconds)

    def left(self, place: int) -> str:
        """Return the remaining time in words when the run of this index begins; empty if unknown."""
        known = {first: sum(taken) / len(taken) for first, taken in self._seconds.items() if taken}
        if not known:
            return ""
        ahead = self._first[place:]
        words = rounded_time(sum(known.get(first, max(known.values())) for first in ahead))
        # Runs that share work with an earlier one are faster, but none has finished yet.
        bound = "at most " if False in ahead and False not in known else ""
        return f"{bound}about {words} left" if words else ""


def time_left(done: int, count: int, seconds: float) -> str:
    """Return the remaining time of runs in several processes in words; empty if unknown.

    Args:
        done: the number of finished runs.
        count: the number of all runs.
        seconds: the elapsed time in seconds.
    """
    words = rounded_time(seconds / done * (count - done)) if done else ""
    return f"about {words} left" if words else ""


def in_processes(
    runs: Sequence[SweepRun], folder: Path, force: bool, jobs: int, tell: Callable[[Outcome], None]
) -> list[Outcome]:
    """Carry out runs in ``jobs`` processes, neighbours in the same process, and return their outcomes.

    If a process dies, for example without memory, its current run fails and a new process continues with the others.
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
    """Split runs into at most ``jobs`` parts of about equal size, neighbours together."""
    jobs = min(jobs, len(runs))
    bounds = [len(runs) * job // jobs for job in range(jobs + 1)]
    return [runs[low:high] for low, high in pairwise(bounds)]


class _Worker(threading.Thread):
    """A process for some of the runs, and the thread waiting for it."""

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
        """Start a process, and restart it for the remaining runs if it dies."""
        try:
            self._carry_out()
        except (OSError, RuntimeError, ValueError) as error:
            # Without outcomes, the main thread would wait forever.
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
        # If the process dies at once, the pipe closes; its exit code says more.
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
                outcome = Outcome(self._runs[0].name, f"the process ended with exit code {code}; see its log")
                self._runs.pop(0)
                self._done.put(outcome)
                return
            self._runs.pop(0)
            self._done.put(outcome)

    def stop(self) -> None:
        """End the process, which removes its incomplete folder."""
        self._stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


_MINUTES = 24 * 60
"""Time limit of a job in minutes without ``SBATCH_TIMELIMIT``; submitit's default is five minutes."""


def require_launcher() -> Any:
    """Return the module submitit."""
    try:
        return importlib.import_module("submitit")
    except ModuleNotFoundError as error:
        raise MissingDependencyError("submitit", "submitit") from error


def in_jobs(
    runs: Sequence[SweepRun], folder: Path, force: bool, jobs: int, tell: Callable[[Outcome], None]
) -> list[Outcome]:
    """Carry out runs in ``jobs`` jobs, neighbours in the same job, and return their outcomes.

    Slurm reads partition, account and the like from its own variables, such as ``SBATCH_PARTITION``. If a job ends
    early, for example at its time limit, its incomplete runs fail. Ctrl-C cancels all jobs.
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
    runs_of_job = {}
    outcomes: list[Outcome] = []
    try:
        # submitit starts jobs with "python -m", which inherit the environment, also on a cluster.
        with safe_children():
            for part in parts:
                runs_of_job[executor.submit(_work, part, folder, force, threads)] = part
        for job in submitit.helpers.as_completed(list(runs_of_job)):
            for outcome in outcomes_of(job, runs_of_job[job], folder):
                outcomes.append(outcome)
                tell(outcome)
    except BaseException:
        for job in runs_of_job:
            job.cancel()
        raise
    return outcomes


def _work(runs: Sequence[SweepRun], folder: Path, force: bool, threads: int | None) -> list[Outcome]:
    """Carry out runs in a job, which sees the folder at the same path."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    return list(logged_runs(runs, folder, force))


def outcomes_of(job: Any, runs: Sequence[SweepRun], folder: Path) -> list[Outcome]:
    """Return the outcomes of the runs of a finished job."""
    error = job.exception()
    if error is None:
        outcomes: list[Outcome] = job.result()
        return outcomes
    last = str(error).strip().splitlines()[-1:] or [type(error).__name__]
    text = f"job {job.job_id} ended: {last[0]}; see {job.paths.stderr}"
    return [Outcome(run.name, None if is_done(run, folder) else text) for run in runs]


_ESTIMATES = 4
"""Maximum number of estimates, because an estimate takes longer than all other checks of a run."""


@dataclass(frozen=True)
class SweepReady:
    """A sweep of which at least one run can start.

    Attributes:
        notes: notes for the user, with estimates of single runs for the first models and data sets.
        faults: the reasons why runs cannot start, by name.
    """

    notes: tuple[str, ...]
    faults: dict[str, str]


def ready_to_sweep(runs: Sequence[SweepRun]) -> SweepReady:
    """Check everything that each run needs except its loaded model."""
    notes: dict[str, None] = {}
    estimated: set[str] = set()
    faults: dict[str, str] = {}
    cache = ReadCache()
    for run in runs:
        estimates = len(estimated) < _ESTIMATES and needs(run.config) not in estimated
        folder = Path(run.config.output).absolute()
        try:
            ready = ready_to_run(run.config, folder, RUN, force=True, cache=cache, estimated=estimates)
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
"""File names of the comparison in the folder of the sweep."""


def carry_out_sweep(
    runs: Sequence[SweepRun],
    folder: Path,
    console: Console,
    *,
    force: bool = False,
    jobs: int = 1,
    launcher: str | None = None,
) -> Comparison:
    """Carry out the runs of a sweep, and return their comparison, which is also written to the folder.

    Complete runs with the same configuration are kept. Runs with the same model and data are carried out together, so
    that these are loaded, scored and calibrated once.
    """
    folder = folder.absolute()
    _check(runs, folder)
    if launcher is not None:
        require_launcher()
    complete_runs = [] if force else [run for run in runs if is_done(run, folder)]
    names = {run.name for run in complete_runs}
    ready = ready_to_sweep([run for run in runs if run.name not in names])
    todo = _neighbours([run for run in runs if run.name not in names and run.name not in ready.faults])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QuantizerError(f"{folder} cannot be written: {error.strerror}; choose another folder") from error
    if complete_runs:
        console.print(f"{len(complete_runs)} of {len(runs)} runs are already complete in {folder}", highlight=False)
    for line in ready.notes:
        console.print(line, markup=False, highlight=False)
    for name, fault in ready.faults.items():
        console.print(f"{name} cannot start: {fault}", markup=False, highlight=False, soft_wrap=True)
    try:
        outcomes = _carried_out(todo, folder, force, jobs, launcher, console)
    except KeyboardInterrupt as stop:
        raise type(stop)(f"{_progress(runs, folder)}; run the same command again to continue") from stop
    calibrations_of(folder).clear()
    ended = {outcome.name: outcome for outcome in outcomes}
    ended |= {name: Outcome(name, fault) for name, fault in ready.faults.items()}
    comparison = compare([_compared(run, folder, ended.get(run.name, Outcome(run.name, None))) for run in runs])
    write_comparison(comparison, folder / COMPARISON, folder / TABLE, folder.name)
    return comparison


def _check(runs: Sequence[SweepRun], folder: Path) -> None:
    """Raise errors that would otherwise appear after the first run."""
    marker = read_marker(folder) if folder.is_dir() else None
    if marker is not None:
        raise QuantizerError(
            f"{folder} contains a {marker.kind}, but a sweep needs its own folder; choose one with --output"
        )
    for tracker in {run.config.report.track for run in runs} - {None}:
        require_package(str(tracker), str(tracker))
    if any("json" not in run.config.report.formats for run in runs):
        raise ConfigError(
            ["report.formats: json is missing; expected it in every run of a sweep, because the comparison reads it"]
        )


def _progress(runs: Sequence[SweepRun], folder: Path) -> str:
    """Return the number of complete runs in words."""
    done = sum(is_done(run, folder) for run in runs)
    return f"{done} of {text.counted(len(runs), 'run')} complete, in {folder}"


def _neighbours(runs: Sequence[SweepRun]) -> list[SweepRun]:
    """Return the runs sorted so that those with the same model and data are adjacent."""
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
            # Cluster jobs report all their runs at once.
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
    """Carry out runs in this process; print the number and the remaining time before each."""
    outcomes: list[Outcome] = []
    pace = Pace(runs)
    with shared_work(folder) as shared:
        for place, run in enumerate(runs):
            words = [f"run {place + 1} of {len(runs)}: {run.name}", pace.left(place)]
            console.print(", ".join(filter(None, words)), markup=False, highlight=False, soft_wrap=True)
            start = time.perf_counter()
            outcomes.append(carry_out_one(run, folder, force, shared, console))
            # Failed runs say nothing about the duration of the others.
            if outcomes[-1].error is None:
                pace.add(place, time.perf_counter() - start)
    return outcomes


def _compared(run: SweepRun, folder: Path, outcome: Outcome) -> ComparedRun:
    place = folder / run.name
    if outcome.error is not None and not outcome.is_there:
        return failed_run(run.name, place, _plain(run.config), outcome.error)
    try:
        compared_run = read_run(place, run.name)
    except QuantizerError as unreadable:
        return failed_run(run.name, place, _plain(run.config), str(unreadable))
    record = compared_run.record
    refused = None
    if record is not None and record.engine_refused is not None:
        refused = refusal(record.engine_refused, str(record.config["quantizer"]["backend"]))
    missed = None if record is None else missed_speed(record.latency_fallback)
    wrong = "; ".join(filter(None, [outcome.error, refused, missed]))
    return compared_run.with_error(wrong) if wrong else compared_run


def _plain(config: RunConfig) -> dict[str, object]:
    return config.model_dump(mode="json")


if __name__ == "__main__":
    sys.exit(main())
