"""The command ``quantizer run``: from a configuration to a folder with the model, the engine and the report.

The folder is complete or absent: all is written into a temporary folder beside it, which is renamed at the end, and
removed on any error or interruption.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rich.console import Console

from quantizer.common.distributed import alone, get_rank
from quantizer.config import QuantizerConfig, RunConfig
from quantizer.config.data_section import MODULE
from quantizer.config.schema import check_run
from quantizer.engines.candidates import cpu_candidates
from quantizer.errors import EngineError
from quantizer.files import checked_folder, require_sole_writer, restore_folder, said_complete, write_folder
from quantizer.report import RunRecord, print_record
from quantizer.report.trackers import print_tracked
from quantizer.runs.convert.parts.configured import run_parts
from quantizer.runs.outputs.right_engine import refusal
from quantizer.runs.pick_backend import chooses, with_backend
from quantizer.runs.placement.speed_goal import missed_speed
from quantizer.runs.preflight.run_ready import ready_to_run
from quantizer.runs.progress.run_stages import run_outlook
from quantizer.runs.progress.stage_timer import StageTimer
from quantizer.runs.ranks.process_group import from_first_rank, own_place
from quantizer.runs.run_context import resume_files
from quantizer.runs.run_course import RunCourse
from quantizer.runs.workload.configured import configured_workload
from quantizer.runs.workload.workload import Load
from quantizer.runs.written_sizes import is_in_parts
from quantizer.targets import AUTO

RUN = "run"
"""The kind of the folder, in its marker."""


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
        record = _all_stages(config, place, force, console, partial(configured_workload, config, ready.rows))
    if record is not None:
        with said_complete(folder):
            print_record(record, folder, console)
            print_tracked(config.report.track, record, folder, console)
    # Told to all, so that no process calls a run incomplete whose folder stands there.
    if (refused := from_first_rank(partial(_refused, record), str | None)) is not None:
        raise EngineError(
            f"{refusal(refused)}. {folder} holds the report, the quantizer and model.onnx, of which `build_engine` "
            "makes the engine without a comparison"
        )
    if (missed := from_first_rank(lambda: record and missed_speed(record.placement), str | None)) is not None:
        raise EngineError(f"{missed}; {folder} holds it")
    return folder


def _refused(record: RunRecord | None) -> str | None:
    return None if record is None else record.engine_refused


def carry_out(config: RunConfig, folder: Path, force: bool, console: Console, load: Load) -> RunRecord:
    """Carry out a run of any workload into a folder in this process, and return its record; see ``run`` for errors."""
    with alone():
        record = _all_stages(config, folder, force, console, load)
    assert record is not None
    return record


def _all_stages(config: RunConfig, folder: Path, force: bool, console: Console, load: Load) -> RunRecord | None:
    """Carry out a run, and return its record; None if this process is not the first one."""
    among = config.quantizer.candidates if chooses(config) else None
    if config.quantizer.backend == AUTO:
        # The candidates share one calibration, whichever it is for.
        name = QuantizerConfig().backend if among is None else cpu_candidates(among)[0][0]
        config = with_backend(config, name)
    check_run(config)
    restore_folder(folder)
    checked_folder(folder, RUN, replace=force)
    require_sole_writer(folder)
    record: list[RunRecord] = []
    searches = config.fallback is not None and config.fallback.max_drop is not None
    # What is given in Python is written to a folder that an interrupt removes.
    keeps = among is not None and config.model.task != MODULE and not is_in_parts(config)
    with resume_files(folder, searches=searches, trains=config.qat is not None, chooses=keeps) as kept:

        def fill(target: Path) -> None:
            if is_in_parts(config):
                timer = StageTimer(console)
                record.append(run_parts(config, among, folder.name, target, kept, timer, load))
                return
            timer = StageTimer(console, run_outlook(config, folder, chooses=among is not None))
            course = RunCourse(config, folder.name, target, kept, timer, load)
            course.make(among)
            if get_rank() == 0:
                with alone():
                    record.append(course.report())

        write_folder(folder, fill, kind=RUN, replace=force)
    return record[0] if record else None
