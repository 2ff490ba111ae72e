"""Conversion of a YAML file, a mapping or keywords to a frozen configuration, and back to YAML.

A ``Draft`` holds the values before validation, where each came from, and the problems so far. Validation reports all
problems of all sections in one error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite
from os import PathLike, fspath
from os.path import abspath, expanduser
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from quantizer.config.data_section import MODULE, DataConfig, DatasetConfig, is_function_name
from quantizer.config.describe import KeyPath, Slot, nearest, path_text, paths_ending_in, slot_at, words_for
from quantizer.config.quantizer_section import FallbackConfig, QuantizerConfig, Section
from quantizer.config.schema import EngineConfig, RunConfig
from quantizer.config.yaml_file import Document, parse_yaml, read_yaml
from quantizer.errors import ConfigError
from quantizer.plan.targets import AUTO
from quantizer.utils.paths import is_there

SWEEP = "sweep"
"""The section that turns one file into several runs; see ``read_sweep``."""


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
        text = "makes several runs, but this command expects one; use `quantizer run`, or ~sweep to ignore the section"
        draft.add((SWEEP,), text)
        del draft.value[SWEEP]
    return finished_run(draft, path)


def valid_sections(path: str | PathLike[str], overrides: Sequence[str] = ()) -> dict[str, Section]:
    """Return the valid sections of an invalid file by name, for further checks.

    If ``data`` is invalid, its valid subsections are returned by names such as ``data.evaluation``.

    Args:
        path: the file, which ``load_run`` rejects.
        overrides: as in ``load_run``.

    Raises:
        ConfigError: the file cannot be read at all.
    """
    draft = _overridden(path, overrides)
    _refuse_given_in_python(draft)
    sections = _valid(RunConfig, draft.value)
    data = draft.value.get("data")
    if "data" not in sections and isinstance(data, dict):
        sections |= {f"data.{name}": section for name, section in _valid(DataConfig, data).items()}
    return sections


def _valid(schema: type[Section], value: Mapping[str, Any]) -> dict[str, Section]:
    """Return the valid sections of a mapping by name."""
    sections: dict[str, Section] = {}
    for name, field in schema.model_fields.items():
        section = Slot.of(field.annotation).section
        if section is not None and value.get(name) is not None:
            with suppress(ValidationError):
                sections[name] = section.model_validate(value[name])
    return sections


def _overridden(path: str | PathLike[str], overrides: Sequence[str]) -> Draft:
    """Return the draft of a run file with the overrides applied."""
    draft = run_draft(path, read_yaml(path))
    for text in overrides:
        draft.override(text)
    return draft


def run_draft(path: str | PathLike[str], document: Document) -> Draft:
    """Return the draft of a run file, before any override.

    Raises:
        ConfigError: the file does not hold a mapping.
    """
    draft = Draft(document.value, fspath(path), document)
    _require_section(draft, RunConfig)
    return draft


def finished_run(draft: Draft, path: str | PathLike[str]) -> RunConfig:
    """Return the configuration of a draft, with defaults that depend on the path; see ``load_run``."""
    _refuse_given_in_python(draft)
    draft.value.setdefault("output", f"runs/{Path(path).stem}")
    if draft.value.get("amp") is None and _needs_sensitivity(draft.value):
        draft.set(("amp",), {}, "default")
    if _is_of_functions(draft.value.get("model")):
        draft.value.setdefault("data", {})
    section = draft.value.get("quantizer", {})
    if isinstance(section, dict) and "backend" not in section:
        draft.set(("quantizer", "backend"), AUTO, "default")
    return _with_absolute_paths(finish(draft, RunConfig))


def _refuse_given_in_python(draft: Draft) -> None:
    """Reject the configuration of a run whose model was a Python object.

    Raises:
        ConfigError: the task says so. Other problems follow from this one and are not reported.
    """
    model = draft.value.get("model")
    if isinstance(model, dict) and model.get("task") == MODULE:
        draft.add(
            ("model", "task"),
            "quantize_model wrote this file for a Python object, which a file cannot hold. Call quantize_model again; "
            "or write model: {source: 'my_pkg.nets:build', inputs: 'my_pkg.data:batches'} with functions that return "
            "the model and its batches, and leave out task and data",
        )
        raise ConfigError([draft.problems[-1][1]])


def _needs_sensitivity(run: Mapping[str, Any]) -> bool:
    """Return whether the fallback or the diagnosis of a run, valid or not, ranks the groups by sensitivity."""
    fallback, report = run.get("fallback"), run.get("report")
    if isinstance(fallback, dict) and fallback.get("names") is None:
        return True
    diagnoses = isinstance(report, dict) and report.get("diagnose") is True
    return diagnoses and run.get("quantize") is not False and run.get("qat") is None


def _is_of_functions(model: Any) -> bool:
    """Return whether a ``model`` section, valid or not, names a function, so that ``data`` may be missing."""
    return isinstance(model, dict) and (is_function_name(model.get("source")) or "inputs" in model)


def quantizer_config(
    source: str | PathLike[str] | Mapping[str, Any] | QuantizerConfig | RunConfig | None = None, **keywords: Any
) -> QuantizerConfig:
    """Return the settings of a ``Quantizer``.

    Args:
        source: None for the defaults; a YAML file or a mapping, of a whole run (only its ``quantizer`` section is used)
            or of that section; or a configuration.
        keywords: fields of ``QuantizerConfig``, which replace whole fields of ``source``, such as
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
    values = draft.value if isinstance(draft.value, dict) else {}
    # A misspelled 'quantizer' also marks a whole run, so that the message suggests the correct spelling.
    is_run = any(name in RunConfig.model_fields or nearest(str(name), ["quantizer"]) for name in values)
    _require_section(draft, RunConfig if is_run else QuantizerConfig)
    if is_run:
        check_keys(draft.value, draft, RunConfig)
    at = ("quantizer",) if is_run else ()
    for name, value in keywords.items():
        draft.set((*at, name), _plain(value), f"keyword {name!r}")
    return finish(draft, QuantizerConfig, at)


def fallback_config(values: Mapping[str, Any]) -> FallbackConfig:
    """Return a validated ``fallback`` section, for models passed as Python objects.

    Raises:
        ConfigError: a list of all problems, each with its key.
    """
    return finish(Draft({"fallback": _plain(values)}, "keyword 'fallback'"), FallbackConfig, ("fallback",))


def engine_config(**values: Any) -> EngineConfig:
    """Return a validated ``engine`` section, for models passed as Python objects; errors as in ``fallback_config``."""
    return finish(Draft({"engine": values}, "keywords"), EngineConfig, ("engine",))


def dump_yaml(config: Section) -> str:
    """Return ``config`` as YAML; reading it gives an equal configuration."""
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
    """Return ``value`` with its mappings copied, so that the caller's mappings do not change."""
    return {key: _plain(below) for key, below in value.items()} if isinstance(value, Mapping) else value


def _require_section(draft: Draft, schema: type[Section]) -> None:
    if isinstance(draft.value, dict):
        return
    if not draft.holes:
        problem = "is empty" if draft.value is None else f"holds {words_for(draft.value)}"
        draft.add((), f"{problem}; expected a mapping with keys {', '.join(schema.model_fields)}")
    raise ConfigError([text for _, text in draft.problems])


def _with_absolute_paths(run: RunConfig) -> RunConfig:
    model = run.model
    if model.task is None:
        weights = None if model.weights is None else abspath(expanduser(model.weights))
        model = model.model_copy(update={"weights": weights})
    elif model.source.startswith(("./", "../", "~/")) or is_there(Path(model.source)):
        model = model.model_copy(update={"source": abspath(expanduser(model.source))})
    datasets = {}
    for name in type(run.data).model_fields:
        dataset = getattr(run.data, name)
        if isinstance(dataset, DatasetConfig) and dataset.path is not None:
            datasets[name] = dataset.model_copy(update={"path": abspath(expanduser(dataset.path))})
    return run.model_copy(update={"model": model, "data": run.data.model_copy(update=datasets)})


S = TypeVar("S", bound=Section)

_HINTED = 100
"""Maximum number of problems with a suggestion; a file with more is hardly a configuration."""


def finish(draft: Draft, schema: type[S], at: KeyPath = ()) -> S:
    """Return the validated section of a draft.

    Args:
        draft: the values, and the problems so far.
        schema: the class of the section.
        at: the path of the section in the draft; a missing section gets its defaults.

    Raises:
        ConfigError: a list of all problems, in the order of the lines.
    """
    value = draft.value
    for key in at:
        value = value.get(key, {})
    section: S | None = None
    try:
        section = schema.model_validate(value)
    except ValidationError as error:
        note_problems(error, draft, schema, at)
    if draft.problems or section is None:
        raise ConfigError([text for _, text in sorted(draft.problems, key=lambda problem: problem[0])])
    return section


def note_problems(error: ValidationError, draft: Draft, schema: type[Section], at: KeyPath = ()) -> None:
    """Add each problem of a pydantic error to the draft, with our own messages."""
    for number, detail in enumerate(error.errors(include_url=False)):
        path = (*at, *detail["loc"])
        if any(path[: len(hole)] == hole for hole in draft.holes):
            continue
        if detail["type"] == "cross_field":
            for key, text in detail["ctx"]["problems"]:
                above, below = (at, key[1:]) if key.startswith("/") else (path, key)
                draft.add((*above, *filter(None, below.split("."))), text)
        else:
            draft.add(path, _explain(detail, schema, at, hint=number < _HINTED))


def check_keys(value: Mapping[Any, Any], draft: Draft, schema: type[Section]) -> None:
    """Add unknown top-level keys to the problems of the draft."""
    for key in value:
        if key not in schema.model_fields:
            draft.add((key,), _unknown(str(key), (), schema, (), hint=True))


def _explain(detail: ErrorDetails, schema: type[Section], at: KeyPath, *, hint: bool) -> str:
    """Return the message of a problem: the value, the accepted values, and a suggestion."""
    path, value, kind = detail["loc"], detail["input"], detail["type"]
    if kind == "extra_forbidden":
        return _unknown(str(path[-1]), path[:-1], schema, at, hint=hint)
    if kind == "invalid_key":
        return f"the key is {words_for(path[-1])}; expected a name (in YAML: quote it if it is one)"
    slot = slot_at(schema, path)
    expected = f"; expected {slot.expected()}" if slot is not None else ""
    if kind == "missing":
        container = slot_at(schema, path[:-1]) if isinstance(path[-1], int) else None
        return f"is missing; expected {container.expected()}" if container is not None else f"is missing{expected}"
    if kind == "too_long":
        return f"got a list of {detail['ctx']['actual_length']}{expected}"
    if kind == "string_too_short":
        return f"is empty{expected}; leave the key out for no value"
    return f"got {words_for(value)}{expected}{_hint(value, slot)}"


def _unknown(key: str, above: KeyPath, schema: type[Section], at: KeyPath, *, hint: bool) -> str:
    slot = slot_at(schema, above)
    names = slot.names() if slot is not None else []
    text = f"unknown key; expected one of {', '.join(names)}"
    if not hint:
        return text
    similar = nearest(key, names)
    elsewhere = [path_text((*at, *path)) for path in paths_ending_in(schema, key)]
    if similar is None and elsewhere:
        similar = elsewhere[0]
    return text + (f"; did you mean {similar!r}?" if similar else "")


def _hint(value: Any, slot: Slot | None) -> str:
    if slot is None:
        return ""
    if value is None and slot.section is not None:
        return "; leave the key out for the default"
    if not isinstance(value, str):
        return ""
    similar = nearest(value, slot.names()) if slot.section is None else None
    if similar is not None:
        return f"; did you mean {similar!r}?"
    if slot.annotation in (int, float):
        return _number_hint(value, slot.annotation)
    return f"; write [{value}]" if slot.child(0) is not None and value.isidentifier() else ""


def _number_hint(text: str, kind: type[int] | type[float]) -> str:
    # YAML 1.1 reads 1e-3 as text, because a float needs a dot.
    try:
        number = float(text)
        decimal = str(int(number)) if kind is int else yaml.safe_dump(number).split("\n")[0]
    except (ValueError, OverflowError):
        return ""
    if (kind is int and number != int(number)) or not isfinite(number):
        return ""
    return f"; YAML reads this as text: write {decimal}, without quotes"


class Draft:
    """Values of a configuration before validation, with overrides, and the problems so far.

    Attributes:
        value: the values; the caller's mappings do not change.
        label: the file name, or another name for the origin of the values.
        document: the YAML file, if any.
        overrides: path and label of each override, in order.
        problems: position and text of each problem; the position is a line number, or 10 ** 9 and more for overrides.
        holes: paths of values that could not be read; validation skips them, since their problem is known.
    """

    def __init__(self, value: Any, label: str, document: Document | None = None) -> None:
        self.value = dict(value) if isinstance(value, dict) else value
        self.label = label
        self.document = document
        self.overrides: list[tuple[KeyPath, str]] = []
        self.problems: list[tuple[int, str]] = []
        self.holes: list[KeyPath] = []
        for fault in document.faults if document is not None else []:
            self.add(fault.path, fault.text, (fault.line, f"{label}:{fault.line}"))
            if fault.hole:
                self.holes.append(fault.path)

    def add(self, path: KeyPath, text: str, place: tuple[int, str] | None = None) -> None:
        """Add a problem of the value at ``path``."""
        position, origin = place or self.place(path)
        key = path_text(path)
        self.problems.append((position, f"{origin}: {key}: {text}" if key else f"{origin}: {text}"))

    def place(self, path: KeyPath) -> tuple[int, str]:
        """Return where the value at ``path`` was set: a sort position, and "FILE:LINE" or "override '...'"."""
        for index, (target, label) in reversed(list(enumerate(self.overrides))):
            if path[: len(target)] == target:
                return 10**9 + index, label
        for length in range(len(path), 0, -1):
            line = self.document.line(path[:length]) if self.document is not None else None
            if line is not None:
                return line, f"{self.label}:{line}"
            for index, (target, label) in reversed(list(enumerate(self.overrides))):
                if target[:length] == path[:length]:
                    return 10**9 + index, label
        return (1, f"{self.label}:1") if self.document is not None else (0, self.label)

    def override(self, text: str) -> None:
        """Apply ``key.path=value`` (the value is YAML), or remove a key by ``~key.path``."""
        label = f"override {text!r}"
        place = (10**9 + len(self.overrides), label)
        key, equals, yaml_text = text.partition("=")
        remove = key.startswith("~")
        path: KeyPath = tuple(key.removeprefix("~").split("."))
        if (remove and equals) or not (remove or equals) or not all(path):
            self.add((), "is not an override; expected key=value, such as quantizer.backend=openvino, or ~key", place)
            return
        if remove:
            self._remove(path, place)
            return
        try:
            document = parse_yaml(yaml_text, label)
        except ConfigError as error:
            self.problems += [(place[0], problem) for problem in error.problems]
            return
        if self.set(path, document.value, label):
            for fault in document.faults:
                self.add((*path, *fault.path), fault.text, place)
                if fault.hole:
                    self.holes.append((*path, *fault.path))

    def set(self, path: KeyPath, value: Any, label: str) -> bool:
        """Set ``value`` at ``path`` and create missing sections; return False if a problem was added instead."""
        section = self.value
        for length, key in enumerate(path[:-1], start=1):
            child = section.get(key)
            if child is not None and not isinstance(child, dict):
                text = f"{path_text(path[:length])} is {words_for(child)}; expected a section: set it as a whole"
                self.add((), text, (10**9 + len(self.overrides), label))
                return False
            # Copied, because a YAML alias may use the same section elsewhere.
            section[key] = section = dict(child or {})
        section[path[-1]] = value
        self._replaced(path, label)
        return True

    def _remove(self, path: KeyPath, place: tuple[int, str]) -> None:
        section = self.value
        for length, key in enumerate(path, start=1):
            if not isinstance(section, dict) or key not in section:
                names = [name for name in section if isinstance(name, str)] if isinstance(section, dict) else []
                similar = nearest(str(key), names)
                hint = f"; did you mean {similar!r}?" if similar else ""
                self.add((), f"{path_text(path[:length])} is not set; expected a key to remove{hint}", place)
                return
            if length < len(path) and isinstance(section[key], dict):
                section[key] = dict(section[key])
            if length < len(path):
                section = section[key]
        del section[path[-1]]
        self._replaced(path, place[1])

    def _replaced(self, path: KeyPath, label: str) -> None:
        self.overrides.append((path, label))
        self.holes = [hole for hole in self.holes if hole[: len(path)] != path]
