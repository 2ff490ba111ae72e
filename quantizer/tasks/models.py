"""Models, tokenizers and image processors, loaded from the source that a run names.

A source is a local folder, a folder inside an installed package, or a hub name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from quantizer.errors import TaskError
from quantizer.tasks.audio import require_extractor
from quantizer.tasks.checkpoints import (
    classifier_of,
    explained,
    loadable,
    read_by,
    read_pooling,
    require_depth,
    require_reachable,
    require_timm,
    resolve_source,
    task_of,
    transformers_package,
)
from quantizer.tasks.classification import class_names, require_one_label
from quantizer.tasks.image_inputs import require_pillow
from quantizer.tasks.inputs import longest_sequence
from quantizer.tasks.task import tasks
from quantizer.tasks.zero_shot import has_text_tower

_CAUSAL = "AutoModelForCausalLM"
_ENCODER = "AutoModel"
_CTC = "AutoModelForCTC"
_SPEECH = "AutoModelForSpeechSeq2Seq"

_NO_CODE = {"trust_remote_code": False}
"""For every ``from_pretrained``: without it transformers asks on standard input whether to run the folder's code."""


def load_model(
    source: str, task: str, attention: str = "eager", texts: Mapping[str, str] | None = None
) -> torch.nn.Module:
    """Return the float32 model for a task, in eval mode.

    An encoder of sentences has the pooling that its folder says as ``sentence_pooling``.

    Args:
        source: see ``resolve_source``.
        task: a registered task, which decides whether an encoder or a classifier is loaded.
        attention: "eager" or "sdpa".
        texts: the text of each label, for a task that takes its labels from the request.

    Raises:
        ConfigError: no task has this name.
        TaskError: the model cannot be loaded, does not fit the task, or lacks weights that the task needs.
        MissingDependencyError: transformers is not installed.
    """
    entry = tasks[task]
    require_labels(task, texts or {})
    where = resolve_source(source)
    read_checkpoint(source, task)
    tokenizer = load_tokenizer(source) if entry.names_labels else None
    auto_class = getattr(transformers_package(), entry.auto_class)
    with explained(source, "model"), _no_progress_bar():
        config = loadable(transformers_package().AutoConfig.from_pretrained(where, **_NO_CODE))
        options = {"dtype": torch.float32, "attn_implementation": attention, **_NO_CODE}
        model, loaded = auto_class.from_pretrained(where, config=config, output_loading_info=True, **options)
    # Tasks of encoders read the last hidden state, so the weights of a pooler may be missing.
    missing = sorted(key for key in loaded["missing_keys"] if "pooler" not in key)
    if missing:
        raise TaskError(
            f"model source {source!r}: the checkpoint has no weights for {', '.join(missing[:4])}"
            f"{' and others' if len(missing) > 4 else ''}, which task {task!r} needs as {type(model).__name__}: "
            f"name a checkpoint that was fine-tuned for it, or another task"
        )
    if entry.auto_class == _CAUSAL:
        # A text is read at once: keys and values of former tokens are neither given nor wanted.
        model.config.use_cache = False
    if entry.auto_class == _ENCODER:
        model.sentence_pooling = read_pooling(source)
    return entry.module_of(model.eval(), tokenizer, texts).eval()


def empty_model(source: str, task: str) -> Any:
    """Return a model for a task without values, for its class, its config and how it generates."""
    read_checkpoint(source, task)
    package, where = transformers_package(), resolve_source(source)
    with explained(source, "config"), torch.device("meta"):
        model = getattr(package, tasks[task].auto_class).from_config(
            package.AutoConfig.from_pretrained(where, **_NO_CODE), **_NO_CODE
        )
        model.generation_config = package.GenerationConfig.from_pretrained(where)
    return model


def require_labels(task: str, texts: Collection[str]) -> None:
    """Raise if a task takes its labels from the request and there are none, or takes none and there are some.

    Raises:
        ConfigError: no task has this name.
        TaskError: the labels do not fit the task.
    """
    if tasks[task].names_labels and not texts:
        raise TaskError(
            f"task {task!r} chooses among labels, and none were given: name two or more, in model.labels or --labels"
        )
    if texts and not tasks[task].names_labels:
        raise TaskError(f"task {task!r} has the labels of its model, and {', '.join(texts)} were given: leave them out")


@dataclass(frozen=True)
class Checkpoint:
    """The description of a checkpoint, read without its weights.

    Attributes:
        architecture: the model class that it was saved from; None: the config does not name it.
        task: the registered task of this class; None: there is none, or it cannot be derived.
        positions: the longest sequence that the model accepts, in tokens; None: it has no limit of its own.
        labels: the class names in the config.
        vocabulary: the number of its tokens; None: it has none.
    """

    architecture: str | None
    task: str | None
    positions: int | None
    labels: tuple[str, ...]
    vocabulary: int | None


def read_checkpoint(source: str, task: str | None = None) -> Checkpoint:
    """Return what the config of a model says.

    Args:
        source: see ``resolve_source``.
        task: the registered task that the model is for; None: any.

    Raises:
        ConfigError: no task has this name.
        TaskError: there is no config that can be read, or the model does not fit the task or any task.
        MissingDependencyError: transformers is not installed.
    """
    where = resolve_source(source)
    transformers_package()
    require_reachable(where)
    with explained(source, "config"):
        told, _ = transformers_package().PretrainedConfig.get_config_dict(where)
        _refuse_code(source, "config.json", told)
        require_depth(told)
        require_timm(told)
        config: Any = transformers_package().AutoConfig.from_pretrained(where, **_NO_CODE)
        architecture = next(iter(config.architectures or ()), classifier_of(config))
        reads = read_by(config)
        labels, positions = class_names(config), getattr(config, "max_position_embeddings", None)
        if positions is not None and not isinstance(positions, int):
            raise ValueError(f"max_position_embeddings is {positions!r}, expected a whole number")
    if not reads:
        raise TaskError(
            f"model source {source!r}: {architecture or config.model_type} has no vocabulary, so it reads no text, "
            "and transformers has no classifier of images or recordings of its kind; there is nothing else that the "
            f"tasks {', '.join(tasks.names())} read"
        )
    tower = task is not None and tasks[task].takes_text_tower and has_text_tower(config)
    if task is not None and tasks[task].reads not in reads and not tower:
        fitting = ", ".join(name for name in tasks.names() if tasks[name].reads in reads)
        raise TaskError(
            f"model source {source!r}: {architecture or config.model_type} reads {' and '.join(reads)}, and task "
            f"{task!r} is for {tasks[task].reads}: choose another checkpoint, or one of the tasks {fitting}"
        )
    known = task_of(architecture, config.model_type, reads)
    if task is not None and tasks[task].labels == "row":
        require_one_label(config, task)
    vocabulary = getattr(config.text_config if tower else config, "vocab_size", None)
    return Checkpoint(architecture, known, _positions(config, source, tower=tower), labels, vocabulary)


def load_processor(source: str, task: str) -> Any:
    """Return the tokenizer of a model, or its image processor if the task reads images.

    A task of recordings has a feature extractor, and one of speech a processor that has a tokenizer besides.

    Raises:
        ConfigError: no task has this name.
        TaskError: there is none, or it does not fit.
        MissingDependencyError: transformers or Pillow is not installed.
    """
    if tasks[task].reads == "image":
        return load_image_processor(source)
    if tasks[task].reads == "audio":
        writers = {_CTC: "Wav2Vec2Processor", _SPEECH: "WhisperProcessor"}
        return load_audio_processor(source, writers.get(tasks[task].auto_class))
    return load_tokenizer(source, goes_on=tasks[task].auto_class == _CAUSAL)


def load_image_processor(source: str) -> Any:
    """Return the image processor that comes with a model.

    Raises:
        TaskError: there is none.
        MissingDependencyError: transformers or Pillow is not installed.
    """
    where = resolve_source(source)
    require_pillow()
    with explained(source, "image processor"):
        # Pillow gives calibration and a server the same pixels, whether torchvision is installed there or not.
        return transformers_package().AutoImageProcessor.from_pretrained(where, backend="pil", **_NO_CODE)


def load_audio_processor(source: str, writer: str | None) -> Any:
    """Return the feature extractor that comes with a model."""
    where = resolve_source(source)
    package = transformers_package()
    with explained(source, "feature extractor"):
        extractor = package.AutoFeatureExtractor.from_pretrained(where, **_NO_CODE)
        require_extractor(extractor)
    if writer is None:
        return extractor
    # Not by AutoProcessor: where a language model comes with it, that needs packages of its own.
    return getattr(package, writer)(feature_extractor=extractor, tokenizer=load_tokenizer(source))


def load_tokenizer(source: str, *, goes_on: bool = False) -> Any:
    """Return the tokenizer that comes with a model.

    Args:
        source: see ``resolve_source``.
        goes_on: whether the model reads a text from left to right, so that what fills a row after its end is not seen:
            the end token does where there is no padding token.

    Raises:
        TaskError: there is none, or it has no padding token.
        MissingDependencyError: transformers is not installed.
    """
    where = resolve_source(source)
    with explained(source, "tokenizer"):
        tokenizer = transformers_package().AutoTokenizer.from_pretrained(where, **_NO_CODE)
    if goes_on:
        tokenizer.padding_side = "right"
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise TaskError(f"model source {source!r}: its tokenizer has no padding token, so texts cannot form a batch")
    return tokenizer


def _refuse_code(source: str, file: str, told: dict[str, Any]) -> None:
    """Raise if a checkpoint needs Python code that comes with it, which could do anything."""
    if told.get("auto_map"):
        raise TaskError(
            f"model source {source!r}: its {file} has an auto_map, so it is read by Python code that comes with it, "
            "which is never run here; name a checkpoint of an architecture that transformers has itself, or remove "
            "auto_map where its own class reads this one, or load the model in Python and use Quantizer on it"
        )


def _positions(config: Any, source: str, *, tower: bool) -> int | None:
    """Return the longest sequence of a model of this config, which is built to see where its positions begin."""
    if tower:
        return int(config.text_config.max_position_embeddings)
    if getattr(config, "max_position_embeddings", None) is None:
        return None
    with explained(source, "config"), torch.device("meta"):
        return longest_sequence(transformers_package().AutoModel.from_config(config), config)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hide the progress bar of transformers over weights, which would disturb that of a run."""
    logging: Any = transformers_package().utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
