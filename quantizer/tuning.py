"""The task's score as the metric of a choice, on rows that the report is not scored on."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from collections.abc import Sequence

from torch import nn
from tqdm.auto import tqdm

from quantizer.config import RunConfig
from quantizer.tasks import Row
from quantizer.tasks import Task

__all__ = ["TuningScore"]


class TuningScore:
    """Takes a model and gives the task's score of it on the tuning rows.

    Args:
        config: of the run.
        task: its head fitted, where it has one.
        rows: those of ``data.tuning``.
        head: those of ``data.head``.
        tell: called after each score with it and the seconds that it took.

    Attributes:
        higher_is_better: which way is better.
        reads: tells data and tasks apart. The rows themselves are in it, since a file may be another under its name.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        rows: Sequence[Row],
        head: Sequence[Row],
        tell: Callable[[float, float], None],
    ) -> None:
        parts = (config.model, config.data.batch_size, config.export.dynamic.sequence[0], tuple(rows), tuple(head))
        self.reads = hashlib.sha256(repr(parts).encode()).hexdigest()
        self.higher_is_better = task.higher_is_better
        self._task = task
        self._rows = rows
        self._tell = tell

    def __call__(self, model: nn.Module) -> float:
        start = time.perf_counter()
        with tqdm(desc="tuning rows", unit="batch", leave=False, disable=None) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            predictions = self._task.predict(lambda batch: model(**batch), self._rows, progress)
        score = self._task.score(predictions, self._rows)
        self._tell(score, time.perf_counter() - start)
        return score
