"""``sequence-classification``: a fine-tuned classifier; the label is the largest logit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.datasets.rows import Row
from quantizer.tasks.datasets.rows import Text
from quantizer.tasks.kinds import rows_of_kind
from quantizer.tasks.metrics import accuracy
from quantizer.tasks.metrics import kl_divergence
from quantizer.tasks.metrics import label_flips
from quantizer.tasks.metrics import sqnr_db
from quantizer.tasks.task import Batch
from quantizer.tasks.task import Predictions
from quantizer.tasks.task import Task
from quantizer.tasks.task import tasks

__all__ = ["SequenceClassification"]


@tasks.add("sequence-classification")
class SequenceClassification(Task):
    """Texts in; logits [N x C] and labels [N] out; accuracy."""

    name = "sequence-classification"
    auto_class = "AutoModelForSequenceClassification"
    output_name = "logits"
    metric_name = "accuracy"

    def texts(self, rows: Sequence[Row]) -> list[str]:
        return [row.text for row in rows_of_kind(rows, Text, self.name)]

    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        return np.array([row.label for row in rows_of_kind(rows, Text, self.name)], dtype=np.int64)

    def represent(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        if output.dim() != 2:
            raise TaskError(
                f"the model's output has the shape {tuple(output.shape)}, expected logits [batch, classes]: is this a "
                f"sequence classifier?"
            )
        return output

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        return np.asarray(outputs.argmax(axis=-1))

    def score(self, predictions: Predictions, rows: Sequence[Row]) -> float:
        """Accuracy.

        Raises:
            TaskError: rows with a label that the model has no class for.
        """
        classes, highest = predictions.outputs.shape[1], int(self.targets(rows).max(initial=0))
        if highest >= classes:
            raise TaskError(f"the rows hold label {highest}, but the model has {classes} classes (0 to {classes - 1})")
        return super().score(predictions, rows)

    def metric(self, decisions: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return accuracy(decisions, targets)

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Share of labels that flip, KL divergence from the float distribution in nats, SQNR of the logits in dB."""
        return {
            "label_flips": label_flips(float_predictions.decisions, other.decisions),
            "kl_divergence": kl_divergence(float_predictions.outputs, other.outputs),
            "sqnr_db": sqnr_db(float_predictions.outputs, other.outputs),
        }
