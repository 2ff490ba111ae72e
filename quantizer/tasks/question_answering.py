"""The task ``question-answering``: the part of a text that answers a question, scored by F1 over its words.

Shapes: N rows, S tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.tasks.datasets.rows import Question, Row
from quantizer.tasks.inputs import Batch, Inputs, Sample
from quantizer.tasks.metrics import label_flips, sqnr_db
from quantizer.tasks.multiple_choice import PairInputs
from quantizer.tasks.outputs import first_output, is_token, per_token
from quantizer.tasks.task import CountedTask, Predictions, rows_of_kind, tasks

_OUTPUTS = ("start_logits", "end_logits")

_LONGEST = 30
"""The most tokens of an answer, as in the scripts of transformers."""


@tasks.add("question-answering")
class QuestionAnswering(CountedTask):
    """Questions about texts to two logits a token [N x S x 2], to a span, scored by F1 as SQuAD does.

    A context is cut where question and context have more than ``max_length`` tokens; an answer after that is missed.
    Where some rows have no answer, a row has none if the logits of the first token say so, as in SQuAD 2.0.
    """

    name = "question-answering"
    auto_class = "AutoModelForQuestionAnswering"
    output_name = "start_logits"
    metric_name = "f1"
    packages = ("torchmetrics",)

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        self._pairs = _QuestionInputs(model, processor, max_length=max_length, min_length=min_length)
        return self._pairs

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        return [(row.question, row.context) for row in rows_of_kind(rows, Question, self.name)]

    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Return the right answers of each row [N], as tuples of texts."""
        found = np.empty(len(rows), dtype=object)
        for at, row in enumerate(rows_of_kind(rows, Question, self.name)):
            found[at] = tuple(text for text, _ in row.answers)
        return found

    def collect(self, result: object, batch: Batch) -> Sequence[torch.Tensor]:
        logits = [first_output(result, name, place) for place, name in enumerate(_OUTPUTS)]
        return per_token(torch.stack(logits, dim=-1), batch)

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return the places of the largest two logits [N x 2]: the start and the end, wherever they are."""
        return np.asarray(np.where(np.isnan(outputs), -np.inf, outputs).argmax(axis=1))

    def counts(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[np.float64]:
        """Return the F1 of each row's answer in percent, and 1 for the row [N x 2]."""
        squad = import_module("torchmetrics.functional.text").squad
        answers = self.targets(rows)
        may_be_none = any(not texts for texts in answers)
        found = []
        for logits, place, texts in zip(predictions.outputs, self._pairs.places(rows), answers, strict=True):
            said = place.text(*_span(logits, place.context, may_be_none))
            target = {"id": "", "answers": {"text": list(texts) or [""], "answer_start": [0]}}
            found.append((float(squad({"id": "", "prediction_text": said}, target)["f1"]), 1.0))
        return np.array(found, dtype=np.float64)

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the mean F1, from 0 to 1."""
        return np.asarray(sums[..., 0] / sums[..., 1] / 100)

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the share of rows whose start or end differs, and the logits' SQNR in dB."""
        own = is_token(float_predictions.outputs)
        changed = (float_predictions.decisions != other.decisions).any(axis=-1)
        return {
            "label_flips": label_flips(changed, np.zeros_like(changed)),
            "sqnr_db": sqnr_db(float_predictions.outputs[own], other.outputs[own]),
        }


def _span(logits: npt.NDArray[np.float32], context: npt.NDArray[np.bool_], may_be_none: bool) -> tuple[int, int]:
    """Return the first and last token of the best answer in a context; (0, 0) for none.

    Args:
        logits: of start and end, [S x 2], with NaN after the row's own tokens.
        context: which tokens are of the context [T], T at most S.
        may_be_none: whether the logits of the first token compete.
    """
    start, end = (np.where(context, logits[: len(context), side], -np.inf) for side in (0, 1))
    both = start[:, None] + end[None, :]
    both[~np.triu(np.tri(len(context), k=_LONGEST - 1, dtype=bool))] = -np.inf
    first, last = np.unravel_index(int(both.argmax()), both.shape)
    if may_be_none and logits[0].sum() > both[first, last]:
        return 0, 0
    return int(first), int(last)


class _Place:
    """The tokens of one row in its text."""

    def __init__(self, context: npt.NDArray[np.bool_], offsets: Sequence[tuple[int, int]], text: str) -> None:
        self.context = context
        self._offsets = offsets
        self._text = text

    def text(self, first: int, last: int) -> str:
        """Return the text from one token to another; empty if they are not of the context."""
        if not self.context[first]:
            return ""
        return self._text[self._offsets[first][0] : self._offsets[last][1]]


class _QuestionInputs(PairInputs):
    wanted = "task 'question-answering' is for questions about texts: use a data set of them, like 'squad-json'"

    def places(self, rows: Sequence[Any]) -> list[_Place]:
        """Return the tokens of each row in its context."""
        pairs = [(row.question, row.context) for row in rows]
        self.require_fast()
        encoded = self.encoded(pairs, max_length=self.max_length, return_offsets_mapping=True)
        return [
            _Place(
                np.array([part == 1 for part in encoded.sequence_ids(at)]),
                encoded["offset_mapping"][at],
                row.context,
            )
            for at, row in enumerate(rows)
        ]
