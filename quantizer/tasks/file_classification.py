"""The base of classifiers of files: images or recordings, whose label is the class of the largest logit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.classification import (
    checked_logits,
    class_names,
    compare_classifiers,
    largest_logit,
    require_one_label,
)
from quantizer.tasks.datasets.rows import Audio, Image, Row, class_number
from quantizer.tasks.inputs import Batch, Inputs, Sample
from quantizer.tasks.kinds import rows_of_kind
from quantizer.tasks.metrics import accuracy
from quantizer.tasks.task import Predictions, Task

_SHOWN = 5


class FileClassification(Task):
    """Files to logits [N x C], to labels [N] by the largest logit, scored by accuracy.

    Attributes:
        classes: the name of each class, from the model's config.
    """

    output_name = "logits"
    labels = "row"
    metric_name = "accuracy"
    kind: ClassVar[type[Image | Audio]]
    """The kind of rows."""

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        require_one_label(getattr(model, "config", None), self.name)
        self.classes = class_names(getattr(model, "config", None))
        return self.file_inputs(model, processor)

    def file_inputs(self, model: torch.nn.Module, processor: Any) -> Inputs:
        """Return the object that makes batches of files."""
        raise NotImplementedError(f"{type(self).__name__} defines no file_inputs()")

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        return [row.path for row in rows_of_kind(rows, self.kind, self.name)]

    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Return the class number of each row [N].

        Raises:
            TaskError: a row is of another kind, or its label is that of no class of the model, or of several.
        """
        return np.array([self._number(row) for row in rows_of_kind(rows, self.kind, self.name)], dtype=np.int64)

    def represent(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return checked_logits(output)

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        return largest_logit(outputs)

    def metric(self, decisions: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return accuracy(decisions, targets)

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        return compare_classifiers(float_predictions, other)

    def _number(self, row: Image | Audio) -> int:
        count = self.classes.count(row.label)
        if count == 1:
            return self.classes.index(row.label)
        number = class_number(row.label)
        if not count and number is not None and number < len(self.classes):
            return number
        shown = ", ".join(map(repr, self.classes[:_SHOWN])) + (", ..." if len(self.classes) > _SHOWN else "")
        raise TaskError(
            f"{row.path}: the label {row.label[:60]!r} is "
            f"{f'the name of {count} classes' if count else 'no class'} of the model; expected one of its "
            f"{len(self.classes)} names ({shown}), or a number from 0 to {len(self.classes) - 1}"
        )
