"""The task ``sentence-similarity``: cosines of sentence embeddings, scored by rank correlation with human scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from quantizer.tasks.datasets.examples import Example, Pair
from quantizer.tasks.inputs import Batch, Inputs, Sample
from quantizer.tasks.metrics import mean_cosine, spearman, sqnr_db
from quantizer.tasks.outputs import MEAN, first_output
from quantizer.tasks.task import Predictions, Task, examples_of_kind, tasks
from quantizer.tasks.zero_shot import EMBEDDING, TextTower, has_text_tower


class SentenceEmbedding(Task):
    """A task on embeddings of texts, compared by their cosine or dot product.

    Pooling, normalization, prompts and similarity are those of the model's folder. For models of images and texts, the
    text tower computes the embeddings.
    """

    auto_class = "AutoModel"
    pipeline_class = "FeatureExtractionPipeline"
    # In a larger batch, the pipeline would return vectors of padding too.
    pipeline_options: ClassVar[Mapping[str, Any]] = {"truncation": True, "batch_size": 1}
    output_name = "last_hidden_state"
    takes_text_tower = True

    @classmethod
    def module_of(
        cls, model: torch.nn.Module, tokenizer: Any = None, texts: Mapping[str, str] | None = None
    ) -> torch.nn.Module:
        return TextTower(model) if has_text_tower(getattr(model, "config", None)) else model

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        self._pooling = getattr(model, "sentence_pooling", MEAN)
        self._tower = isinstance(model, TextTower)
        return super().make_inputs(model, processor, max_length, min_length)

    def collect(self, result: object, batch: Batch) -> Sequence[torch.Tensor]:
        return list(first_output(result, EMBEDDING)) if self._tower else super().collect(result, batch)

    def represent(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self._pooling.embeddings(output, batch["attention_mask"])

    def compared_embeddings(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Return embeddings whose dot products are their similarities."""
        if self._pooling.similarity == "cosine" and not self._pooling.normalize:
            return of_length_one(outputs)
        return outputs.astype(np.float64)


def of_length_one(embeddings: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return embeddings [... x D] scaled to length 1; zero vectors stay zero."""
    values = embeddings.astype(np.float64)
    lengths: npt.NDArray[np.float64] = np.linalg.norm(values, axis=-1, keepdims=True)
    return np.asarray(values / np.maximum(lengths, np.finfo(np.float64).tiny))


@tasks.add("sentence-similarity")
class SentenceSimilarity(SentenceEmbedding):
    """Pairs to embeddings [2N x D], to cosines [N], scored by Spearman's correlation with the pairs' scores."""

    name = "sentence-similarity"
    metric_name = "spearman"
    packages = ("scipy",)

    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        return [
            f"{self._pooling.prompt}{text}"
            for example in examples_of_kind(examples, Pair, self.name)
            for text in (example.first, example.second)
        ]

    def targets(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        return np.array([example.score for example in examples_of_kind(examples, Pair, self.name)], dtype=np.float64)

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        embeddings = self.compared_embeddings(outputs)
        return np.asarray((embeddings[0::2] * embeddings[1::2]).sum(axis=-1))

    def metric(self, decisions: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return spearman(decisions, targets)

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the mean cosine of the embeddings to the float ones, and their SQNR in dB."""
        return {
            "mean_cosine": mean_cosine(float_predictions.outputs, other.outputs),
            "sqnr_db": sqnr_db(float_predictions.outputs, other.outputs),
        }
