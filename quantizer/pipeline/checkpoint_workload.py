"""The workload that a configuration names: a checkpoint, its task, and rows of data sets."""

from __future__ import annotations

from pathlib import Path

from quantizer.config import RunConfig
from quantizer.pipeline.context import RunContext, RunRows, load_context
from quantizer.pipeline.faults import check_rows
from quantizer.pipeline.function_source import function_workload
from quantizer.pipeline.model_graphs import Graphs, graphs_of
from quantizer.pipeline.open_axes import is_in_parts, with_written_sizes
from quantizer.pipeline.progress import StageTimer
from quantizer.pipeline.resume import ResumeFiles
from quantizer.pipeline.scores import FunctionScorer, Scoring, TaskMetric
from quantizer.pipeline.workload import Scorer, Workload, scored_workload


def configured_workload(
    config: RunConfig, rows: RunRows, timer: StageTimer, kept: ResumeFiles, folder: Path
) -> Workload:
    """Return the model that a configuration names, with its rows and their scores."""
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
        # A run writes four files of the model, of which two are in float; of one in parts they hold the decoder twice.
        copies=2 if is_in_parts(config) else 1,
        needed_for="what a run writes of this model",
        attention=config.model.attention,
        texts=config.model.texts,
        sizes={
            "max_length": config.model.max_length,
            "batch_size": config.data.batch_size,
            # A shorter batch would be outside the engine's range.
            "min_length": config.export.dynamic.sequence[0],
            "seconds": config.model.seconds,
        },
    )
    graphs = graphs_of(context, config)
    scorer = Scoring(graphs.scored(context), rows.evaluation, config.report.bootstrap, folder)
    return workload_of(config, context, graphs, rows, scorer)


def workload_of(config: RunConfig, context: RunContext, graphs: Graphs, rows: RunRows, scorer: Scorer) -> Workload:
    """Return the workload of a configuration whose model and rows are loaded."""
    if isinstance(scorer, FunctionScorer):
        return scored_workload(context, rows, config.model.source, scorer)
    config = with_written_sizes(config)
    assert config.model.task is not None
    read = (config.model, config.data.batch_size, config.export.dynamic.sequence[0])

    def check() -> None:
        check_rows(
            context.task, [*rows.evaluation, *rows.tuning, *rows.head], [*rows.calibration, *rows.training, *rows.check]
        )
        # Raises if the model has fewer positions than the shape for the latency.
        context.task.random_batch(1, config.report.latency_sequence)

    return Workload(
        context=context,
        graphs=graphs,
        rows=rows,
        scorer=scorer,
        info=context.info(config.model.source, config.model.task),
        check=check,
        metric=lambda searched: TaskMetric(read, context.task, searched, rows.head, graphs.runnable),
        fit=with_written_sizes,
    )
