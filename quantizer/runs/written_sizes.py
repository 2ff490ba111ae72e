"""The sizes of a run whose model writes text token by token, where its configuration does not say them."""

from __future__ import annotations

from quantizer.config import RunConfig
from quantizer.tasks import read_checkpoint, tasks

WRITTEN_BATCH_SIZES = (1, 4, 8)
"""Least, usual and most rows of models that write token by token, each row with a cache of its own."""


def is_in_parts(config: RunConfig) -> bool:
    """Return whether the model of a run becomes several engines."""
    name = config.model.task
    return name is not None and name in tasks.names() and tasks[name].in_parts


def with_written_sizes(config: RunConfig) -> RunConfig:
    """Return the configuration of a run with sizes that fit a model in parts; that of another model is left as it is.

    Batches are small, and texts no longer than the model has positions.
    """
    if not is_in_parts(config):
        return config
    data, model, report, dynamic = config.data, config.model, config.report, config.export.dynamic
    batch, sequence = dynamic.batch, dynamic.sequence
    rows = data.batch_size if "batch_size" in data.model_fields_set else WRITTEN_BATCH_SIZES[1]
    if "batch" not in dynamic.model_fields_set:
        least, usual, most = WRITTEN_BATCH_SIZES
        timed = report.latency_batch if "latency_batch" in report.model_fields_set else usual
        batch = (least, usual, max(most, rows, timed))
    if "sequence" not in dynamic.model_fields_set:
        positions = read_checkpoint(model.source, model.task).positions
        low, middle, high = (size if positions is None else min(size, positions) for size in sequence)
        sequence = (low, middle, high)
    shape = {"latency_batch": batch[1], "latency_sequence": sequence[1]}
    shape |= {name: getattr(report, name) for name in shape if name in report.model_fields_set}
    sizes = dynamic.model_copy(update={"batch": batch, "sequence": sequence})
    return config.model_copy(
        update={
            "data": data.model_copy(update={"batch_size": rows}),
            "export": config.export.model_copy(update={"dynamic": sizes}),
            "report": report.model_copy(update=shape),
        }
    )
