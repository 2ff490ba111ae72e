"""The task ``multiple-choice``: the answer to a question among given choices, scored by accuracy.

``PairInputs`` makes batches of pairs of texts, and is shared with question answering.

Shapes: N samples, R pairs of a question and a choice, S tokens, C choices of the sample with most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.classification import class_numbers
from quantizer.tasks.datasets.examples import Choices, Example
from quantizer.tasks.inputs import Batch, Inputs, Sample, TextInputs
from quantizer.tasks.metrics import accuracy, kl_divergence, label_flips, sqnr_db
from quantizer.tasks.task import Predictions, Progress, Run, Task, examples_of_kind, tasks


class PairInputs(TextInputs):
    """Batches of pairs of texts, longer text truncated first; a subclass describes its task."""

    requirement: ClassVar[str]
    """The kind of samples that the task needs, as a sentence of an error."""

    def encoded(self, texts: Sequence[Any], **options: Any) -> Any:
        self.check(texts)
        first, second = zip(*texts, strict=True)
        return self.tokenizer(list(first), list(second), truncation="longest_first", **options)

    def check(self, texts: Sequence[Any]) -> None:
        """Raise ``TaskError`` if a sample is a single text."""
        for text in texts:
            if isinstance(text, str):
                raise TaskError(f"{text[:60]!r} is a single text, and {self.requirement}")


_NO_CHOICE = -1e9
"""The logit of a missing choice, whose softmax is 0."""


class ChoiceScorer(torch.nn.Module):
    """A multiple-choice model that reads pairs of a question and a choice [R x S], and returns their scores [R x 1].

    The model itself reads all choices of a sample at once [N x C x S], and flattens them to pairs.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> Any:
        """Return the model's output for samples of one choice each."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        return self.model(**{name: value.unsqueeze(1) for name, value in inputs.items() if value is not None})


@tasks.add("multiple-choice")
class MultipleChoice(Task):
    """Questions to logits of their choices [N x C], padded with NaN, to the index of the largest."""

    name = "multiple-choice"
    auto_class = "AutoModelForMultipleChoice"
    output_name = "logits"
    metric_name = "accuracy"

    @classmethod
    def module_of(
        cls, model: torch.nn.Module, tokenizer: Any = None, texts: Mapping[str, str] | None = None
    ) -> torch.nn.Module:
        return ChoiceScorer(model)

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        return _ChoiceInputs(model, processor, max_length=max_length, min_length=min_length)

    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        """Return the pairs [R] of all examples: question and choice, or context and question with choice."""
        return [
            (example.context, f"{example.question} {choice}".strip()) if example.context else (example.question, choice)
            for example in examples_of_kind(examples, Choices, self.name)
            for choice in example.choices
        ]

    def targets(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        checked = examples_of_kind(examples, Choices, self.name)
        labels = class_numbers([example.label for example in checked], self.name)
        for number, (example, label) in enumerate(zip(checked, labels, strict=True), start=1):
            if label >= len(example.choices):
                raise TaskError(
                    f"task {self.name!r}: sample {number} has the label {label}, expected the index of one of its "
                    f"{len(example.choices)} choices (0 to {len(example.choices) - 1})"
                )
        return labels

    def outputs(
        self, run: Run, examples: Sequence[Example], progress: Progress | None = None
    ) -> npt.NDArray[np.float32]:
        """Return the logits of each sample's choices [N x C], padded with NaN; see ``predict``."""
        scores = super().outputs(run, examples, progress)[:, 0]
        counts = [len(example.choices) for example in examples_of_kind(examples, Choices, self.name)]
        logits = np.full((len(examples), max(counts)), np.nan, dtype=np.float32)
        logits[np.arange(max(counts)) < np.array(counts)[:, None]] = scores
        return logits

    def represent(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the scores of pairs [R x 1] unchanged."""
        if output.dim() != 2 or output.shape[1] != 1:
            raise TaskError(f"the model's output has the shape {tuple(output.shape)}, expected a score for each pair")
        return output

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        return np.asarray(np.nan_to_num(outputs, nan=_NO_CHOICE).argmax(axis=-1))

    def metric(self, decisions: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return accuracy(decisions, targets)

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the share of changed answers, the KL divergence from the float model in nats, the logits' SQNR."""
        both = [np.nan_to_num(model.outputs, nan=_NO_CHOICE) for model in (float_predictions, other)]
        own = ~np.isnan(float_predictions.outputs)
        return {
            "label_flips": label_flips(float_predictions.decisions, other.decisions),
            "kl_divergence": kl_divergence(*both),
            "sqnr_db": sqnr_db(float_predictions.outputs[own], other.outputs[own]),
        }


class _ChoiceInputs(PairInputs):
    requirement = "task 'multiple-choice' is for questions with choices: use a data set of them, like 'choices-jsonl'"
