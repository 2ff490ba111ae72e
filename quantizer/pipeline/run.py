"""Entry points of ``quantizer run`` and ``quantizer convert``: from configurations to folders with engines and reports.

All files are written into a temporary folder next to the output folder. It is renamed at the end, and removed on any
error or interruption, so that an output folder is always complete.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from rich.console import Console

from quantizer.config import RunConfig
from quantizer.config.data_section import MODULE
from quantizer.config.schema import check_run
from quantizer.engines.candidates import usable_backends
from quantizer.errors import EngineError
from quantizer.pipeline.choose_engine import chooses, with_backend
from quantizer.pipeline.compare_outputs import refusal
from quantizer.pipeline.job import Job, Outline
from quantizer.pipeline.latency_fallback import missed_speed
from quantizer.pipeline.load_workload import LoadedWork, configured_workload
from quantizer.pipeline.preflight import earlier_run, ready_to_run
from quantizer.pipeline.preflight_checks import ReadCache
from quantizer.pipeline.processes import from_first_rank, own_place
from quantizer.pipeline.progress import Outlook, StageTimer
from quantizer.pipeline.resume import ResumeFiles, resume_files
from quantizer.pipeline.stages import carry_out as carry_out_job
from quantizer.pipeline.stages import stage_names
from quantizer.pipeline.workload import Load
from quantizer.plan.targets import AUTO
from quantizer.report import RunRecord, Stage, print_record
from quantizer.report.record import Form
from quantizer.report.trackers import print_tracked
from quantizer.utils.distributed import get_rank
from quantizer.utils.files import Store, checked_folder, new_folder, require_sole_writer, restore_folder, said_complete

RUN, CONVERSION = "run", "conversion"
"""The kinds of output folders, as their marker files name them."""


def run(config: RunConfig, output: Path | None, force: bool, console: Console, form: Form | None = None) -> Path:
    """Carry out a run, and return its folder; the printed fixes have the given form.

    Each of several processes gets the same arguments; only the first one writes and prints.
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
            print_record(record, folder, console, form=form)
            print_tracked(config.report.track, record, folder, console)
    # All processes learn of it, so that none reports an incomplete run although the folder exists.
    if (failed := from_first_rank(partial(_missed, record, folder), str | None)) is not None:
        raise EngineError(failed)
    return folder


def convert(configs: Sequence[RunConfig], folder: Path, force: bool, console: Console) -> Path:
    """Carry out one run per configuration, with one model and one calibration, and return the folder of all runs.

    Each run gets a folder in it, named after its backend.
    """
    folder, reads = folder.absolute(), ReadCache()
    ready = [ready_to_run(config, folder, CONVERSION, force=force, cache=reads) for config in configs]
    for line in (*ready[0].notes, *filter(None, [ready[0].estimate])):
        console.print(line, highlight=False, markup=False)
    resolved = [_resolved(config) for config in configs]
    records: dict[str, RunRecord] = {}
    with _resume(folder, resolved) as kept, new_folder(folder, kind=CONVERSION, replace=force) as target:
        names = [name for config, candidates in resolved for name in _names(config, candidates)]
        timer = StageTimer(console, Outlook(names, _earlier(resolved, folder)))
        # Inside the folder, so that both are removed together after a kill.
        with tempfile.TemporaryDirectory(dir=target) as scratch:
            shared = LoadedWork(Store(scratch), kept.times, kept.calibration)
            for config, candidates in resolved:
                # A single run has no other run to share its float engine and calibration with.
                load = partial(configured_workload, config, ready[0].examples)
                if len(resolved) > 1:
                    console.print(f"[bold]{config.quantizer.backend}[/bold]")
                    load = partial(shared.load, config)
                place = Path(tempfile.mkdtemp(dir=target))
                record = carry_out_job(Job(config, folder.name, place, kept, timer, load, candidates, converts=True))
                assert record is not None
                chosen = str(record.config["quantizer"]["backend"])
                place.chmod(0o755)
                place.rename(target / chosen)
                records[chosen] = record
    with said_complete(folder):
        for name, record in records.items():
            print_record(record, folder / name, console, form="options")
            print_tracked(record.config["report"]["track"], record, folder / name, console)
    failed = [reason for name, record in records.items() if (reason := _missed(record, folder / name)) is not None]
    if failed:
        raise EngineError("; ".join(failed))
    return folder


def carry_out(
    config: RunConfig,
    folder: Path,
    force: bool,
    console: Console,
    load: Load,
    *,
    scored: bool | None = None,
    store: Path | None = None,
) -> RunRecord | None:
    """Carry out a run of any workload, and return its record; see ``run`` for errors.

    All processes must call this; only the first one gets the record. ``scored`` is as in ``Outline.of``, ``store`` as
    in ``resume_files``.
    """
    config, candidates = _resolved(config)
    check_run(config)
    restore_folder(folder)
    checked_folder(folder, RUN, replace=force)
    require_sole_writer(folder)
    resume = _resume(folder, [(config, candidates)], store)
    with resume as kept, new_folder(folder, kind=RUN, replace=force) as target:
        names = list(_names(config, candidates, scored))
        earlier = earlier_run(config, folder, chooses=candidates is not None)
        timer = StageTimer(console, Outlook(names, earlier))
        return carry_out_job(Job(config, folder.name, target, kept, timer, load, candidates))


def _resolved(config: RunConfig) -> tuple[RunConfig, Sequence[str] | None]:
    """Return a configuration with a backend, and the candidates to choose from; None if it names a backend."""
    candidates = config.quantizer.candidates if chooses(config) else None
    if config.quantizer.backend == AUTO:
        # All candidates share one calibration, so any of them will do.
        config = with_backend(config, usable_backends(config.quantizer.candidates, config.engine.device)[0][0])
    return config, candidates


def _resume(
    folder: Path, resolved: Sequence[tuple[RunConfig, Sequence[str] | None]], store: Path | None = None
) -> AbstractContextManager[ResumeFiles]:
    """Return the files from which the same command resumes."""
    configs = [config for config, _ in resolved]
    searches = any(config.fallback is not None and config.fallback.max_drop is not None for config in configs)
    return resume_files(
        folder,
        searches=searches,
        trains=any(config.qat is not None for config in configs),
        # The result of a Python module is written to a temporary folder, next to which nothing is found again.
        keeps=any(config.model.task != MODULE for config in configs),
        store=store,
    )


def _names(config: RunConfig, candidates: Sequence[str] | None, scored: bool | None = None) -> Iterator[str]:
    """Return the names of the stages."""
    return stage_names(Outline.of(config, chooses=candidates is not None, scored=scored))


def _earlier(resolved: Sequence[tuple[RunConfig, Sequence[str] | None]], folder: Path) -> Iterator[Stage]:
    """Yield the stages of earlier conversions of the same kind into the same folder."""
    for config, candidates in resolved:
        yield from earlier_run(config, folder / config.quantizer.backend, chooses=candidates is not None)


def _missed(record: RunRecord | None, folder: Path) -> str | None:
    """Return which goal the engine of a run misses; None if it meets all, or in other processes than the first."""
    if record is None:
        return None
    if record.engine_refused is not None:
        refused = refusal(record.engine_refused, str(record.config["quantizer"]["backend"]))
        return (
            f"{refused}. {folder} contains the report, the quantizer and model.onnx, from which `build_engine` builds "
            "the engine without a comparison"
        )
    missed = missed_speed(record.latency_fallback)
    return None if missed is None else f"{missed}; the engine is in {folder}"
