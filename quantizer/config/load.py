"""Conversion of a YAML file, a mapping or keywords to a frozen configuration, and back to YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from os import PathLike, fspath
from os.path import abspath, expanduser
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from quantizer.common.paths import is_there
from quantizer.config.data_section import MODULE, DataConfig, DatasetConfig, is_function_name
from quantizer.config.describe import Slot, nearest, words_for
from quantizer.config.origin import Draft
from quantizer.config.quantizer_section import QuantizerConfig
from quantizer.config.schema import RunConfig
from quantizer.config.section import Section
from quantizer.config.sensitivity_section import FallbackConfig
from quantizer.config.validate import check_keys, finish
from quantizer.config.yaml_file import Document, read_yaml
from quantizer.errors import ConfigError
from quantizer.targets import AUTO

SWEEP = "sweep"
"""The section of a file that makes several runs of it; see ``read_sweep``."""


def load_run(path: str | PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read the YAML file of one run.

    Relative paths in it (``data.*.path``, ``model.weights``, and ``model.source`` if it starts with ``./``, ``../`` or
    ``~/`` or exists) are resolved against the current directory, not against the folder of the file. Without
    ``output``, the run's folder is ``runs/`` and the file's name without its ending; without ``quantizer.backend`` it
    is ``auto``.

    Args:
        path: the file.
        overrides: ``key.path=value``, the value in YAML, or ``~key.path`` to remove a key; applied in this order,
            before any check.

    Raises:
        ConfigError: a list of all problems of the file and the overrides, each with its place.
    """
    draft = _overridden(path, overrides)
    if SWEEP in draft.value:
        text = "makes several runs, and one is expected here: `quantizer run` carries out all, ~sweep leaves it out"
        draft.add((SWEEP,), text)
        del draft.value[SWEEP]
    return finished_run(draft, path)


def valid_sections(path: str | PathLike[str], overrides: Sequence[str] = ()) -> dict[str, Section]:
    """Return the sections of a file that has problems which are valid by themselves, by name, for further checks.

    Where ``data`` is not, its own sections are there by names such as ``data.evaluation``.

    Args:
        path: the file, which ``load_run`` refuses.
        overrides: as of ``load_run``.

    Raises:
        ConfigError: the file cannot be read at all.
    """
    draft = _overridden(path, overrides)
    _refuse_given_in_python(draft)
    found = _valid(RunConfig, draft.value)
    data = draft.value.get("data")
    if "data" not in found and isinstance(data, dict):
        found |= {f"data.{name}": section for name, section in _valid(DataConfig, data).items()}
    return found


def _valid(schema: type[Section], value: Mapping[str, Any]) -> dict[str, Section]:
    """Return the sections of a mapping that are valid by themselves."""
    found: dict[str, Section] = {}
    for name, field in schema.model_fields.items():
        section = Slot.of(field.annotation).section
        if section is not None and value.get(name) is not None:
            with suppress(ValidationError):
                found[name] = section.model_validate(value[name])
    return found


def _overridden(path: str | PathLike[str], overrides: Sequence[str]) -> Draft:
    """Return the draft of a run's file with the overrides."""
    draft = run_draft(path, read_yaml(path))
    for text in overrides:
        draft.override(text)
    return draft


def run_draft(path: str | PathLike[str], document: Document) -> Draft:
    """Return the draft of a run's file, before any override.

    Raises:
        ConfigError: the file holds no mapping.
    """
    draft = Draft(document.value, fspath(path), document)
    _require_section(draft, RunConfig)
    return draft


def finished_run(draft: Draft, path: str | PathLike[str]) -> RunConfig:
    """Return the configuration of a draft, with the defaults of the file of this path; see ``load_run``."""
    _refuse_given_in_python(draft)
    draft.value.setdefault("output", f"runs/{Path(path).stem}")
    fallback = draft.value.get("fallback")
    if isinstance(fallback, dict) and fallback.get("names") is None and draft.value.get("amp") is None:
        # What a group costs orders those to choose from.
        draft.set(("amp",), {}, "default")
    if _is_of_functions(draft.value.get("model")):
        draft.value.setdefault("data", {})
    section = draft.value.get("quantizer", {})
    if isinstance(section, dict) and "backend" not in section:
        draft.set(("quantizer", "backend"), AUTO, "default")
    return _with_absolute_paths(finish(draft, RunConfig))


def _refuse_given_in_python(draft: Draft) -> None:
    """Raise for the configuration of a run whose model was an object in Python.

    Raises:
        ConfigError: it is; its other problems all come of that.
    """
    model = draft.value.get("model")
    if isinstance(model, dict) and model.get("task") == MODULE:
        draft.add(
            ("model", "task"),
            "is that of a model given in Python: quantize_model wrote this file, and no file can hold the model and "
            "its batches. Call quantize_model again; or write model: {source: 'my_pkg.nets:build', inputs: "
            "'my_pkg.data:batches'} with functions that return them, and leave out task and data",
        )
        raise ConfigError([draft.problems[-1][1]])


def _is_of_functions(model: Any) -> bool:
    """Return whether the section of a model, of whatever values, names a function, so that no data is needed."""
    return isinstance(model, dict) and (is_function_name(model.get("source")) or "inputs" in model)


def quantizer_config(
    source: str | PathLike[str] | Mapping[str, Any] | QuantizerConfig | RunConfig | None = None, **keywords: Any
) -> QuantizerConfig:
    """Return the settings of a ``Quantizer``.

    Args:
        source: None for the defaults; a YAML file or a mapping, of a whole run (only its ``quantizer`` section is used)
            or of that section; or a configuration.
        keywords: fields of ``QuantizerConfig``, which replace whole fields of ``source``:
            ``exclude={"names": ["classifier"]}``.

    Raises:
        ConfigError: a list of all problems, each with its file and line or its keyword.
    """
    if isinstance(source, RunConfig):
        source = source.quantizer
    if isinstance(source, QuantizerConfig):
        if not keywords:
            return source
        source = source.model_dump()
    draft = _draft(source)
    whole = draft.value if isinstance(draft.value, dict) else {}
    # A key similar to 'quantizer' means a whole run too, so that the message suggests the correct spelling.
    is_run = any(name in RunConfig.model_fields or nearest(str(name), ["quantizer"]) for name in whole)
    _require_section(draft, RunConfig if is_run else QuantizerConfig)
    if is_run:
        check_keys(draft.value, draft, RunConfig)
    at = ("quantizer",) if is_run else ()
    for name, value in keywords.items():
        draft.set((*at, name), _plain(value), f"keyword {name!r}")
    return finish(draft, QuantizerConfig, at)


def fallback_config(values: Mapping[str, Any]) -> FallbackConfig:
    """Return the ``fallback`` section of a run whose model is given in Python.

    Raises:
        ConfigError: a list of all problems, each with its key.
    """
    return finish(Draft({"fallback": _plain(values)}, "keyword 'fallback'"), FallbackConfig, ("fallback",))


def dump_yaml(config: Section) -> str:
    """Return ``config`` as YAML with every field that says something; reading it gives an equal configuration."""
    plain = config.model_dump(mode="json")
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)


def _draft(source: object) -> Draft:
    if source is None:
        return Draft({}, "keywords")
    if isinstance(source, str | PathLike):
        document = read_yaml(source)
        return Draft(document.value, fspath(source), document)
    if isinstance(source, Mapping):
        return Draft(_plain(source), "mapping")
    what = f"got {words_for(source)}; expected a YAML file, a mapping or a QuantizerConfig"
    raise ConfigError([f"quantizer configuration: {what}"])


def _plain(value: Any) -> Any:
    """Return ``value`` with its mappings copied into dictionaries, so that the caller's own are not changed."""
    return {key: _plain(below) for key, below in value.items()} if isinstance(value, Mapping) else value


def _require_section(draft: Draft, schema: type[Section]) -> None:
    if isinstance(draft.value, dict):
        return
    if not draft.holes:
        got = "is empty" if draft.value is None else f"holds {words_for(draft.value)}"
        draft.add((), f"{got}; expected a mapping with keys {', '.join(schema.model_fields)}")
    raise ConfigError([text for _, text in draft.problems])


def _with_absolute_paths(run: RunConfig) -> RunConfig:
    model = run.model
    if model.task is None:
        weights = None if model.weights is None else abspath(expanduser(model.weights))
        model = model.model_copy(update={"weights": weights})
    elif model.source.startswith(("./", "../", "~/")) or is_there(Path(model.source)):
        model = model.model_copy(update={"source": abspath(expanduser(model.source))})
    found = {}
    for name in type(run.data).model_fields:
        dataset = getattr(run.data, name)
        if isinstance(dataset, DatasetConfig) and dataset.path is not None:
            found[name] = dataset.model_copy(update={"path": abspath(expanduser(dataset.path))})
    return run.model_copy(update={"model": model, "data": run.data.model_copy(update=found)})
