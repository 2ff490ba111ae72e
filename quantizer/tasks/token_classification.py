"""The task ``token-classification``: a tag for each word, such as the names in a text, scored by entities.

Shapes: N rows, S tokens of the longest row, C tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.classification import class_names, compare_classifiers
from quantizer.tasks.datasets.rows import Row, Words
from quantizer.tasks.inputs import Batch, Inputs, Sample, TextInputs
from quantizer.tasks.outputs import first_output, is_token, per_token
from quantizer.tasks.task import CountedTask, Predictions, rows_of_kind, tasks

_OUTSIDE = "O"
_SHOWN = 8


@tasks.add("token-classification")
class TokenClassification(CountedTask):
    """Words to logits of their tokens [N x S x C], to tags, scored by F1 over entities as seqeval finds them.

    The tag of a word is that of its first token. A word that was cut off counts as tagged ``O``.
    """

    name = "token-classification"
    auto_class = "AutoModelForTokenClassification"
    output_name = "logits"
    labels = "part"
    metric_name = "entity_f1"
    packages = ("seqeval",)

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        self._tags = class_names(getattr(model, "config", None))
        self._words = _WordInputs(model, processor, max_length=max_length, min_length=min_length)
        return self._words

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        return [row.words for row in rows_of_kind(rows, Words, self.name)]

    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Return the tags of each row [N], as tuples."""
        found = np.empty(len(rows), dtype=object)
        for at, row in enumerate(rows_of_kind(rows, Words, self.name)):
            unknown = sorted({*row.tags} - {*self._tags})
            if unknown:
                shown = ", ".join(self._tags[:_SHOWN]) + (", ..." if len(self._tags) > _SHOWN else "")
                raise TaskError(
                    f"row {at + 1} has the tag {unknown[0]!r}, which the model does not have; expected one of its "
                    f"{len(self._tags)}: {shown} (id2label in config.json)"
                )
            found[at] = row.tags
        return found

    def collect(self, result: object, batch: Batch) -> Sequence[torch.Tensor]:
        return per_token(first_output(result, self.output_name), batch)

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return the class number of each token [N x S]; -1 where there is none."""
        return np.where(is_token(outputs), np.nan_to_num(outputs).argmax(axis=-1), -1)

    def counts(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[np.float64]:
        """Return how many entities of each row were found, said and true [N x 3]."""
        entities = import_module("seqeval.metrics.sequence_labeling").get_entities
        targets = self.targets(rows)
        found = []
        for decided, true, places in zip(predictions.decisions, targets, self._words.first_tokens(rows), strict=True):
            said = [_OUTSIDE if place is None else self._tags[decided[place]] for place in places]
            one, other = {*entities(said)}, {*entities(list(true))}
            found.append((len(one & other), len(one), len(other)))
        return np.array(found, dtype=np.float64)

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return F1: twice the entities found, by those said and those true; 0 if there are neither."""
        both = sums[..., 1] + sums[..., 2]
        return np.divide(2 * sums[..., 0], both, out=np.zeros_like(both), where=both > 0)

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the figures of a classifier, over all tokens."""
        own = is_token(float_predictions.outputs)
        return compare_classifiers(
            *(Predictions(one.outputs[own], one.decisions[own]) for one in (float_predictions, other))
        )


class _WordInputs(TextInputs):
    """The batches of texts that come in words, or whole; these are split at spaces."""

    def encoded(self, texts: Sequence[Any], **options: Any) -> Any:
        words = [list(text) if isinstance(text, tuple) else text.split() for text in texts]
        return self.tokenizer(words, is_split_into_words=True, truncation=True, **options)

    def first_tokens(self, rows: Sequence[Any]) -> list[list[int | None]]:
        """Return the place of the first token of each word; None: it was cut off."""
        self.require_fast()
        encoded = self.encoded([row.words for row in rows], max_length=self.max_length)
        found: list[list[int | None]] = []
        for at, row in enumerate(rows):
            places: dict[int, int] = {}
            for place, word in enumerate(encoded.word_ids(at)):
                if word is not None:
                    places.setdefault(word, place)
            found.append([places.get(word) for word in range(len(row.words))])
        return found
