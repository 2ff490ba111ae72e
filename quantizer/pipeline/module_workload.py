"""The workload of a module and its batches, given in Python or by functions that a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantizer.common.data.batches_of import batches_of
from quantizer.config.data_section import MODULE
from quantizer.pipeline.context import ResumeFiles, RunContext, RunRows
from quantizer.pipeline.graphs import Graphs
from quantizer.pipeline.module_feed import ModuleFeed, fitted, named_batches
from quantizer.pipeline.progress import StageTimer
from quantizer.pipeline.scores import FunctionScorer
from quantizer.pipeline.workload import Workload
from quantizer.proxy.restored_state import untouched
from quantizer.tasks import Batch


def module_batches(model: nn.Module, data: Any, rows: int | None = None) -> list[Batch]:
    """Return the batches of data by the names of the arguments of ``forward``, without labels; see ``batches_of``."""
    return named_batches(model, map(_without_label, batches_of(model, data, rows)))


def module_workload(
    model: nn.Module,
    source: str,
    batches: Sequence[Batch],
    scorer: Callable[[RunContext], FunctionScorer],
    timer: StageTimer,
    kept: ResumeFiles,
    folder: Path,
) -> Workload:
    """Return the workload of a module in eval mode on the CPU; with the first arguments given it is a ``Load``."""
    context = RunContext(timer=timer, resume=kept, model=model, processor=None, feed=ModuleFeed(batches))
    rows = RunRows(calibration=list(batches), evaluation=list(batches))
    return scored_workload(context, rows, source, scorer(context))


def scored_workload(context: RunContext, rows: RunRows, source: str, scorer: FunctionScorer) -> Workload:
    """Return the workload of a module whose context and rows are there."""
    feed = context.feed
    assert isinstance(feed, ModuleFeed)
    return Workload(
        context=context,
        graphs=Graphs(context),
        rows=rows,
        scorer=scorer,
        info=context.info(source, MODULE),
        # A function that is no score raises before the calibration.
        check=partial(scorer.take, {"float": context.model}),
        metric=lambda _: scorer.metric,
        fit=lambda config: fitted(config, feed.sizes),
    )


def output_of(model: nn.Module, batch: Batch) -> Any:
    """Return what a model returns for a batch, to know its kind: a part of it might not run."""
    with torch.no_grad(), untouched(model):
        return model(**batch)


def _without_label(batch: Any) -> Any:
    """Return a batch without the labels that a transformers model would compute a loss of."""
    if not hasattr(batch, "keys"):
        return batch
    return {name: batch[name] for name in batch if name not in ("label", "labels")}
