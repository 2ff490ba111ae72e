"""The axes of its inputs that a model keeps open, and sizes that it has written into its code.

What cannot be exported, and sizes of the data that an engine will not take, are told before the long work begins. The
file is that of the float engine, so that nothing is exported twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.config import RunConfig
from quantizer.errors import ConfigError
from quantizer.export.qdq.onnx_file import input_dimensions
from quantizer.pipeline.context import RunContext
from quantizer.pipeline.model_graphs import FLOAT_STEM, QUANTIZED_STEM, Graphs
from quantizer.pipeline.module_feed import ModuleFeed
from quantizer.pipeline.processes import from_first_rank
from quantizer.pipeline.run_engines import export_float
from quantizer.proxy.restored_state import untouched
from quantizer.tasks import Batch, read_checkpoint, tasks
from quantizer.utils.batches import warn_user
from quantizer.utils.distributed import get_world_size
from quantizer.utils.sizes import BATCH, DataSizes
from quantizer.utils.structure import leaves

_ALIKE = 1e-3
"""The largest difference of outputs, relative and absolute, that the order of sums may make."""


def settle_axes(context: RunContext, graphs: Graphs, opset: int, folder: Path) -> tuple[str, ...]:
    """Export the float model, keep those axes of its inputs open that are so in the file, and return what is fixed.

    The inputs of a task are known, and nothing is exported for it now.
    """
    feed = context.feed
    if not isinstance(feed, ModuleFeed):
        return ()
    path = folder / f"{FLOAT_STEM}.onnx"

    def named() -> dict[str, Any]:
        with context.timer("export"):
            export_float(context, graphs, QUANTIZED_STEM, opset, path)
        return {name: list(axes) for name, axes in input_dimensions(path).items()}

    names = from_first_rank(named, dict[str, Any])
    feed.keep_open({name: {axis: word for axis, word in enumerate(axes) if word} for name, axes in names.items()})
    feed.samples_independent = samples_are_independent(context.model, feed.example(), feed.sizes)
    notes = tuple(_notes(feed.in_data, feed.sizes))
    warn_user(notes)
    return notes


def samples_are_independent(model: nn.Module, batch: Batch, sizes: DataSizes) -> bool:
    """Return whether a model gives the first rows of a batch what it gives them in the whole batch.

    Where it does not, as with the nodes of a graph or halves of a batch that are compared, a batch is not cut.
    """
    rows = sizes.usual[BATCH]
    if rows < 2 or not sizes.is_open(BATCH):
        return False
    part = sizes.resized(batch, {BATCH: rows // 2})
    with torch.no_grad():
        with untouched(model):
            whole = leaves(model(**batch))
        try:
            with untouched(model):
                some = leaves(model(**part))
        except (IndexError, RuntimeError, ValueError, TypeError, AssertionError):
            return False
    pairs = [(one, other) for one, other in zip(whole, some, strict=False) if isinstance(one, Tensor)]
    return len(whole) == len(some) and all(_begins_with(one, other, rows // 2) for one, other in pairs)


def _begins_with(whole: Tensor, some: Any, rows: int) -> bool:
    if not isinstance(some, Tensor) or whole.dim() == 0 or some.dim() == 0 or len(some) != rows:
        return False
    return torch.allclose(whole[:rows].double(), some.double(), rtol=_ALIKE, atol=_ALIKE, equal_nan=True)


def _notes(wanted: DataSizes, left: DataSizes) -> Iterator[str]:
    """Yield what a model fixes, a sentence for each dimension."""
    for dimension, sizes in wanted.seen.items():
        places = [
            f"axis {axis} of {name!r}"
            for name, axes in wanted.axes.items()
            for axis, word in axes.items()
            if word == dimension and axis not in left.axes.get(name, {})
        ]
        if not places:
            continue
        what = "batches" if dimension == BATCH else "inputs"
        seen = sorted(set(sizes))
        varied = f" The data has {', '.join(map(str, seen[:-1]))} and {seen[-1]} there." if len(seen) > 1 else ""
        yield (
            f"the engine takes {what} with a size of {sizes[0]} along {' and '.join(places)} alone: the model computes "
            f"with that size as a number, as len(x), int(x.shape[0]), a loop over x or view({sizes[0]}, ...) do."
            f"{varied} Write it with x.shape and -1, or give batches of the size that you use"
        )


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
