"""The sizes of a run whose model writes text token by token, where its configuration does not say them."""

from __future__ import annotations

from collections.abc import Iterator

from quantizer.common.distributed import get_world_size
from quantizer.config import RunConfig
from quantizer.errors import ConfigError
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
            # Nothing else reads several engines as one model.
            "deliver": tuple(dict.fromkeys(("processor", *config.deliver))),
        }
    )


def require_possible_run(config: RunConfig) -> None:
    """Raise if a run asks for something that its kind of model cannot have."""
    problems = list(_problems_of_writing(config) if is_in_parts(config) else _problems_of_one(config))
    if problems:
        raise ConfigError(problems)


def _problems_of_one(config: RunConfig) -> Iterator[str]:
    if config.model.new_tokens is not None:
        got = config.model.new_tokens
        yield f"model.new_tokens: got {got}, and task {config.model.task!r} writes no text; remove it"


def _problems_of_writing(config: RunConfig) -> Iterator[str]:
    of = f"task {config.model.task!r} is of an encoder-decoder model"
    fallback = config.fallback
    asked = {
        "qat": config.qat is not None,
        "fallback.min_speedup": fallback is not None and fallback.min_speedup is not None,
        "engine.strip_weights": config.engine.strip_weights,
    }
    for key in (key for key, there in asked.items() if there):
        yield f"{key}: {of}, which becomes several engines, and is for models that become one; remove it"
    if get_world_size() > 1:
        yield f"{of}, which one process quantizes: start it without torchrun"
