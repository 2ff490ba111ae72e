"""The base of tasks that judge each row once: what is slow, such as finding entities, and scores ratios of counts.

Shapes: N rows, R resamples, K counts of a row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from quantizer.tasks.datasets.rows import Row
from quantizer.tasks.task import Predictions, Task, require_rows


class JudgedTask(Task):
    """A task that judges each row, and scores what came of that.

    What is slow, such as finding entities or matching boxes, is done once a row, and once for a score, its differences
    and its intervals.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._known: WeakKeyDictionary[Predictions, tuple[list[Row], npt.NDArray[Any]]] = WeakKeyDictionary()

    @abstractmethod
    def judge(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Return what ``metric`` takes of each row [N x ...]."""

    def judged(self, predictions: Predictions, rows: Sequence[Row]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return what came of each row [N x ...], twice: it holds what is right already."""
        require_rows(predictions, rows)
        known = self._known.get(predictions)
        if known is None or known[0] != list(rows):
            known = (list(rows), self.judge(predictions, rows))
            self._known[predictions] = known
        return known[1], known[1]


class CountedTask(JudgedTask):
    """A task that counts in each row, and scores the sums of its counts: entity F1, perplexity, mean IoU."""

    @abstractmethod
    def counts(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[np.float64]:
        """Return what is counted in each row [N x K]."""

    @abstractmethod
    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the scores [...] of sums of counts [... x K]."""

    def judge(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[Any]:
        return self.counts(predictions, rows)

    def metric(self, decisions: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the score of counts [N x K], or those of resamples [R x N x K]."""
        return self.ratio(decisions.sum(axis=-2))
