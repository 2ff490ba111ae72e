"""The work that runs of a sweep have in common: the loaded model and rows, what is float, and calibrations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from quantizer.config import RunConfig
from quantizer.pipeline.checkpoint_workload import configured_workload, workload_of
from quantizer.pipeline.context import RunRows
from quantizer.pipeline.progress import StageTimer
from quantizer.pipeline.resume import ResumeFiles
from quantizer.pipeline.workload import SharedObjects, Workload
from quantizer.utils.files import Store, temporary_beside


def needs(config: RunConfig) -> str:
    """Return all that a loaded model and its rows depend on, as text: runs with equal texts share them."""
    sequence = config.export.dynamic.sequence[0]
    return f"{config.model.model_dump_json()} {config.data.model_dump_json()} {sequence}"


class LoadedWork:
    """Loads the workloads of runs that follow one another; the model and rows of the last one stay in memory."""

    def __init__(self, floats: Store, times: Store, *, diagnoses: bool = True) -> None:
        self._floats = floats
        self._times = times
        self._diagnoses = diagnoses
        self._needs: str | None = None
        self._work: Workload | None = None

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
            self._work = configured_workload(config, RunRows.of(config.data), timer, kept, target)
            self._work = replace(self._work, shared=SharedObjects())
            self._needs = needs(config)
        assert self._work is not None
        work = self._work
        # The times of all runs are in one place: an engine of the same plan is not timed again.
        kept, floats = replace(kept, times=self._times), self._floats.under(self._needs)
        context = replace(work.context, timer=timer, resume=kept, floats=floats)
        scorer = work.scorer.for_run(work.graphs.scored(context), config.report.bootstrap, target)
        made = workload_of(config, context, work.graphs, work.rows, scorer)
        return replace(made, shared=work.shared, diagnoses=self._diagnoses)


@contextmanager
def shared_work(folder: Path) -> Iterator[LoadedWork]:
    """Yield what loads a sweep's runs. Files that they share go at the end, or with the next sweep after a kill."""
    with temporary_beside(folder / "shared") as scratch:
        yield LoadedWork(Store(scratch), Store(folder / "times"), diagnoses=False)
