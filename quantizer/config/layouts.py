"""The layouts that ``deliver`` writes for other clients, with the backends and tasks that each one exists for.

A layout is a folder that a client loads without this package. ``pipeline/layouts.py`` writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quantizer.plan.targets import AUTO, profile, profiles
from quantizer.utils.registry import TASKS_IN_PARTS

if TYPE_CHECKING:
    from quantizer.config.quantizer_section import QuantizerConfig
    from quantizer.config.schema import RunConfig


@dataclass(frozen=True)
class Client:
    """A layout for one library of backends.

    Attributes:
        file: the graph in the layout's folder.
        classes: the class or pipeline of the client by task; empty if it takes the graph of any task.
    """

    file: str
    classes: Mapping[str, str] = field(default_factory=dict)


_SENTENCES = {
    "embedding-classification": "SentenceTransformer",
    "sentence-similarity": "SentenceTransformer",
    "sequence-classification": "CrossEncoder",
}
_OPTIMUM = {
    "audio-classification": "AudioClassification",
    "automatic-speech-recognition": "CTC",
    "embedding-classification": "FeatureExtraction",
    "fill-mask": "MaskedLM",
    "image-classification": "ImageClassification",
    "question-answering": "QuestionAnswering",
    "sentence-similarity": "FeatureExtraction",
    "sequence-classification": "SequenceClassification",
    "token-classification": "TokenClassification",
}
_OPTIMUM_ONNX = {**_OPTIMUM, "multiple-choice": "MultipleChoice", "semantic-segmentation": "SemanticSegmentation"}
_TRANSFORMERS_JS = {
    "embedding-classification": "feature-extraction",
    "fill-mask": "fill-mask",
    "image-classification": "image-classification",
    "question-answering": "question-answering",
    "sentence-similarity": "feature-extraction",
    "sequence-classification": "text-classification",
    "token-classification": "token-classification",
}

LAYOUTS: Mapping[str, Mapping[str, Client]] = {
    "openvino": {"openvino": Client("model.xml")},
    "onnx": {"onnxruntime": Client("model.onnx")},
    "sentence-transformers": {
        "openvino": Client("openvino/openvino_model.xml", _SENTENCES),
        "onnxruntime": Client("onnx/model.onnx", _SENTENCES),
    },
    "optimum": {
        "openvino": Client("openvino_model.xml", {task: f"OVModelFor{name}" for task, name in _OPTIMUM.items()}),
        "onnxruntime": Client("model.onnx", {task: f"ORTModelFor{name}" for task, name in _OPTIMUM_ONNX.items()}),
    },
    "transformers-js": {"onnxruntime": Client("onnx/model_quantized.onnx", _TRANSFORMERS_JS)},
}
"""What each layout holds, by library of the backend."""

STATIC = frozenset({"transformers-js"})
"""Layouts without ranges at run time: in the browser, DynamicQuantizeLinear runs far slower than static Q/DQ."""


def backends_of(layouts: Sequence[str]) -> list[str]:
    """Return the backends that write all of these layouts, without variants for certain CPUs."""
    libraries = [set(LAYOUTS[name]) for name in layouts]
    return [name for name in profiles if name != AUTO and all(name in some for some in libraries)]


def client(layout: str, backend: str) -> Client | None:
    """Return what a layout holds for a backend; None if it does not exist for it."""
    return LAYOUTS[layout].get(str(profile(backend).library))


def layout_problems(config: RunConfig) -> Iterator[str]:
    """Yield the problems of the layouts in ``deliver`` with the backend, the task and the ranges of a run."""
    for layout in config.deliver:
        if layout in LAYOUTS and config.model.task is not None:
            yield from _problems(layout, config.model.task, config.quantizer)


def _problems(layout: str, task: str, settings: QuantizerConfig) -> Iterator[str]:
    key = f"deliver: {layout!r}"
    if task in TASKS_IN_PARTS:
        yield f"{key} holds one graph, but a model of task {task!r} has several; remove it"
        return
    if settings.backend == AUTO and not settings.candidates:
        written = ", ".join(backends_of([layout]))
        yield f"{key} does not exist for every backend of {AUTO!r}; expected quantizer.backend: [{written}]"
        return
    for backend in settings.candidates or (settings.backend,):
        known = client(layout, backend)
        if known is None:
            yield f"{key} does not exist for backend {backend}; expected {' or '.join(backends_of([layout]))}"
        elif known.classes and task not in known.classes:
            yield (
                f"{key} has no class for task {task!r} with backend {backend}; remove it, or use one of the tasks "
                f"{', '.join(known.classes)}"
            )
    ranges = (settings.activations.ranges, *(rule.activations for rule in settings.formats))
    if layout in STATIC and "dynamic" in ranges:
        yield f"{key} needs ranges from calibration, but activations are 'dynamic'; remove one of the two"
