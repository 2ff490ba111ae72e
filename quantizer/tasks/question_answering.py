"""The task ``question-answering``: the span of a context that answers a question, scored by F1 over its words.

Shapes: N samples, S tokens of the longest sample, T tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.tasks.datasets.examples import Example, Question
from quantizer.tasks.inputs import Batch, Inputs, Sample
from quantizer.tasks.metrics import label_flips, sqnr_db
from quantizer.tasks.multiple_choice import PairInputs
from quantizer.tasks.outputs import first_output, is_token, per_token
from quantizer.tasks.task import CountedTask, Predictions, examples_of_kind, tasks

_LONGEST = 30
"""The most tokens of an answer, as in the scripts of transformers."""


@tasks.add("question-answering")
class QuestionAnswering(CountedTask):
    """Questions about contexts to two logits per token [N x S x 2], to a span, scored by F1 as in SQuAD.

    A context is truncated if it and its question exceed ``max_length`` tokens; later answers are missed. If some
    samples have no answer, the logits of the first token compete with those of the best span, as in SQuAD 2.0.
    """

    name = "question-answering"
    auto_class = "AutoModelForQuestionAnswering"
    output_name = "start_logits"
    further_outputs = ("end_logits",)
    metric_name = "f1"
    packages = ("torchmetrics",)

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        self._pairs = _QuestionInputs(model, processor, max_length=max_length, min_length=min_length)
        return self._pairs

    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        return [(example.question, example.context) for example in examples_of_kind(examples, Question, self.name)]

    def targets(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        """Return the correct answers of each sample [N], as tuples of texts."""
        answers = np.empty(len(examples), dtype=object)
        for at, example in enumerate(examples_of_kind(examples, Question, self.name)):
            answers[at] = tuple(text for text, _ in example.answers)
        return answers

    def collect(self, result: object, batch: Batch) -> Sequence[torch.Tensor]:
        names = (self.output_name, *self.further_outputs)
        logits = [first_output(result, name, place) for place, name in enumerate(names)]
        return per_token(torch.stack(logits, dim=-1), batch)

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return the positions of the largest start and end logits [N x 2]."""
        return np.asarray(np.where(np.isnan(outputs), -np.inf, outputs).argmax(axis=1))

    def counts(self, predictions: Predictions, examples: Sequence[Example]) -> npt.NDArray[np.float64]:
        """Return the F1 of each sample's answer in percent, and 1 [N x 2]."""
        squad = import_module("torchmetrics.functional.text").squad
        answers = self.targets(examples)
        may_be_none = any(not texts for texts in answers)
        scores = []
        for logits, place, texts in zip(
            predictions.outputs, self._pairs.context_tokens(examples), answers, strict=True
        ):
            answer = place.text(*_span(logits, place.context, may_be_none))
            target = {"id": "", "answers": {"text": list(texts) or [""], "answer_start": [0]}}
            scores.append((float(squad({"id": "", "prediction_text": answer}, target)["f1"]), 1.0))
        return np.array(scores, dtype=np.float64)

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the mean F1, from 0 to 1."""
        return np.asarray(sums[..., 0] / sums[..., 1] / 100)

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the share of samples whose start or end differs, and the logits' SQNR in dB."""
        own = is_token(float_predictions.outputs)
        changed = (float_predictions.decisions != other.decisions).any(axis=-1)
        return {
            "label_flips": label_flips(changed, np.zeros_like(changed)),
            "sqnr_db": sqnr_db(float_predictions.outputs[own], other.outputs[own]),
        }


def _span(logits: npt.NDArray[np.float32], context: npt.NDArray[np.bool_], may_be_none: bool) -> tuple[int, int]:
    """Return the first and last token of the best answer in a context; (0, 0) for no answer.

    Args:
        logits: of start and end, [S x 2], padded with NaN.
        context: a mask of the tokens of the context [T], T at most S.
        may_be_none: whether the logits of the first token compete.
    """
    start, end = (np.where(context, logits[: len(context), side], -np.inf) for side in (0, 1))
    both = start[:, None] + end[None, :]
    both[~np.triu(np.tri(len(context), k=_LONGEST - 1, dtype=bool))] = -np.inf
    first, last = np.unravel_index(int(both.argmax()), both.shape)
    if may_be_none and logits[0].sum() > both[first, last]:
        return 0, 0
    return int(first), int(last)


class _ContextTokens:
    """The positions of one sample's tokens in its context."""

    def __init__(self, context: npt.NDArray[np.bool_], offsets: Sequence[tuple[int, int]], text: str) -> None:
        self.context = context
        self._offsets = offsets
        self._text = text

    def text(self, first: int, last: int) -> str:
        """Return the text from the first to the last token; empty if they are not in the context."""
        if not self.context[first]:
            return ""
        return self._text[self._offsets[first][0] : self._offsets[last][1]]


class _QuestionInputs(PairInputs):
    requirement = "task 'question-answering' is for questions about texts: use a data set of them, like 'squad-json'"

    def context_tokens(self, examples: Sequence[Any]) -> list[_ContextTokens]:
        """Return the positions of each sample's tokens in its context."""
        pairs = [(example.question, example.context) for example in examples]
        self.require_fast()
        encoded = self.encoded(pairs, max_length=self.max_length, return_offsets_mapping=True)
        return [
            _ContextTokens(
                np.array([part == 1 for part in encoded.sequence_ids(at)]),
                encoded["offset_mapping"][at],
                example.context,
            )
            for at, example in enumerate(examples)
        ]
