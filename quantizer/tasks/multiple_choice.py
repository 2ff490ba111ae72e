"""The batches of pairs of texts, such as a question and its context.

The task ``multiple-choice``: the answer to a question among some that are given, scored by accuracy.

Shapes: N rows, R pairs of a question and a choice, S tokens, C choices of the row with most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.datasets.rows import Choices, Row
from quantizer.tasks.inputs import Batch, Inputs, Sample, TextInputs
from quantizer.tasks.metrics import accuracy, kl_divergence, label_flips, sqnr_db
from quantizer.tasks.task import Predictions, Progress, Run, Task, rows_of_kind, tasks


class PairInputs(TextInputs):
    """The batches of pairs of texts, of which the longer one is cut first; a subclass names its task."""

    wanted: ClassVar[str]
    """The task, what it is for, and its data set, in words."""

    def encoded(self, texts: Sequence[Any], **options: Any) -> Any:
        self.check(texts)
        first, second = zip(*texts, strict=True)
        return self.tokenizer(list(first), list(second), truncation="longest_first", **options)

    def check(self, texts: Sequence[Any]) -> None:
        """Raise ``TaskError`` if a sample is a text alone."""
        for text in texts:
            if isinstance(text, str):
                raise TaskError(f"{text[:60]!r} is a text alone, and {self.wanted}")


_NO_CHOICE = -1e9
"""The logit of a choice that a row does not have, which has no share in a softmax."""


class ChoiceScorer(torch.nn.Module):
    """A model of multiple choice that reads pairs of a question and a choice [R x S], and gives their scores [R x 1].

    The model itself reads all choices of a row at once, [N x C x S], only to put them one after the other.
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
        """Return the model's output for rows of one choice each."""
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        return self.model(**{name: value.unsqueeze(1) for name, value in given.items() if value is not None})


@tasks.add("multiple-choice")
class MultipleChoice(Task):
    """Questions with choices to logits [N x C], NaN where a row has fewer, to the place of the largest."""

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

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        """Return the pairs [R] of all rows: of a question and a choice, or of a context and the question with one."""
        return [
            (row.context, f"{row.question} {choice}".strip()) if row.context else (row.question, choice)
            for row in rows_of_kind(rows, Choices, self.name)
            for choice in row.choices
        ]

    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        return np.array([row.label for row in rows_of_kind(rows, Choices, self.name)], dtype=np.int64)

    def outputs(self, run: Run, rows: Sequence[Row], progress: Progress | None = None) -> npt.NDArray[np.float32]:
        """Return the logits of each row's choices [N x C]; see ``predict``."""
        scores = super().outputs(run, rows, progress)[:, 0]
        counts = [len(row.choices) for row in rows_of_kind(rows, Choices, self.name)]
        found = np.full((len(rows), max(counts)), np.nan, dtype=np.float32)
        found[np.arange(max(counts)) < np.array(counts)[:, None]] = scores
        return found

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
        both = [np.nan_to_num(one.outputs, nan=_NO_CHOICE) for one in (float_predictions, other)]
        own = ~np.isnan(float_predictions.outputs)
        return {
            "label_flips": label_flips(float_predictions.decisions, other.decisions),
            "kl_divergence": kl_divergence(*both),
            "sqnr_db": sqnr_db(float_predictions.outputs[own], other.outputs[own]),
        }


class _ChoiceInputs(PairInputs):
    wanted = "task 'multiple-choice' is for questions with choices: use a data set of them, like 'choices-jsonl'"
