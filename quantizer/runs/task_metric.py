"""The task's score as the metric of a search, on rows that the report does not use for scores."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import nn

from quantizer.runs.run_context import as_predictor, bar
from quantizer.tasks import Row, Task
from quantizer.tasks.datasets.rows import content_of


class Metric(Protocol):
    """A function of a model that returns its score."""

    higher_is_better: bool

    def __call__(self, model: nn.Module, /) -> float:
        """Return the score of a model."""


class TaskMetric:
    """A function of a model that returns the task's score of it on the tuning rows.

    Attributes:
        higher_is_better: the direction that is better.
        reads: a hash of the settings and the content of all rows, since image files may change under the same name.
    """

    def __init__(
        self,
        settings: tuple[object, ...],
        task: Task,
        rows: Sequence[Row],
        head: Sequence[Row],
        runnable: Callable[[nn.Module], nn.Module],
    ) -> None:
        parts = (*settings, content_of(rows), content_of(head))
        self.reads = hashlib.sha256(repr(parts).encode()).hexdigest()
        self.higher_is_better = task.higher_is_better
        self._task = task
        self._rows = rows
        self._runnable = runnable

    def __call__(self, model: nn.Module) -> float:
        with bar("tuning rows") as progress:
            predictions = self._task.predict(as_predictor(self._runnable(model)), self._rows, progress)
        return self._task.score(predictions, self._rows)
