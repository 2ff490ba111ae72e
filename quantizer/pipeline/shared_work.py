"""The work that runs of a sweep have in common: the loaded model and rows, what is float, and calibrations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from quantizer.config import RunConfig
from quantizer.files import temporary_beside
from quantizer.pipeline.configured import configured_workload, workload_of
from quantizer.pipeline.context import ResumeFiles, RunRows
from quantizer.pipeline.progress import StageTimer
from quantizer.pipeline.shared_results import Calibrations, FloatEngines
from quantizer.pipeline.workload import Workload

_TIMES = "times.json"


def needs(config: RunConfig) -> str:
    """Return all that a loaded model and its rows depend on, as text: runs with equal texts share them."""
    sequence = config.export.dynamic.sequence[0]
    return f"{config.model.model_dump_json()} {config.data.model_dump_json()} {sequence}"


class SharedWork:
    """The work of runs that follow one another; only that of the last model and rows is kept."""

    def __init__(self, scratch: Path, times: Path, *, diagnoses: bool = True) -> None:
        self._scratch = scratch
        self._times = times
        self._diagnoses = diagnoses
        self._needs: str | None = None
        self._work: Workload | None = None
        self._loaded = 0

    def has(self, config: RunConfig) -> bool:
        """Return whether the model and the rows of a run are loaded."""
        return self._work is not None and self._needs == needs(config)

    def load(self, config: RunConfig, timer: StageTimer, kept: ResumeFiles, target: Path) -> Workload:
        """Return the workload of a run, loaded anew if its model or rows are not those of the run before.

        Errors are those of ``configured_workload`` and of ``RunRows.of``.
        """
        if not self.has(config):
            # The former model goes before the next one comes.
            self._work = self._needs = None
            work = configured_workload(config, RunRows.of(config.data), timer, kept, target)
            self._loaded += 1
            floats = self._scratch / f"model-{self._loaded}"
            floats.mkdir()
            self._work = replace(
                work, context=replace(work.context, floats=FloatEngines(floats)), calibrations=Calibrations()
            )
            self._needs = needs(config)
        assert self._work is not None
        shared = self._work
        # One file of times for all runs: an engine of the same plan is not timed again.
        kept = replace(kept, times=self._times)
        context = replace(shared.context, timer=timer, resume=kept)
        scorer = shared.scorer.for_run(shared.graphs.scored(context), config.report.bootstrap, target)
        made = workload_of(config, context, shared.graphs, shared.rows, scorer)
        return replace(made, calibrations=shared.calibrations, diagnoses=self._diagnoses)


@contextmanager
def shared_work(folder: Path) -> Iterator[SharedWork]:
    """Yield the work of a sweep's runs, whose shared files are removed at the end, or by the next one after a kill."""
    with temporary_beside(folder / "shared") as scratch:
        yield SharedWork(scratch, folder / _TIMES, diagnoses=False)
