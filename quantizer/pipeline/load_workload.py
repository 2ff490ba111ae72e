"""The workload of a configuration: a checkpoint or a function, its task, and the samples.

The runs of a sweep share the loaded model and samples, float engines, and calibrations (``LoadedWork``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from quantizer.config import RunConfig
from quantizer.pipeline.context import RunContext, RunExamples, load_context
from quantizer.pipeline.function_source import function_workload
from quantizer.pipeline.model_graphs import Graphs, graphs_of
from quantizer.pipeline.open_axes import is_in_parts, with_lengths, with_written_sizes
from quantizer.pipeline.preflight_checks import check_examples
from quantizer.pipeline.progress import StageTimer
from quantizer.pipeline.resume import ResumeFiles
from quantizer.pipeline.scores import FunctionScorer, Scoring, TaskMetric
from quantizer.pipeline.workload import Scorer, SharedObjects, Workload, scored_workload
from quantizer.utils.files import Store, temporary_beside


def configured_workload(
    config: RunConfig, examples: RunExamples, timer: StageTimer, kept: ResumeFiles, folder: Path
) -> Workload:
    """Return the workload of a configuration, with its samples."""
    if config.model.task is None:
        return function_workload(config, timer, kept, folder)
    config = with_written_sizes(config)
    assert config.model.task is not None
    context = load_context(
        timer,
        kept,
        folder,
        config.model.source,
        config.model.task,
        # A run writes two float and two quantized files. For encoder-decoder models, they contain the decoder twice.
        copies=2 if is_in_parts(config) else 1,
        needed_for="the output of this run",
        attention=config.model.attention,
        texts=config.model.texts,
        sizes={
            "max_length": config.model.max_length,
            "batch_size": config.data.batch_size,
            # The engine does not accept shorter batches.
            "min_length": config.export.dynamic.sequence[0],
            "seconds": config.model.seconds,
        },
    )
    graphs = graphs_of(context, config)
    scorer = Scoring(graphs.scored(context), examples.evaluation, config.report.bootstrap, folder)
    return workload_of(config, context, graphs, examples, scorer)


def workload_of(
    config: RunConfig, context: RunContext, graphs: Graphs, examples: RunExamples, scorer: Scorer
) -> Workload:
    """Return the workload of a configuration whose model and samples are loaded."""
    if isinstance(scorer, FunctionScorer):
        return scored_workload(context, examples, config.model.source, scorer)
    config = with_written_sizes(config)
    assert config.model.task is not None
    read = (config.model, config.data.batch_size, config.export.dynamic.sequence[0])

    def check() -> None:
        check_examples(
            context.task,
            [*examples.evaluation, *examples.tuning, *examples.head],
            [*examples.calibration, *examples.training, *examples.check],
        )
        # Raises if the model has fewer positions than the latency benchmarks need.
        context.task.random_batch(1, config.report.latency_sequence)

    def fit(config: RunConfig) -> RunConfig:
        task = context.task
        samples = examples.calibration or examples.check or examples.evaluation
        return with_lengths(with_written_sizes(config), task.inputs, task.all_samples(samples))

    return Workload(
        context=context,
        graphs=graphs,
        examples=examples,
        scorer=scorer,
        info=context.info(config.model.source, config.model.task),
        check=check,
        metric=lambda searched: TaskMetric(read, context.task, searched, examples.head, graphs.runnable),
        fit=fit,
    )


def needs(config: RunConfig) -> str:
    """Return a text key of everything that a loaded model and its samples depend on, to share them between runs."""
    sequence = config.export.dynamic.sequence[0]
    return f"{config.model.model_dump_json()} {config.data.model_dump_json()} {sequence}"


class LoadedWork:
    """Loader of the workloads of consecutive runs; it keeps the last model and its samples in memory."""

    def __init__(self, floats: Store, times: Store, calibration: Store) -> None:
        self._floats = floats
        self._times = times
        self._calibration = calibration
        self._needs: str | None = None
        self._work: Workload | None = None

    def has(self, config: RunConfig) -> bool:
        """Return whether the model and samples of a run are loaded."""
        return self._work is not None and self._needs == needs(config)

    def load(self, config: RunConfig, timer: StageTimer, kept: ResumeFiles, target: Path) -> Workload:
        """Return the workload of a run, and reuse the previous model and samples if they are the same.

        It raises the errors of ``configured_workload`` and ``RunExamples.of``.
        """
        if not self.has(config):
            # Free the previous model before the next one is loaded.
            self._work = self._needs = None
            self._work = configured_workload(config, RunExamples.of(config.data), timer, kept, target)
            self._work = replace(self._work, shared=SharedObjects())
            self._needs = needs(config)
        assert self._work is not None
        work = self._work
        # All runs share measured times, so that an engine of the same plan is not timed again, and calibrations.
        kept = replace(kept, times=self._times, calibration=self._calibration)
        floats = self._floats.under(self._needs)
        context = replace(work.context, timer=timer, resume=kept, floats=floats)
        scorer = work.scorer.for_run(work.graphs.scored(context), config.report.bootstrap, target)
        workload = workload_of(config, context, work.graphs, work.examples, scorer)
        return replace(workload, shared=work.shared)


@contextmanager
def shared_work(folder: Path) -> Iterator[LoadedWork]:
    """Yield the loader of a sweep's runs; remove their shared files at the end, or after a kill in the next sweep."""
    with temporary_beside(folder / "shared") as scratch:
        yield LoadedWork(Store(scratch), Store(folder / "times"), calibrations_of(folder))


def calibrations_of(folder: Path) -> Store:
    """Return the store of the calibrations of a sweep's runs, which are removed when the sweep ends."""
    return Store(folder / "resume")
