"""The common part of text and image classifiers: logits, labels, and figures against the float model.

Shapes: N rows, B rows of a batch, C classes.

The task ``sequence-classification``: a fine-tuned text classifier, whose label is the class of the largest logit.

The base of classifiers of files: images or recordings, whose label is the class of the largest logit.

The task ``image-classification``: a fine-tuned image classifier, whose label is the class of the largest logit.

The task ``embedding-classification``: labels from embeddings, by a logistic regression on float embeddings.

The head is fitted once, on the float model's embeddings, and is the same for every other model. The score therefore
measures the damage to the embeddings, part of which a newly fitted head could hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import MissingDependencyError, TaskError
from quantizer.tasks.datasets.rows import Audio, Image, Row, Text, class_number
from quantizer.tasks.image_inputs import ImageInputs
from quantizer.tasks.inputs import Batch, Inputs, Sample
from quantizer.tasks.metrics import accuracy, kl_divergence, label_flips, mean_cosine, sqnr_db
from quantizer.tasks.outputs import MEAN
from quantizer.tasks.task import Predictions, Progress, Run, Task, rows_of_kind, tasks

if TYPE_CHECKING:
    from quantizer.tasks.task import Predictions


def class_names(config: Any) -> tuple[str, ...]:
    """Return the class names in a model's config, in the order of the class numbers; () if it has none."""
    names = getattr(config, "id2label", None) or {}
    return tuple(str(names[index]) for index in sorted(names))


def require_one_label(config: Any, task: str) -> None:
    """Raise if by its config a model's label is not the class of its largest logit."""
    count, problem = len(class_names(config)), getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        what = "gives several labels at once (problem_type: multi_label_classification)"
    elif problem == "regression" or count == 1:
        what = "gives a score and no class (one label, or problem_type: regression)"
    else:
        return
    raise TaskError(
        f"task {task!r} takes the class of the largest logit for the answer, and the model {what}: quantize it with "
        "the Quantizer, which needs no task, and score it with a metric of its own"
    )


def checked_logits(output: torch.Tensor) -> torch.Tensor:
    """Return logits [B x C] unchanged."""
    if output.dim() != 2:
        raise TaskError(
            f"the model's output has the shape {tuple(output.shape)}, expected logits [batch, classes]: is this a "
            "classifier?"
        )
    return output


def largest_logit(outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """Return the label of each row [N] of logits [N x C]."""
    return np.asarray(outputs.argmax(axis=-1))


def compare_classifiers(float_predictions: Predictions, other: Predictions) -> dict[str, float]:
    """Return the share of changed labels, the KL divergence from the float model in nats, the logits' SQNR in dB."""
    return {
        "label_flips": label_flips(float_predictions.decisions, other.decisions),
        "kl_divergence": kl_divergence(float_predictions.outputs, other.outputs),
        "sqnr_db": sqnr_db(float_predictions.outputs, other.outputs),
    }


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
        """Return the class of each row [N]."""
        labels = np.array([row.label for row in rows_of_kind(rows, Text, self.name)], dtype=np.int64)
        require_classes(labels, self.classes)
        return labels

    def represent(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return checked_logits(output)

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        return largest_logit(outputs)

    def score(self, predictions: Predictions, rows: Sequence[Row]) -> float:
        """Return the accuracy."""
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
    """
    highest = int(labels.max(initial=0))
    if classes is not None and highest >= classes:
        raise TaskError(f"the rows hold label {highest}, but the model has {classes} classes (0 to {classes - 1})")


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
        """Return the class number of each row [N]."""
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


@tasks.add("image-classification")
class ImageClassification(FileClassification):
    """Images to logits [N x C], to labels [N] by the largest logit, scored by accuracy."""

    name = "image-classification"
    reads = "image"
    auto_class = "AutoModelForImageClassification"
    kind = Image

    def file_inputs(self, model: torch.nn.Module, processor: Any) -> Inputs:
        return ImageInputs(model, processor)


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
        """Fit the head on the float model's embeddings of ``rows``; the same rows give the same head."""
        try:
            from sklearn.linear_model import LogisticRegression
        except ModuleNotFoundError as error:
            raise MissingDependencyError("scikit-learn", "hf") from error
        labels = self.targets(rows)
        if len(np.unique(labels)) < 2:
            raise TaskError(
                f"the {len(labels)} head rows are all of one class, expected at least two: use more or other samples"
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
