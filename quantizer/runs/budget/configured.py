"""Warnings of a budget, from a configuration alone: before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from quantizer.config import RunConfig
from quantizer.engines import runs_here
from quantizer.runs.budget.engine_budget import rows_searched
from quantizer.runs.budget.fineness import budget_warnings
from quantizer.runs.pick_backend import chooses
from quantizer.targets import AUTO
from quantizer.tasks import tasks


def configured_warnings(config: RunConfig, rows: int) -> Iterator[str]:
    """Yield why the budget of a configuration is finer than its tuning rows can tell, a sentence each."""
    asked, task = config.fallback, config.model.task
    if asked is None or asked.max_drop is None or task is None:
        return
    here = chooses(config) or config.quantizer.backend == AUTO or runs_here(config.quantizer.backend)
    searched = rows_searched(rows, checked=config.qat is None and here)
    metric = tasks[task].metric_name
    yield from budget_warnings(asked.max_drop, searched, metric, "fallback.max_drop")
