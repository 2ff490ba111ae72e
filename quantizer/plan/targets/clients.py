"""Layouts of engines' graphs for other clients, with the class or pipeline of the client for each task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layout:
    """A layout that a backend writes: a folder that a client loads without this package.

    Attributes:
        file: the file of a graph in the folder; ``{graph}`` is the name of the graph, ``model`` if there is one alone,
            and ``{name}`` the name of the folder with the engine.
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

COMPRESSED_TENSORS = {
    "audio-classification": "AutoModelForAudioClassification",
    "automatic-speech-recognition": "AutoModelForCTC",
    "depth-estimation": "AutoModelForDepthEstimation",
    "embedding-classification": "AutoModel",
    "fill-mask": "AutoModelForMaskedLM",
    "image-classification": "AutoModelForImageClassification",
    "image-feature-extraction": "AutoModel",
    "object-detection": "AutoModelForObjectDetection",
    "question-answering": "AutoModelForQuestionAnswering",
    "retrieval": "AutoModel",
    "semantic-segmentation": "AutoModelForSemanticSegmentation",
    "sentence-similarity": "AutoModel",
    "sequence-classification": "AutoModelForSequenceClassification",
    "text-generation": "AutoModelForCausalLM",
    "token-classification": "AutoModelForTokenClassification",
}
"""Classes of transformers, which loads this format with the library compressed-tensors."""

OF_ANY_BACKEND = {"compressed-tensors": Layout("model.safetensors", COMPRESSED_TENSORS)}
"""Layouts without a graph, which hold the weights of the quantized model, whatever the backend."""


ULTRALYTICS = {"module": "YOLO"}
"""The class of ultralytics, for a module that is not a checkpoint."""

OF_MODULES = ("ultralytics",)
"""Layouts for modules that are models of the client's library; checkpoints do not have them."""


@dataclass(frozen=True, kw_only=True)
class GraphClient:
    """Names with which clients load the graphs of one kind of file.

    Attributes:
        library: the name of the runtime on the hub.
        package: the package of the runtime.
        optimum: the package of Optimum for it.
        module: its module below ``optimum``.
        backend: its name in sentence-transformers.
        config: the value of ``ov_config`` with which Optimum computes in float32; empty: it has none.
    """

    library: str
    package: str
    optimum: str
    module: str
    backend: str
    config: str = ""


GRAPH_CLIENTS = {
    ".xml": GraphClient(
        library="openvino",
        package="openvino",
        optimum="optimum-intel",
        module="intel",
        backend="openvino",
        config='{"INFERENCE_PRECISION_HINT": "f32"}',
    ),
    ".onnx": GraphClient(
        library="onnx", package="onnxruntime", optimum="optimum-onnx", module="onnxruntime", backend="onnx"
    ),
}
"""Clients by the suffix of the graph."""


def optimum_classes(start: str, **more: str) -> dict[str, str]:
    """Return the classes of Optimum that begin with ``start``, and ``more`` of some libraries."""
    return {task: f"{start}ModelFor{end}" for task, end in {**OPTIMUM, **more}.items()}
