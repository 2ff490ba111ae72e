"""Causes and cures of a run whose folder is complete without them.

They are the longest stage of a run and the only one that changes nothing else in its folder. A sweep looks for them
when the folder is in its place, so that a kill costs the causes alone.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from quantizer.config import RunConfig
from quantizer.quantizer import Quantizer
from quantizer.report import RunRecord
from quantizer.report.verdict import USABLE, verdict_of
from quantizer.runs.job import QUANTIZER
from quantizer.runs.progress.stage_timer import StageTimer
from quantizer.runs.run_context import resume_files
from quantizer.runs.run_reports import write_reports
from quantizer.runs.search import CAUSES, has_causes, with_causes_of
from quantizer.runs.sweep.shared_work import SharedWork


def lacks_causes(record: RunRecord, config: RunConfig) -> bool:
    """Return whether a run of a sweep still needs its causes: among many runs the usable ones need no cure."""
    looked = record.causes_problem is not None or any(stage.name == CAUSES for stage in record.stages)
    return not looked and has_causes(config) and verdict_of(record).level != USABLE


def with_causes(record: RunRecord, config: RunConfig, folder: Path, shared: SharedWork, console: Console) -> RunRecord:
    """Look for the causes of a run, and write its reports anew with them; return its record."""
    timer = StageTimer(console)
    with resume_files(folder, searches=False, trains=False) as kept:
        with nullcontext() if shared.has(config) else timer("load model and data"):
            work = shared.load(config, timer, kept, folder)
        quantizer = Quantizer.load(folder / QUANTIZER)
        batches = work.graphs.calibration(work.context.feed.batches(work.rows.calibration))
        record = with_causes_of(record, work.context, config, quantizer, batches)
    record = replace(record, stages=(*record.stages, *timer.done))
    write_reports(record, config.report.formats, folder)
    return record
