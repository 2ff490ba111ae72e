"""The tasks ``retrieval`` and ``image-feature-extraction``: rankings by the similarity of embeddings.

The score is the mean NDCG@10 of the queries, with recall@100 beside it. Both are defined as in trec_eval: the gain of a
document is its judgement, and documents without a judgement have none. Only the queries are resampled for intervals.

Shapes: N queries, M documents, E width of an embedding, K documents of a ranking.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.datasets.examples import Documents, Example, Image, Query
from quantizer.tasks.image_inputs import ImageInputs
from quantizer.tasks.inputs import Batch, Inputs, Sample
from quantizer.tasks.metrics import bootstrap_interval, mean_cosine, sqnr_db
from quantizer.tasks.sentence_similarity import SentenceEmbedding, of_length_one
from quantizer.tasks.task import Predictions, Progress, Run, Task, examples_of_kind, tasks

NDCG_DEPTH, RECALL_DEPTH = 10, 100
"""The documents of a ranking that NDCG and recall take into account."""

_SCORES_AT_ONCE = 1 << 22
"""The most similarities that are held at once: 32 MiB."""


def nearest(
    queries_NE: npt.NDArray[np.float64],
    documents_ME: npt.NDArray[np.float64],
    *,
    left_out: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.int64]:
    """Return the indices of the documents with the largest dot products [N x K], the largest first; ties by index.

    Args:
        queries_NE: the embeddings of the queries.
        documents_ME: the embeddings of the documents.
        left_out: the index of a document that each query must not find, such as itself [N].
    """
    rows = max(1, _SCORES_AT_ONCE // len(documents_ME))
    rankings = []
    for start in range(0, len(queries_NE), rows):
        scores = queries_NE[start : start + rows] @ documents_ME.T
        if left_out is not None:
            scores[np.arange(len(scores)), left_out[start : start + rows]] = -np.inf
        rankings.append(np.argsort(-scores, axis=1, kind="stable")[:, :RECALL_DEPTH])
    return np.concatenate(rankings)


def ranking_scores(ranking: npt.NDArray[np.int64], gains: Mapping[int, float]) -> tuple[float, float]:
    """Return NDCG@10 and recall@100 of one ranking [K]; both are 0 without a relevant document.

    Args:
        ranking: the indices of documents, the best first.
        gains: the gain of each relevant document, above 0, by its index.
    """
    found = np.array([gains.get(int(document), 0.0) for document in ranking[:RECALL_DEPTH]])
    best = np.sort(np.fromiter(gains.values(), dtype=np.float64))[::-1]
    ideal = _discounted(best)
    return (_discounted(found) / ideal, float((found > 0).sum() / len(gains))) if ideal else (0.0, 0.0)


def _discounted(gains: npt.NDArray[np.float64]) -> float:
    """Return the sum of the first gains, each divided by the logarithm of its place."""
    first = gains[:NDCG_DEPTH]
    return float((first / np.log2(np.arange(len(first)) + 2)).sum())


class RankingTask(Task):
    """A task whose samples are queries, scored by their rankings; decisions are NDCG@10 and recall@100 [N x 2]."""

    metric_name = "ndcg_at_10"

    @abstractmethod
    def rank(
        self, outputs: npt.NDArray[np.float32], examples: Sequence[Example]
    ) -> tuple[npt.NDArray[np.int64], Iterable[Mapping[int, float]]]:
        """Return the ranking of each query [N x K], and the gains of its relevant documents by index."""

    def predict(self, run: Run, examples: Sequence[Example], progress: Progress | None = None) -> Predictions:
        """Return the embeddings, and the NDCG@10 and recall@100 of each query; see ``Task.predict``."""
        outputs = self.outputs(run, examples, progress)
        pairs = zip(*self.rank(outputs, examples), strict=True)
        return Predictions(outputs, np.array([ranking_scores(ranking, gains) for ranking, gains in pairs]))

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Raise ``TaskError``: a ranking is scored by the judgements of its query, which embeddings do not contain."""
        raise TaskError(f"task {self.name!r} scores embeddings with their samples: call predict()")

    def targets(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        """Return the best scores of each query [N x 2], which are 1."""
        return np.ones((len(examples), 2))

    def metric(self, decisions: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the mean NDCG@10 of scores [N x 2], or of each resample of [R x N x 2]."""
        return np.asarray(decisions[..., 0].mean(axis=-1))

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return recall@100, its difference from float with a 95% interval, and the distance of the embeddings."""
        reference, recall = (predictions.decisions[:, 1] for predictions in (float_predictions, other))
        low, high = bootstrap_interval(_mean, reference, recall, recall)
        return {
            "recall_at_100": float(recall.mean()),
            "recall_at_100_difference": float(recall.mean() - reference.mean()),
            "recall_at_100_difference_low": low,
            "recall_at_100_difference_high": high,
            "mean_cosine": mean_cosine(float_predictions.outputs, other.outputs),
            "sqnr_db": sqnr_db(float_predictions.outputs, other.outputs),
        }


def _mean(values: npt.NDArray[Any], _: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.asarray(values.mean(axis=-1))


@tasks.add("retrieval")
class Retrieval(RankingTask, SentenceEmbedding):
    """Queries and all documents of their collection to embeddings [N + M x E], to rankings, scored by NDCG@10.

    For calibration, a sample is a query with its most relevant document. Both get their prompts of the model's folder.
    """

    name = "retrieval"
    asymmetric: ClassVar[bool] = True

    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        queries = examples_of_kind(examples, Query, self.name)
        best = [query.documents.texts[max(query.gains, key=lambda gain: gain[1])[0]] for query in queries]
        pairs = zip(self._prompted(queries), self._documents(best), strict=True)
        return [text for pair in pairs for text in pair]

    def targets(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        self._collection(examples)
        return super().targets(examples)

    def outputs(
        self, run: Run, examples: Sequence[Example], progress: Progress | None = None
    ) -> npt.NDArray[np.float32]:
        """Return the embeddings of the queries, then of all documents [N + M x E]; see ``predict``."""
        documents = self._collection(examples)
        queries = self._prompted(examples_of_kind(examples, Query, self.name))
        return super().outputs(run, [*queries, *self._documents(documents.texts)], progress)

    def rank(
        self, outputs: npt.NDArray[np.float32], examples: Sequence[Example]
    ) -> tuple[npt.NDArray[np.int64], Iterable[Mapping[int, float]]]:
        queries = examples_of_kind(examples, Query, self.name)
        embeddings = self.compared_embeddings(outputs)
        return nearest(embeddings[: len(queries)], embeddings[len(queries) :]), [dict(query.gains) for query in queries]

    def _collection(self, examples: Sequence[Example]) -> Documents:
        """Return the documents that all queries share."""
        queries = examples_of_kind(examples, Query, self.name)
        if not queries:
            raise TaskError(f"task {self.name!r} was given no samples, expected at least one")
        documents = queries[0].documents
        if any(query.documents != documents for query in queries):
            raise TaskError(f"task {self.name!r}: the queries have several collections; score each one alone")
        return documents

    def _prompted(self, queries: Sequence[Query]) -> list[str]:
        return [f"{self._pooling.query_prompt}{query.text}" for query in queries]

    def _documents(self, texts: Sequence[str]) -> list[str]:
        return [f"{self._pooling.document_prompt}{text}" for text in texts]


_CLASS_TOKENS = ("cls_token", "class_embedding")
"""The names of the parameter of the first token in the models of transformers."""


@tasks.add("image-feature-extraction")
class ImageFeatureExtraction(RankingTask):
    """Images to embeddings [N x E], scored by NDCG@10: each image should find the others with its label.

    The embedding is the class token, or the mean over all tokens or pixels of a model without one. An image that is
    alone with its label can be found, but does not count as a query. Images without labels can be calibrated and
    compared, but not scored.
    """

    name = "image-feature-extraction"
    reads = "image"
    auto_class = "AutoModel"
    pipeline_class = "ImageFeatureExtractionPipeline"
    output_name = "last_hidden_state"

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        names = {path.rpartition(".")[2] for path, _ in model.named_parameters()}
        self._has_class_token = not names.isdisjoint(_CLASS_TOKENS)
        return ImageInputs(model, processor)

    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        return [example.path for example in examples_of_kind(examples, Image, self.name)]

    def represent(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        if output.dim() == 4:
            return output.mean(dim=(2, 3))
        if output.dim() != 3:
            raise TaskError(
                f"the model's output has the shape {tuple(output.shape)}, expected [batch, tokens, width] or [batch, "
                "channels, height, width]: is this an image encoder?"
            )
        return output[:, 0] if self._has_class_token else output.mean(dim=1)

    def targets(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        """Return the best scores of each image that shares its label [N x 2], which are 1."""
        return np.ones((len(self._queries(examples)), 2))

    def rank(
        self, outputs: npt.NDArray[np.float32], examples: Sequence[Example]
    ) -> tuple[npt.NDArray[np.int64], Iterable[Mapping[int, float]]]:
        queries, embeddings = self._queries(examples), of_length_one(outputs)
        labels = _labels(examples)
        same = {label: np.flatnonzero(labels == label).tolist() for label in set(labels)}
        # One at a time: many images of few labels would need much memory together.
        gains = (dict.fromkeys((other for other in same[labels[image]] if other != image), 1.0) for image in queries)
        return nearest(embeddings[queries], embeddings, left_out=queries)[:, : len(labels) - 1], gains

    def _queries(self, examples: Sequence[Example]) -> npt.NDArray[np.int64]:
        """Return the indices of the images that share their label."""
        labels = _labels(examples)
        counts = Counter(labels)
        queries = np.flatnonzero([counts[label] > 1 for label in labels])
        if not len(queries):
            raise TaskError(
                f"task {self.name!r}: no two of the {len(labels)} images have the same label, so no image can find "
                "another one; expected several images of each label"
            )
        return queries


def _labels(examples: Sequence[Example]) -> npt.NDArray[Any]:
    """Return the label of each image."""
    return np.array([str(image.label) for image in examples_of_kind(examples, Image, ImageFeatureExtraction.name)])
