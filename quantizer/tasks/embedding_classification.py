"""The task ``embedding-classification``: labels from embeddings, by a logistic regression on float embeddings.

The head is fitted once, on the float model's embeddings, and is the same for every other model. The score therefore
measures the damage to the embeddings, part of which a newly fitted head could hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import MissingDependencyError, TaskError
from quantizer.tasks.datasets.rows import Row, Text
from quantizer.tasks.inputs import Batch, Inputs, Sample
from quantizer.tasks.kinds import rows_of_kind
from quantizer.tasks.metrics import accuracy, label_flips, mean_cosine, sqnr_db
from quantizer.tasks.pooling import MEAN
from quantizer.tasks.task import Predictions, Progress, Run, Task, tasks

MAX_ITERATIONS = 1000


@tasks.add("embedding-classification")
class EmbeddingClassification(Task):
    """Texts to embeddings [N x D], to labels [N] by a fitted head, scored by accuracy. Call ``fit_head`` first."""

    name = "embedding-classification"
    auto_class = "AutoModel"
    output_name = "last_hidden_state"
    metric_name = "accuracy"
    packages = ("sklearn",)
    needs_head = True
    head: Any = None
    """The fitted ``sklearn.linear_model.LogisticRegression``; None before ``fit_head``."""

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        self._pooling = getattr(model, "sentence_pooling", MEAN)
        return super().make_inputs(model, processor, max_length, min_length)

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        return [f"{self._pooling.prompt}{row.text}" for row in rows_of_kind(rows, Text, self.name)]

    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        return np.array([row.label for row in rows_of_kind(rows, Text, self.name)], dtype=np.int64)

    def represent(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self._pooling.embeddings(output, batch["attention_mask"])

    def fit_head(self, run_float: Run, rows: Sequence[Row], progress: Progress | None = None) -> None:
        """Fit the head on the float model's embeddings of ``rows``; the same rows give the same head.

        Raises:
            TaskError: rows are of another kind, or all of one class.
            MissingDependencyError: scikit-learn is not installed.
        """
        try:
            from sklearn.linear_model import LogisticRegression
        except ModuleNotFoundError as error:
            raise MissingDependencyError("scikit-learn", "hf") from error
        labels = self.targets(rows)
        if len(np.unique(labels)) < 2:
            raise TaskError(
                f"the {len(labels)} head rows are all of one class, expected at least two: use more or other rows"
            )
        embeddings = self.outputs(run_float, rows, progress)
        self.head = LogisticRegression(max_iter=MAX_ITERATIONS).fit(embeddings, labels)

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        if self.head is None:
            raise TaskError(f"task {self.name!r} has no head yet: call fit_head() with the float model first")
        return np.asarray(self.head.predict(outputs))

    def metric(self, decisions: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return accuracy(decisions, targets)

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the share of changed labels, the mean cosine of embeddings to the float ones, and their SQNR in dB."""
        return {
            "label_flips": label_flips(float_predictions.decisions, other.decisions),
            "mean_cosine": mean_cosine(float_predictions.outputs, other.outputs),
            "sqnr_db": sqnr_db(float_predictions.outputs, other.outputs),
        }
