"""The task ``token-classification``: a tag for each word, such as the names in a text, scored by F1 over entities.

Shapes: N samples, S tokens of the longest sample, C tags.
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
from quantizer.tasks.datasets.examples import Example, Words
from quantizer.tasks.inputs import Batch, Inputs, Sample, TextInputs
from quantizer.tasks.outputs import first_output, is_token, per_token
from quantizer.tasks.task import CountedTask, Predictions, examples_of_kind, tasks

_OUTSIDE = "O"
_SHOWN = 8


@tasks.add("token-classification")
class TokenClassification(CountedTask):
    """Words to logits of their tokens [N x S x C], to tags, scored by F1 over entities as in seqeval.

    The tag of a word is that of its first token. A truncated word counts as tagged ``O``.
    """

    name = "token-classification"
    auto_class = "AutoModelForTokenClassification"
    pipeline_class = "TokenClassificationPipeline"
    output_name = "logits"
    labels = "part"
    metric_name = "entity_f1"
    packages = ("seqeval",)

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        self._tags = class_names(getattr(model, "config", None))
        self._words = _WordInputs(model, processor, max_length=max_length, min_length=min_length)
        return self._words

    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        return [example.words for example in examples_of_kind(examples, Words, self.name)]

    def targets(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        """Return the tags of each sample [N], as tuples."""
        tags = np.empty(len(examples), dtype=object)
        for at, example in enumerate(examples_of_kind(examples, Words, self.name)):
            unknown = sorted({*example.tags} - {*self._tags})
            if unknown:
                known = ", ".join(self._tags[:_SHOWN]) + (", ..." if len(self._tags) > _SHOWN else "")
                raise TaskError(
                    f"sample {at + 1} has the tag {unknown[0]!r}, which the model does not have; expected one of its "
                    f"{len(self._tags)}: {known} (id2label in config.json)"
                )
            tags[at] = example.tags
        return tags

    def collect(self, result: object, batch: Batch) -> Sequence[torch.Tensor]:
        return per_token(first_output(result, self.output_name), batch)

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return the class number of each token [N x S], padded with -1."""
        return np.where(is_token(outputs), np.nan_to_num(outputs).argmax(axis=-1), -1)

    def counts(self, predictions: Predictions, examples: Sequence[Example]) -> npt.NDArray[np.float64]:
        """Return the correct, predicted and true entities of each sample [N x 3]."""
        entities = import_module("seqeval.metrics.sequence_labeling").get_entities
        targets = self.targets(examples)
        counts = []
        for classes, true, places in zip(
            predictions.decisions, targets, self._words.first_tokens(examples), strict=True
        ):
            predicted = [_OUTSIDE if place is None else self._tags[classes[place]] for place in places]
            found_entities, true_entities = {*entities(predicted)}, {*entities(list(true))}
            counts.append((len(found_entities & true_entities), len(found_entities), len(true_entities)))
        return np.array(counts, dtype=np.float64)

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return F1: 2 correct / (predicted + true); 0 without entities."""
        both = sums[..., 1] + sums[..., 2]
        return np.divide(2 * sums[..., 0], both, out=np.zeros_like(both), where=both > 0)

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the figures of a classifier, over all tokens."""
        own = is_token(float_predictions.outputs)
        return compare_classifiers(
            *(Predictions(model.outputs[own], model.decisions[own]) for model in (float_predictions, other))
        )


class _WordInputs(TextInputs):
    """Batches of texts in words; a plain text is split at spaces."""

    def encoded(self, texts: Sequence[Any], **options: Any) -> Any:
        words = [list(text) if isinstance(text, tuple) else text.split() for text in texts]
        return self.tokenizer(words, is_split_into_words=True, truncation=True, **options)

    def first_tokens(self, examples: Sequence[Any]) -> list[list[int | None]]:
        """Return the position of the first token of each word; None for truncated words."""
        self.require_fast()
        encoded = self.encoded([example.words for example in examples], max_length=self.max_length)
        positions: list[list[int | None]] = []
        for at, example in enumerate(examples):
            places: dict[int, int] = {}
            for place, word in enumerate(encoded.word_ids(at)):
                if word is not None:
                    places.setdefault(word, place)
            positions.append([places.get(word) for word in range(len(example.words))])
        return positions
