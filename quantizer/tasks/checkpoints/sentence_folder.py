"""Folders that sentence-transformers saves: how an encoder's outputs become the embedding of a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantizer.common.paths import regular_file
from quantizer.common.plain_values import json_values
from quantizer.errors import TaskError
from quantizer.tasks.checkpoints.sources import resolve_source, transformers_package
from quantizer.tasks.outputs import MEAN, MODES, SIMILARITIES, SentencePooling

_OTHERWISE = "load such a model in Python, and give it with its batches to quantize_model"
_KINDS = ("Transformer", "Pooling", "Normalize")
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of older files, and what newer ones call it, in the order in which several are joined."""


def read_pooling(source: str) -> SentencePooling:
    """Return the pooling that a model's folder says; without modules.json the mean, scaled to length 1."""
    modules = _read(source, "modules.json")
    if modules is None:
        return MEAN
    try:
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        paths = [str(module["path"]) for module in modules]
    except (KeyError, TypeError) as error:
        raise TaskError(
            f"model source {source!r}: its modules.json is no list of objects with type and path ({error}): save the "
            "model again with sentence-transformers"
        ) from error
    if tuple(kinds) not in (_KINDS, _KINDS[:2]) or paths[0]:
        raise TaskError(
            f"model source {source!r}: its modules.json has {', '.join(kinds)}, expected Transformer in the folder "
            f"itself, Pooling, and perhaps Normalize; {_OTHERWISE}"
        )
    similarity, prompt = _spoken(source)
    modes = _modes(source, _read(source, f"{paths[1]}/config.json"), with_prompt=bool(prompt))
    sentence = _read(source, "sentence_bert_config.json") or {}
    if isinstance(sentence, Mapping) and sentence.get("do_lower_case"):
        raise TaskError(
            f"model source {source!r}: its sentence_bert_config.json has do_lower_case, which the tokenizer does not "
            f"know of: set that in tokenizer_config.json, or {_OTHERWISE}"
        )
    return SentencePooling(modes, normalize=len(kinds) == len(_KINDS), similarity=similarity, prompt=prompt)


def _modes(source: str, told: Any, *, with_prompt: bool) -> tuple[str, ...]:
    """Return the modes in the config of the pooling."""
    told = told if isinstance(told, Mapping) else {}
    if "pooling_mode" in told:
        named = told["pooling_mode"]
        modes = (named,) if isinstance(named, str) else tuple(named or ())
    else:
        modes = tuple(mode for key, mode in _FLAGS.items() if told.get(key))
    if not modes or not set(modes) <= set(MODES):
        raise TaskError(
            f"model source {source!r}: the config.json of its pooling says {modes or 'no mode'}, expected some of "
            f"{', '.join(MODES)}: save the model again with sentence-transformers"
        )
    if with_prompt and told.get("include_prompt", True) is False:
        raise TaskError(
            f"model source {source!r}: its pooling leaves out the tokens of a prompt (include_prompt), which is not "
            f"built in: {_OTHERWISE}"
        )
    return modes


def _spoken(source: str) -> tuple[str, str]:
    """Return how similar embeddings are told, and what stands before each text."""
    told = _read(source, "config_sentence_transformers.json")
    told = told if isinstance(told, Mapping) else {}
    similarity = told.get("similarity_fn_name") or SIMILARITIES[0]
    if similarity not in SIMILARITIES:
        raise TaskError(
            f"model source {source!r}: its similarity is {similarity!r}, expected {' or '.join(SIMILARITIES)}; "
            f"{_OTHERWISE}"
        )
    name = told.get("default_prompt_name")
    prompts = told.get("prompts") or {}
    if name is None:
        return similarity, ""
    if not isinstance(prompts, Mapping) or not isinstance(prompts.get(name), str):
        raise TaskError(
            f"model source {source!r}: its default_prompt_name is {name!r}, and prompts has no text of this name: "
            "mend config_sentence_transformers.json"
        )
    return similarity, prompts[name]


def _read(source: str, name: str) -> Any:
    """Return what a file of JSON in a model's folder holds; None if there is no such file."""
    cached: Any = transformers_package().utils.cached_file
    found = cached(
        str(resolve_source(source)),
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if found is None:
        return None
    try:
        return json_values(regular_file(Path(found)).read_bytes())
    except (OSError, ValueError) as error:
        raise TaskError(f"model source {source!r}: its {name} cannot be read ({error}): mend it") from error
