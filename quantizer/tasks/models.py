"""Loaders of models, tokenizers, image processors and feature extractors, and ``read_checkpoint``.

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
from quantizer.utils.structure import EXPORTED

_CAUSAL = "AutoModelForCausalLM"
_ENCODER = "AutoModel"
_CTC = "AutoModelForCTC"
_SPEECH = "AutoModelForSpeechSeq2Seq"

_NO_CODE = {"trust_remote_code": False}
"""Passed to every ``from_pretrained``; otherwise transformers asks on standard input whether to run code."""


def load_model(
    source: str, task: str, attention: str = "eager", texts: Mapping[str, str] | None = None
) -> torch.nn.Module:
    """Return the float32 model for a task, in eval mode.

    A sentence encoder gets the pooling of its folder as ``sentence_pooling``.

    Args:
        source: see ``resolve_source``.
        task: a registered task, which determines the class of the model.
        attention: "eager" or "sdpa".
        texts: the text of each label, for a task whose labels are in the configuration.

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
        config = loadable(load_config(source))
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
        # A text is read at once, without a cache.
        model.config.use_cache = False
    if entry.auto_class == _ENCODER and entry.reads == "text":
        model.sentence_pooling = read_pooling(source, asymmetric=entry.asymmetric)
    module = entry.module_of(model.eval(), tokenizer, texts).eval()
    if module is model:
        # Other modules return only what the task reads.
        setattr(model, EXPORTED, (entry.output_name, *entry.further_outputs))
    return module


def empty_model(source: str, task: str) -> Any:
    """Return a model for a task without values: its class, config and generation config."""
    read_checkpoint(source, task)
    package, where = transformers_package(), resolve_source(source)
    with explained(source, "config"), torch.device("meta"):
        model = getattr(package, tasks[task].auto_class).from_config(load_config(source), **_NO_CODE)
        model.generation_config = package.GenerationConfig.from_pretrained(where)
    return model


def load_config(source: str) -> Any:
    """Return the config of a model.

    Raises:
        TaskError: it is missing or cannot be read.
        MissingDependencyError: transformers is not installed.
    """
    where = resolve_source(source)
    with explained(source, "config"):
        return transformers_package().AutoConfig.from_pretrained(where, **_NO_CODE)


def require_labels(task: str, texts: Collection[str]) -> None:
    """Raise if the configured labels do not fit a task: missing, or configured although the model has its own.

    Raises:
        ConfigError: no task has this name.
        TaskError: the labels do not fit the task.
    """
    if tasks[task].names_labels and not texts:
        raise TaskError(f"task {task!r} needs labels: set two or more, in model.labels or --labels")
    if texts and not tasks[task].names_labels:
        raise TaskError(f"task {task!r} uses the labels of its model: remove the labels {', '.join(texts)}")


@dataclass(frozen=True)
class Checkpoint:
    """The description of a checkpoint, read without its weights.

    Attributes:
        architecture: the model class in the config; None if it is missing.
        task: the registered task of this class; None: there is none, or it cannot be derived.
        positions: the most tokens that the model accepts; None: there is no limit.
        labels: the class names in the config.
        vocabulary: the number of its tokens; None without a vocabulary.
    """

    architecture: str | None
    task: str | None
    positions: int | None
    labels: tuple[str, ...]
    vocabulary: int | None


def read_checkpoint(source: str, task: str | None = None) -> Checkpoint:
    """Return the description of a checkpoint from its config.

    Args:
        source: see ``resolve_source``.
        task: the registered task that the model is for; None: any.

    Raises:
        ConfigError: no task has this name.
        TaskError: there is no readable config, or the model does not fit the task or any task.
        MissingDependencyError: transformers is not installed.
    """
    where = resolve_source(source)
    transformers_package()
    require_reachable(where)
    with explained(source, "config"):
        fields, _ = transformers_package().PretrainedConfig.get_config_dict(where)
        _refuse_code(source, "config.json", fields)
        require_depth(fields)
        require_timm(fields)
        config = load_config(source)
        architecture = next(iter(config.architectures or ()), classifier_of(config))
        reads = read_by(config)
        labels, positions = class_names(config), getattr(config, "max_position_embeddings", None)
        if positions is not None and not isinstance(positions, int):
            raise ValueError(f"max_position_embeddings is {positions!r}, expected a whole number")
    if not reads:
        raise TaskError(
            f"model source {source!r}: {architecture or config.model_type} has no vocabulary, and transformers has no "
            "classifier of images or recordings of this type; expected a checkpoint for one of the "
            f"tasks {', '.join(tasks.names())}"
        )
    tower = task is not None and tasks[task].takes_text_tower and has_text_tower(config)
    if task is not None and tasks[task].reads not in reads and not tower:
        fitting = ", ".join(name for name in tasks.names() if tasks[name].reads in reads)
        raise TaskError(
            f"model source {source!r}: {architecture or config.model_type} has {' and '.join(reads)} inputs, and "
            f"task {task!r} needs {tasks[task].reads} inputs: choose another checkpoint, or one of the tasks {fitting}"
        )
    known = task_of(architecture, config.model_type, reads)
    if task is not None and tasks[task].labels == "example":
        require_one_label(config, task)
    vocabulary = getattr(config.text_config if tower else config, "vocab_size", None)
    return Checkpoint(architecture, known, _positions(config, source, tower=tower), labels, vocabulary)


def load_processor(source: str, task: str) -> Any:
    """Return the tokenizer of a model, or the image processor, feature extractor or speech processor that the task
    needs.

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
    return load_tokenizer(source, causal=tasks[task].auto_class == _CAUSAL)


def load_image_processor(source: str) -> Any:
    """Return the image processor of a model.

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
    """Return the feature extractor of a model, or a processor of class ``writer`` with its tokenizer."""
    where = resolve_source(source)
    package = transformers_package()
    with explained(source, "feature extractor"):
        extractor = package.AutoFeatureExtractor.from_pretrained(where, **_NO_CODE)
        require_extractor(extractor)
    if writer is None:
        return extractor
    # AutoProcessor would need further packages for a checkpoint with a language model.
    return getattr(package, writer)(feature_extractor=extractor, tokenizer=load_tokenizer(source))


def load_tokenizer(source: str, *, causal: bool = False) -> Any:
    """Return the tokenizer of a model.

    Args:
        source: see ``resolve_source``.
        causal: whether the model is causal, so that it does not see padding at the end: the end token may serve as
            padding.

    Raises:
        TaskError: there is none, or it has no vocabulary or no padding token.
        MissingDependencyError: transformers is not installed.
    """
    where = resolve_source(source)
    with explained(source, "tokenizer"):
        tokenizer = transformers_package().AutoTokenizer.from_pretrained(where, **_NO_CODE)
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        # Without its files, transformers makes an empty one.
        raise TaskError(
            f"model source {source!r}: it has no tokenizer, or one without a vocabulary; save the model's tokenizer "
            "into the same folder with save_pretrained()"
        )
    if causal:
        tokenizer.padding_side = "right"
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise TaskError(f"model source {source!r}: its tokenizer has no padding token, so texts cannot form a batch")
    return tokenizer


def _refuse_code(source: str, file: str, fields: dict[str, Any]) -> None:
    """Raise if a checkpoint needs its own Python code, which is never run."""
    if fields.get("auto_map"):
        raise TaskError(
            f"model source {source!r}: its {file} has an auto_map, so it needs its own Python code, which is never "
            f"run. "
            "Choose an architecture that transformers implements, or remove auto_map if transformers has its class, or "
            "load the model in Python and use Quantizer"
        )


def _positions(config: Any, source: str, *, tower: bool) -> int | None:
    """Return the most tokens of a model with this config, which is built to see where its positions begin."""
    if tower:
        return int(config.text_config.max_position_embeddings)
    if getattr(config, "max_position_embeddings", None) is None:
        return None
    with explained(source, "config"), torch.device("meta"):
        return longest_sequence(transformers_package().AutoModel.from_config(config), config)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Disable the progress bar of transformers in favor of the run's own."""
    logging: Any = transformers_package().utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
