"""Layouts of engines' graphs for other clients, with the class or pipeline of the client for each task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layout:
    """A layout that a backend writes: a folder that a client loads without this package.

    Attributes:
        file: the file of a graph in the folder; ``{graph}`` is the name of the graph, ``model`` if there is one alone.
        classes: the class or pipeline of the client by task; empty if it takes the graph of any task.
        unmasked: the tasks whose class passes no attention mask.
        dimensions: other names of the dimensions of a graph with a cache, from which the client makes an empty one.
        static: whether ranges at run time are left out: in a browser, DynamicQuantizeLinear is far slower.
    """

    file: str
    classes: Mapping[str, str] = field(default_factory=dict)
    unmasked: frozenset[str] = frozenset()
    dimensions: Mapping[str, str] = field(default_factory=dict)
    static: bool = False


SENTENCES = {
    "embedding-classification": "SentenceTransformer",
    "retrieval": "SentenceTransformer",
    "sentence-similarity": "SentenceTransformer",
    "sequence-classification": "CrossEncoder",
}
"""Classes of sentence-transformers."""

OPTIMUM = {
    "audio-classification": "AudioClassification",
    "automatic-speech-recognition": "CTC",
    "embedding-classification": "FeatureExtraction",
    "fill-mask": "MaskedLM",
    "image-classification": "ImageClassification",
    "question-answering": "QuestionAnswering",
    "retrieval": "FeatureExtraction",
    "sentence-similarity": "FeatureExtraction",
    "sequence-classification": "SequenceClassification",
    "speech-to-text": "SpeechSeq2Seq",
    "text-generation": "CausalLM",
    "text-generation-with-past": "CausalLM",
    "text-to-text": "Seq2SeqLM",
    "token-classification": "TokenClassification",
}
"""Ends of the classes that Optimum has for all of its libraries."""

PIPELINES = {
    "embedding-classification": "feature-extraction",
    "fill-mask": "fill-mask",
    "image-classification": "image-classification",
    "question-answering": "question-answering",
    "retrieval": "feature-extraction",
    "sentence-similarity": "feature-extraction",
    "sequence-classification": "text-classification",
    "text-generation-with-past": "text-generation",
    "token-classification": "token-classification",
}
"""Pipelines of transformers.js."""


def optimum_classes(start: str, **more: str) -> dict[str, str]:
    """Return the classes of Optimum that begin with ``start``, and ``more`` of some libraries."""
    return {task: f"{start}ModelFor{end}" for task, end in {**OPTIMUM, **more}.items()}
