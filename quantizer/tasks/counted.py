"""The base of tasks whose score is a ratio of sums over rows: entity F1, exact match, perplexity, mean IoU.

Shapes: N rows, R resamples, K counts of a row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quantizer.errors import TaskError
from quantizer.tasks.datasets.rows import Row
from quantizer.tasks.task import Predictions
from quantizer.tasks.task import Task

__all__ = ["CountedTask"]


class CountedTask(Task):
    """A task that counts in each row, and scores the sums of its counts.

    A resample of rows is scored by the counts of its rows: what is slow, such as finding entities, is done once a row.
    """

    @abstractmethod
    def counts(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[np.float64]:
        """Return what is counted in each row [N x K]."""

    @abstractmethod
    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the scores [...] of sums of counts [... x K]."""

    def judged(self, predictions: Predictions, rows: Sequence[Row]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the counts of each row [N x K], twice: they hold what is right already.

        Raises:
            TaskError: the predictions are of other rows.
        """
        if len(rows) != len(predictions.decisions):
            raise TaskError(
                f"{len(predictions.decisions)} predictions but {len(rows)} rows: pass the rows predicted on"
            )
        found = self.counts(predictions, rows)
        return found, found

    def metric(self, decisions: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the score of counts [N x K], or those of resamples [R x N x K]."""
        return self.ratio(decisions.sum(axis=-2))
