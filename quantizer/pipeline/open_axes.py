"""The axes of its inputs that a model keeps open, found by exporting it before the calibration.

What cannot be exported, and sizes of the data that an engine will not take, are told before the long work begins. The
file is that of the float engine, so that nothing is exported twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.common.data.batches_of import warn_user
from quantizer.common.data.sizes import BATCH, DataSizes
from quantizer.common.structure import leaves
from quantizer.pipeline.context import RunContext
from quantizer.pipeline.graphs import FLOAT_STEM, QUANTIZED_STEM, Graphs
from quantizer.pipeline.module_feed import ModuleFeed
from quantizer.pipeline.ranks import from_first_rank
from quantizer.pipeline.run_engines import export_float
from quantizer.proxy.restored_state import untouched
from quantizer.qdq.onnx_file import input_dimensions
from quantizer.tasks import Batch

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
    feed.rows_apart = rows_are_apart(context.model, feed.example(), feed.sizes)
    notes = tuple(_notes(feed.in_data, feed.sizes))
    warn_user(notes)
    return notes


def rows_are_apart(model: nn.Module, batch: Batch, sizes: DataSizes) -> bool:
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
