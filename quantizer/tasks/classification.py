"""Classifiers of texts, images and recordings: the class of the largest logit, scored by accuracy.

``embedding-classification`` instead fits a logistic regression once, on embeddings of the float model, and applies it
to all models. The score thus measures the damage to the embeddings, part of which a newly fitted head could hide.

Shapes: N samples, B samples in a batch, C classes, D width of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import MissingDependencyError, TaskError
from quantizer.tasks.datasets.examples import Audio, Example, Image, Text, class_number
from quantizer.tasks.image_inputs import ImageInputs
from quantizer.tasks.inputs import Batch, Inputs, Sample
from quantizer.tasks.metrics import accuracy, kl_divergence, label_flips, mean_cosine, sqnr_db
from quantizer.tasks.outputs import MEAN
from quantizer.tasks.task import Predictions, Progress, Run, Task, examples_of_kind, tasks

if TYPE_CHECKING:
    from quantizer.tasks.task import Predictions


def class_names(config: Any) -> tuple[str, ...]:
    """Return the class names in a model's config, in the order of the class numbers; () without names."""
    names = getattr(config, "id2label", None) or {}
    return tuple(str(names[index]) for index in sorted(names))


def require_one_label(config: Any, task: str) -> None:
    """Raise if a model's config is for several labels per sample, or for regression."""
    count, problem = len(class_names(config)), getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        output = "returns several labels at once (problem_type: multi_label_classification)"
    elif problem == "regression" or count == 1:
        output = "returns a score instead of a class (one label, or problem_type: regression)"
    else:
        return
    raise TaskError(
        f"task {task!r} needs one class per sample, but the model {output}: quantize it with Quantizer, which needs no "
        "task, and score it with your own metric"
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
    """Return the index of the largest logit of each sample [N], from logits [N x C]."""
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
        classes: the number of classes in the model's config; None if it is missing.
    """

    name = "sequence-classification"
    auto_class = "AutoModelForSequenceClassification"
    pipeline_class = "TextClassificationPipeline"
    pipeline_options: ClassVar[Mapping[str, Any]] = {"truncation": True}
    output_name = "logits"
    labels = "example"
    metric_name = "accuracy"

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        require_one_label(getattr(model, "config", None), self.name)
        self.classes: int | None = getattr(getattr(model, "config", None), "num_labels", None)
        return super().make_inputs(model, processor, max_length, min_length)

    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        return [example.text for example in examples_of_kind(examples, Text, self.name)]

    def targets(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        """Return the class of each sample [N]."""
        labels = class_numbers([example.label for example in examples_of_kind(examples, Text, self.name)], self.name)
        require_classes(labels, self.classes)
        return labels

    def represent(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return checked_logits(output)

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        return largest_logit(outputs)

    def score(self, predictions: Predictions, examples: Sequence[Example]) -> float:
        """Return the accuracy."""
        targets = self.targets(examples)
        # A subclass may have numbers as targets.
        if targets.dtype.kind == "i":
            require_classes(targets, predictions.outputs.shape[1])
        return super().score(predictions, examples)

    def metric(self, decisions: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return accuracy(decisions, targets)

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        return compare_classifiers(float_predictions, other)


def class_numbers(labels: Sequence[object], task: str) -> npt.NDArray[np.int64]:
    """Return labels as class numbers [N]; raise ``TaskError`` for anything but integers from 0."""
    for number, label in enumerate(labels, start=1):
        if not isinstance(label, int | np.integer) or label < 0:
            raise TaskError(
                f"task {task!r}: sample {number} has the label {label!r}, expected a class number (an integer from 0). "
                "If the target is not a class, override targets() and paired() in a task of your own"
            )
    return np.array(labels, dtype=np.int64)


def require_classes(labels: npt.NDArray[Any], classes: int | None) -> None:
    """Raise if a label is not a class of the model.

    Args:
        labels: int64 [N].
        classes: the number of classes; None if unknown.
    """
    highest = int(labels.max(initial=0))
    if classes is not None and highest >= classes:
        raise TaskError(f"the samples have label {highest}, but the model has {classes} classes (0 to {classes - 1})")


_SHOWN = 5


class FileClassification(Task):
    """Files to logits [N x C], to labels [N] by the largest logit, scored by accuracy.

    Attributes:
        classes: the name of each class in the model's config.
    """

    output_name = "logits"
    labels = "example"
    metric_name = "accuracy"
    kind: ClassVar[type[Image | Audio]]
    """The kind of examples."""

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        require_one_label(getattr(model, "config", None), self.name)
        self.classes = class_names(getattr(model, "config", None))
        return self.file_inputs(model, processor, min_length)

    def file_inputs(self, model: torch.nn.Module, processor: Any, min_length: int) -> Inputs:
        """Return the object that makes batches of files."""
        raise NotImplementedError(f"{type(self).__name__} defines no file_inputs()")

    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        return [example.path for example in examples_of_kind(examples, self.kind, self.name)]

    def targets(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        """Return the class number of each sample [N]."""
        return np.array(
            [self._number(example) for example in examples_of_kind(examples, self.kind, self.name)], dtype=np.int64
        )

    def represent(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return checked_logits(output)

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        return largest_logit(outputs)

    def metric(self, decisions: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return accuracy(decisions, targets)

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        return compare_classifiers(float_predictions, other)

    def _number(self, example: Image | Audio) -> int:
        # A reader of your own may return numbers.
        label = str(example.label)
        count = self.classes.count(label)
        if count == 1:
            return self.classes.index(label)
        number = class_number(label)
        if not count and number is not None and number < len(self.classes):
            return number
        shown = ", ".join(map(repr, self.classes[:_SHOWN])) + (", ..." if len(self.classes) > _SHOWN else "")
        raise TaskError(
            f"{example.path}: the label {label[:60]!r} is "
            f"{f'the name of {count} classes' if count else 'no class'} of the model; expected one of its "
            f"{len(self.classes)} names ({shown}), or a number from 0 to {len(self.classes) - 1}"
        )


@tasks.add("image-classification")
class ImageClassification(FileClassification):
    """Images to logits [N x C], to labels [N] by the largest logit, scored by accuracy."""

    name = "image-classification"
    reads = "image"
    auto_class = "AutoModelForImageClassification"
    pipeline_class = "ImageClassificationPipeline"
    kind = Image

    def file_inputs(self, model: torch.nn.Module, processor: Any, min_length: int) -> Inputs:
        return ImageInputs(model, processor)


MAX_ITERATIONS = 1000


@tasks.add("embedding-classification")
class EmbeddingClassification(Task):
    """Texts to embeddings [N x D], to labels [N] by a fitted head, scored by accuracy. Call ``fit_head`` first."""

    name = "embedding-classification"
    auto_class = "AutoModel"
    pipeline_class = "FeatureExtractionPipeline"
    # In a larger batch, the pipeline would return vectors of padding too.
    pipeline_options: ClassVar[Mapping[str, Any]] = {"truncation": True, "batch_size": 1}
    output_name = "last_hidden_state"
    metric_name = "accuracy"
    packages = ("sklearn",)
    needs_head = True
    head: Any = None
    """The fitted ``sklearn.linear_model.LogisticRegression``; None before ``fit_head``."""

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        self._pooling = getattr(model, "sentence_pooling", MEAN)
        return super().make_inputs(model, processor, max_length, min_length)

    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        return [f"{self._pooling.prompt}{example.text}" for example in examples_of_kind(examples, Text, self.name)]

    def targets(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        return class_numbers([example.label for example in examples_of_kind(examples, Text, self.name)], self.name)

    def represent(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self._pooling.embeddings(output, batch["attention_mask"])

    def fit_head(self, run_float: Run, examples: Sequence[Example], progress: Progress | None = None) -> None:
        """Fit the head on the float model's embeddings of ``examples``; the fit is deterministic."""
        try:
            from sklearn.linear_model import LogisticRegression
        except ModuleNotFoundError as error:
            raise MissingDependencyError("scikit-learn", "hf") from error
        labels = self.targets(examples)
        if len(np.unique(labels)) < 2:
            raise TaskError(
                f"the {len(labels)} samples of the head are all of one class, expected at least two: use more or "
                f"other samples"
            )
        embeddings = self.outputs(run_float, examples, progress)
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
