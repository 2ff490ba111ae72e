"""Dynamic axes of a model's inputs, and sizes that the model fixes in its code.

Export problems, and sizes of the data that an engine will not accept, are reported before the long work begins. The
exported file is also the file of the float engine, so that nothing is exported twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.config import RunConfig
from quantizer.errors import ConfigError, ExportError
from quantizer.export.qdq.onnx_file import input_dimensions
from quantizer.pipeline.context import RunContext
from quantizer.pipeline.model_graphs import FLOAT_STEM, QUANTIZED_STEM, Graphs
from quantizer.pipeline.module_feed import ModuleFeed, fitted
from quantizer.pipeline.processes import from_first_rank
from quantizer.pipeline.run_engines import export_float, forget_float
from quantizer.proxy.restored_state import untouched
from quantizer.tasks import Batch, Feed, read_checkpoint, tasks
from quantizer.tasks.audio import AudioInputs
from quantizer.tasks.inputs import EXAMPLE_BATCH_SIZE, Inputs
from quantizer.utils.batches import warn_user
from quantizer.utils.distributed import get_world_size
from quantizer.utils.paths import is_file
from quantizer.utils.sizes import BATCH, SEQUENCE, DataSizes
from quantizer.utils.structure import leaves

_ALIKE = 1e-3
"""Maximum relative and absolute difference of outputs due to the order of float sums."""


def settle_axes(context: RunContext, graphs: Graphs, opset: int, folder: Path) -> tuple[str, ...]:
    """Export the float model, adopt the dynamic axes of the file, and return notes on fixed sizes.

    Do nothing for texts and images, whose dynamic axes are known.
    """
    feed = context.feed
    if feed.in_data is None:
        return ()
    path = folder / f"{FLOAT_STEM}.onnx"
    if isinstance(feed, ModuleFeed):
        # Runs of a sweep share it, and each exports the whole batch first.
        feed.samples_independent = False

    def named() -> dict[str, Any]:
        with context.timer("export"):
            if not isinstance(feed, ModuleFeed):
                _close_lengths(context, graphs, opset, path)
            export_float(context, graphs, QUANTIZED_STEM, opset, path)
        return {name: list(axes) for name, axes in input_dimensions(path).items()}

    _adopt(feed, context.model, from_first_rank(named, dict[str, Any]))
    assert feed.sizes is not None
    advice = None if isinstance(feed, ModuleFeed) else _ADVICE
    notes = dict(_notes(feed.in_data, feed.sizes, advice))
    # The summary repeats the notes without the advice.
    warn_user(f"{note}, {advice}" for note, advice in notes.items())
    return tuple(notes)


_ADVICE = "so recordings are zero-padded to it, or cut. Set model.seconds to the length that you need"

_LENGTHS = (1, 1.5, 2, 3, 4.5, 8, 20)
"""Lengths at which the program of the exporter is compared, as multiples of the shortest length."""


def _close_lengths(context: RunContext, graphs: Graphs, opset: int, path: Path) -> None:
    """Fix the length of recordings if the model does not export with an open one, or is then wrong at other lengths."""
    feed = context.feed
    if feed.sizes is None or not feed.sizes.is_open(SEQUENCE):
        return
    _, shortest = feed.sizes.seen[SEQUENCE]
    others = [feed.inputs.random(EXAMPLE_BATCH_SIZE, round(factor * shortest)) for factor in _LENGTHS]
    try:
        export_float(context, graphs, QUANTIZED_STEM, opset, path, others=others)
    except ExportError as error:
        context.timer.say(f"the length of recordings is fixed: {str(error).splitlines()[0]}")
        forget_float(context, QUANTIZED_STEM, opset)
        feed.keep_open({name: {0: BATCH} for name in feed.sizes.axes})


def adopt_axes(context: RunContext, folder: Path) -> None:
    """Adopt the dynamic axes of the exported model in the folder of a finished run, as ``settle_axes`` did in it."""
    if context.feed.in_data is not None:
        files = (folder / f"{stem}.onnx" for stem in (FLOAT_STEM, QUANTIZED_STEM))
        _adopt(context.feed, context.model, input_dimensions(next(filter(is_file, files))))


def _adopt(feed: Feed, model: nn.Module, dimensions: Mapping[str, Sequence[str | None]]) -> None:
    feed.keep_open({name: {axis: word for axis, word in enumerate(axes) if word} for name, axes in dimensions.items()})
    if isinstance(feed, ModuleFeed):
        feed.samples_independent = samples_are_independent(model, feed.example(), feed.sizes)


def samples_are_independent(model: nn.Module, batch: Batch, sizes: DataSizes) -> bool:
    """Return whether the first samples of a batch have the same outputs in a smaller batch.

    A model that mixes samples, for example nodes of a graph, must get its batches unsplit.
    """
    rows = sizes.usual[BATCH]
    if rows < 2 or not sizes.is_open(BATCH):
        return False
    part = sizes.resized(batch, {BATCH: rows // 2})
    with torch.no_grad():
        with untouched(model):
            full = leaves(model(**batch))
        try:
            with untouched(model):
                partial = leaves(model(**part))
        except (IndexError, RuntimeError, ValueError, TypeError, AssertionError):
            return False
    pairs = [
        (full_output, partial_output)
        for full_output, partial_output in zip(full, partial, strict=False)
        if isinstance(full_output, Tensor)
    ]
    return len(full) == len(partial) and all(
        _begins_with(full_output, partial_output, rows // 2) for full_output, partial_output in pairs
    )


def _begins_with(full: Tensor, part: Any, rows: int) -> bool:
    if not isinstance(part, Tensor) or full.dim() == 0 or part.dim() == 0 or len(part) != rows:
        return False
    return torch.allclose(full[:rows].double(), part.double(), rtol=_ALIKE, atol=_ALIKE, equal_nan=True)


def _notes(in_data: DataSizes, kept_axes: DataSizes, advice: str | None) -> Iterator[tuple[str, str]]:
    """Yield a note on each dimension that the model fixes, and the advice that continues it; None: for modules."""
    for dimension, sizes in in_data.seen.items():
        places = [
            f"axis {axis} of {name!r}"
            for name, axes in in_data.axes.items()
            for axis, word in axes.items()
            if word == dimension and axis not in kept_axes.axes.get(name, {})
        ]
        if not places:
            continue
        what = "batches" if dimension == BATCH else "inputs"
        distinct = sorted(set(sizes))
        varied = (
            (f" The data has the sizes {', '.join(map(str, distinct[:-1]))} and {distinct[-1]}.")
            if len(distinct) > 1
            else ""
        )
        yield (
            f"the engine accepts only {what} with a size of {sizes[0]} along {' and '.join(places)}: the model fixes "
            "that size",
            advice
            or f"for example by len(x), int(x.shape[0]), a loop over x, view({sizes[0]}, ...) or a parameter of that "
            f"length.{varied} Use x.shape and -1 in the model, or pass batches of the size that you need",
        )


WRITTEN_BATCH_SIZES = (1, 4, 8)
"""Minimum, usual and maximum batch size of encoder-decoder models; each sample has its own cache."""


def is_in_parts(config: RunConfig) -> bool:
    """Return whether the model of a run is an encoder-decoder model, with several engines."""
    name = config.model.task
    return name is not None and name in tasks.names() and tasks[name].in_parts


def with_written_sizes(config: RunConfig) -> RunConfig:
    """Return the configuration of a run with default sizes for an encoder-decoder model; others are unchanged.

    Batches are small, and texts no longer than the positions of the model.
    """
    if not is_in_parts(config):
        return config
    data, model, report, dynamic = config.data, config.model, config.report, config.export.dynamic
    batch, sequence = dynamic.batch, dynamic.sequence
    rows = data.batch_size if "batch_size" in data.model_fields_set else WRITTEN_BATCH_SIZES[1]
    if "batch" not in dynamic.model_fields_set:
        minimum, usual, maximum = WRITTEN_BATCH_SIZES
        timed = report.latency_batch if "latency_batch" in report.model_fields_set else usual
        batch = (minimum, usual, max(maximum, rows, timed))
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
            # Only quantizer.load_converted reads several engines as one model.
            "deliver": tuple(dict.fromkeys(("processor", *config.deliver))),
        }
    )


def with_lengths(config: RunConfig, inputs: Inputs, samples: Sequence[Any]) -> RunConfig:
    """Return the configuration of a run with default lengths for recordings; others are unchanged.

    The usual length is the median of the samples, and the longest if there are none.

    Raises:
        ConfigError: the configured lengths are outside of those that the model and ``model.seconds`` allow.
    """
    if not isinstance(inputs, AudioInputs) or (sizes := inputs.sizes_of(samples)) is None:
        return config
    (low, _, high), (least, _, longest) = config.export.dynamic.sequence, sizes.ranges[SEQUENCE]
    is_set = "sequence" in config.export.dynamic.model_fields_set
    if is_set and sizes.is_open(SEQUENCE) and not (least <= low and longest <= high):
        raise ConfigError(
            [
                f"export.dynamic.sequence: got the range from {low} to {high} values; expected at least {least} as "
                f"its beginning, the shortest recording that the model accepts, and at least {longest} as its end, the "
                f"{inputs.recordings.seconds:g} s of model.seconds"
            ]
        )
    return fitted(config, sizes, [SEQUENCE])


def require_possible_run(config: RunConfig) -> None:
    """Raise if a run uses options that its kind of model does not support."""
    problems = list(_problems_of_writing(config) if is_in_parts(config) else _problems_of_one(config))
    if problems:
        raise ConfigError(problems)


def _problems_of_one(config: RunConfig) -> Iterator[str]:
    if config.model.new_tokens is not None:
        new_tokens = config.model.new_tokens
        yield f"model.new_tokens: got {new_tokens}, but task {config.model.task!r} does not generate text; remove it"


def _problems_of_writing(config: RunConfig) -> Iterator[str]:
    reason = f"task {config.model.task!r} is for an encoder-decoder model"
    fallback = config.fallback
    unsupported = {
        "qat": config.qat is not None,
        "fallback.min_speedup": fallback is not None and fallback.min_speedup is not None,
        "engine.strip_weights": config.engine.strip_weights,
    }
    for key in (key for key, is_set in unsupported.items() if is_set):
        yield f"{key}: {reason}, which has several engines; this key is only for models with one engine; remove it"
    if get_world_size() > 1:
        yield f"{reason}, which runs in one process: start it without torchrun"
