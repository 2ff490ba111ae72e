"""The commands ``quantizer run`` and ``quantizer convert``: from configurations to a folder with engines and reports.

The folder is complete or absent: all is written into a temporary folder beside it, which is renamed at the end, and
removed on any error or interruption.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from rich.console import Console

from quantizer.config import QuantizerConfig, RunConfig
from quantizer.config.data_section import MODULE
from quantizer.config.schema import check_run
from quantizer.engines.for_this_cpu import cpu_candidates
from quantizer.errors import EngineError
from quantizer.pipeline.choose_engine import chooses, with_backend
from quantizer.pipeline.compare_outputs import refusal
from quantizer.pipeline.faults import Looks
from quantizer.pipeline.job import Job, Outline
from quantizer.pipeline.latency_fallback import missed_speed
from quantizer.pipeline.load_workload import LoadedWork, configured_workload
from quantizer.pipeline.preflight import earlier_run, ready_to_run
from quantizer.pipeline.processes import from_first_rank, own_place
from quantizer.pipeline.progress import Outlook, StageTimer
from quantizer.pipeline.resume import ResumeFiles, resume_files
from quantizer.pipeline.stages import carry_out as carry_out_job
from quantizer.pipeline.stages import stage_names
from quantizer.pipeline.workload import Load
from quantizer.plan.targets import AUTO
from quantizer.report import RunRecord, Stage, print_record
from quantizer.report.trackers import print_tracked
from quantizer.utils.distributed import get_rank
from quantizer.utils.files import Store, checked_folder, new_folder, require_sole_writer, restore_folder, said_complete

RUN, CONVERSION = "run", "conversion"
"""The kinds of folders, in their markers."""


def run(config: RunConfig, output: Path | None, force: bool, console: Console) -> Path:
    """Carry out a run, and return the folder that was written.

    Of several processes each is given the same arguments; the first one writes and prints.
    """
    folder = Path(config.output if output is None else output).absolute()
    console = console if get_rank() == 0 else Console(quiet=True)
    with own_place(folder) as place:
        ready = ready_to_run(config, place, RUN, force=force)
        for line in (*ready.notes, *filter(None, [ready.estimate])):
            console.print(line, highlight=False, markup=False)
        record = carry_out(config, place, force, console, partial(configured_workload, config, ready.examples))
    if record is not None:
        with said_complete(folder):
            print_record(record, folder, console)
            print_tracked(config.report.track, record, folder, console)
    # Told to all, so that no process calls a run incomplete whose folder stands there.
    if (failed := from_first_rank(partial(_missed, record, folder), str | None)) is not None:
        raise EngineError(failed)
    return folder


def convert(configs: Sequence[RunConfig], folder: Path, force: bool, console: Console) -> Path:
    """Carry out a run for each configuration, of one model and one calibration, and return the folder of them all.

    Each has a folder of its own in it, under the name of its backend.
    """
    folder, looks = folder.absolute(), Looks()
    ready = [ready_to_run(config, folder, CONVERSION, force=force, looks=looks) for config in configs]
    for line in (*ready[0].notes, *filter(None, [ready[0].estimate])):
        console.print(line, highlight=False, markup=False)
    resolved = [_resolved(config) for config in configs]
    records: dict[str, RunRecord] = {}
    with _resume(folder, resolved) as kept, new_folder(folder, kind=CONVERSION, replace=force) as target:
        names = [name for config, among in resolved for name in _names(config, among)]
        timer = StageTimer(console, Outlook(names, _earlier(resolved, folder)))
        # In the folder itself, so that after a kill both are removed together.
        with tempfile.TemporaryDirectory(dir=target) as scratch:
            shared = LoadedWork(Store(scratch), kept.times)
            for config, among in resolved:
                # One alone has nobody to share its float engine and its calibration with.
                load = partial(configured_workload, config, ready[0].examples)
                if len(resolved) > 1:
                    console.print(f"[bold]{config.quantizer.backend}[/bold]")
                    load = partial(shared.load, config)
                place = Path(tempfile.mkdtemp(dir=target))
                record = carry_out_job(Job(config, folder.name, place, kept, timer, load, among, converts=True))
                assert record is not None
                chosen = str(record.config["quantizer"]["backend"])
                place.chmod(0o755)
                place.rename(target / chosen)
                records[chosen] = record
    with said_complete(folder):
        for name, record in records.items():
            print_record(record, folder / name, console)
            print_tracked(record.config["report"]["track"], record, folder / name, console)
    failed = [told for name, record in records.items() if (told := _missed(record, folder / name)) is not None]
    if failed:
        raise EngineError("; ".join(failed))
    return folder


def carry_out(config: RunConfig, folder: Path, force: bool, console: Console, load: Load) -> RunRecord | None:
    """Carry out a run of any workload into a folder, and return its record; see ``run`` for errors.

    Of several processes all must call this, and the first one alone gets the record.
    """
    config, among = _resolved(config)
    check_run(config)
    restore_folder(folder)
    checked_folder(folder, RUN, replace=force)
    require_sole_writer(folder)
    with _resume(folder, [(config, among)]) as kept, new_folder(folder, kind=RUN, replace=force) as target:
        names, earlier = list(_names(config, among)), earlier_run(config, folder, chooses=among is not None)
        timer = StageTimer(console, Outlook(names, earlier))
        return carry_out_job(Job(config, folder.name, target, kept, timer, load, among))


def _resolved(config: RunConfig) -> tuple[RunConfig, Sequence[str] | None]:
    """Return a configuration that names a backend, and those to choose from; None: the one that it names."""
    among = config.quantizer.candidates if chooses(config) else None
    if config.quantizer.backend == AUTO:
        # The candidates share one calibration, whichever it is for.
        name = QuantizerConfig().backend if among is None else cpu_candidates(among)[0][0]
        config = with_backend(config, name)
    return config, among


def _resume(
    folder: Path, resolved: Sequence[tuple[RunConfig, Sequence[str] | None]]
) -> AbstractContextManager[ResumeFiles]:
    """Return the files from which the same command resumes."""
    configs = [config for config, _ in resolved]
    # What is given in Python is written to a folder that an interrupt removes.
    keeps = any(among is not None and config.model.task != MODULE for config, among in resolved)
    searches = any(one.fallback is not None and one.fallback.max_drop is not None for one in configs)
    return resume_files(folder, searches=searches, trains=any(one.qat is not None for one in configs), chooses=keeps)


def _names(config: RunConfig, among: Sequence[str] | None) -> Iterator[str]:
    """Return the names of the stages."""
    return stage_names(Outline.of(config, chooses=among is not None))


def _earlier(resolved: Sequence[tuple[RunConfig, Sequence[str] | None]], folder: Path) -> Iterator[Stage]:
    """Yield the stages of earlier conversions of the same kind into the same folder."""
    for config, among in resolved:
        yield from earlier_run(config, folder / config.quantizer.backend, chooses=among is not None)


def _missed(record: RunRecord | None, folder: Path) -> str | None:
    """Return what a run was asked for and its engine does not do; None: it does all, or this process does not know."""
    if record is None:
        return None
    if record.engine_refused is not None:
        return (
            f"{refusal(record.engine_refused)}. {folder} holds the report, the quantizer and model.onnx, of which "
            "`build_engine` makes the engine without a comparison"
        )
    missed = missed_speed(record.latency_fallback)
    return None if missed is None else f"{missed}; {folder} holds it"
