"""The task ``sequence-classification``: a fine-tuned text classifier, whose label is the class of the largest logit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.classification import checked_logits, compare_classifiers, largest_logit, require_one_label
from quantizer.tasks.datasets.rows import Row, Text
from quantizer.tasks.inputs import Batch, Inputs, Sample
from quantizer.tasks.kinds import rows_of_kind
from quantizer.tasks.metrics import accuracy
from quantizer.tasks.task import Predictions, Task, tasks


@tasks.add("sequence-classification")
class SequenceClassification(Task):
    """Texts to logits [N x C], to labels [N] by the largest logit, scored by accuracy.

    Attributes:
        classes: the number of classes, from the model's config; None: it does not say.
    """

    name = "sequence-classification"
    auto_class = "AutoModelForSequenceClassification"
    output_name = "logits"
    labels = "row"
    metric_name = "accuracy"

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        require_one_label(getattr(model, "config", None), self.name)
        self.classes: int | None = getattr(getattr(model, "config", None), "num_labels", None)
        return super().make_inputs(model, processor, max_length, min_length)

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        return [row.text for row in rows_of_kind(rows, Text, self.name)]

    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Return the class of each row [N].

        Raises:
            TaskError: a row is of another kind, or its label is no class of the model.
        """
        labels = np.array([row.label for row in rows_of_kind(rows, Text, self.name)], dtype=np.int64)
        require_classes(labels, self.classes)
        return labels

    def represent(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return checked_logits(output)

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        return largest_logit(outputs)

    def score(self, predictions: Predictions, rows: Sequence[Row]) -> float:
        """Return the accuracy.

        Raises:
            TaskError: the label of a row is no class of the model.
        """
        require_classes(self.targets(rows), predictions.outputs.shape[1])
        return super().score(predictions, rows)

    def metric(self, decisions: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return accuracy(decisions, targets)

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        return compare_classifiers(float_predictions, other)


def require_classes(labels: npt.NDArray[Any], classes: int | None) -> None:
    """Raise if a label is no class.

    Args:
        labels: int64 [N].
        classes: the number of classes; None: it is not known.

    Raises:
        TaskError: a label is too high.
    """
    highest = int(labels.max(initial=0))
    if classes is not None and highest >= classes:
        raise TaskError(f"the rows hold label {highest}, but the model has {classes} classes (0 to {classes - 1})")
