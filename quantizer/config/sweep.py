"""A sweep: several runs, one for each combination of values of some keys, for one or several files.

The values come from the ``sweep`` section of a file, which has one list for each dotted key. They also come from
overrides with commas outside brackets and quotes: ``quantizer.backend=openvino,onnxruntime``. A list in brackets is one
value.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from os import fspath
from pathlib import Path
from typing import Any

import yaml

from quantizer.config.describe import KeyPath, path_text, words_for
from quantizer.config.load import SWEEP, Draft, finished_run, run_draft
from quantizer.config.schema import RunConfig, check_run
from quantizer.config.yaml_file import Document, parse_yaml, read_yaml
from quantizer.errors import ConfigError

_LONGEST = 150
"""Maximum length of a run's name, and so of its folder, in bytes; longer names end with a hash."""

_OPEN, _CLOSED, _QUOTES = "[{(", "]})", "'\""


@dataclass(frozen=True)
class Axis:
    """A key and its values in a sweep.

    Attributes:
        path: the path of the key.
        values: the values, in their order.
        label: the place of the values, for messages.
    """

    path: KeyPath
    values: tuple[Any, ...]
    label: str


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        name: the name of the run and of its folder in the folder of the sweep.
        config: the configuration.
    """

    name: str
    config: RunConfig


@dataclass(frozen=True)
class _File:
    """A run file with its overrides and its axes."""

    path: str
    document: Document
    overrides: tuple[str, ...]
    axes: tuple[Axis, ...]

    @property
    def stem(self) -> str:
        return Path(self.path).stem

    def draft(self) -> Draft:
        draft = run_draft(self.path, self.document)
        for text in self.overrides:
            draft.override(text)
        draft.value.pop(SWEEP, None)
        return draft


@dataclass(frozen=True)
class Sweep:
    """The runs of files and overrides; ``runs`` creates their configurations."""

    files: tuple[_File, ...]

    @property
    def is_single(self) -> bool:
        """True for one file without a list of values, which is a single run."""
        return len(self.files) == 1 and not self.files[0].axes

    @property
    def count(self) -> int:
        """The number of runs."""
        return sum(math.prod(len(axis.values) for axis in file.axes) for file in self.files)

    def folder(self) -> str:
        """Return the default folder: the output of the file, or for several files a folder with their names.

        Raises:
            ConfigError: the file has problems.
        """
        if len(self.files) > 1:
            return f"runs/{'+'.join(file.stem for file in self.files)}"
        first = next(_combinations(self.files[0]))
        return _configured(self.files[0], first).output

    def runs(self, folder: Path) -> list[SweepRun]:
        """Return all runs, each with its own folder in ``folder`` as output.

        Raises:
            ConfigError: a list of all problems of all configurations, including runs with equal names.
        """
        runs: list[SweepRun] = []
        origins: dict[str, str] = {}
        problems: dict[str, None] = {}
        for file in self.files:
            short_names = _short_names(file.axes)
            for values in _combinations(file):
                name = _name(file.stem if len(self.files) > 1 else "", short_names, values)
                settings = ", ".join(f"{path_text(axis.path)}={_text(value)}" for axis, value in values)
                origin = f"{file.path} with {settings}" if settings else file.path
                if name in origins:
                    text = f"two runs have the name {name!r}: {origins[name]}, and {origin}"
                    problems.setdefault(f"{text}; expected different values and different file names")
                origins[name] = origin
                try:
                    config = _configured(file, values)
                    runs.append(SweepRun(name, config.model_copy(update={"output": str(folder / name)})))
                except ConfigError as error:
                    problems.update(dict.fromkeys(error.problems))
        if problems:
            raise ConfigError(list(problems))
        return runs


@dataclass
class _Reader:
    """Reader of the axes of one file, which collects all problems."""

    axes: dict[KeyPath, Axis] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def section(self, path: str, document: Document) -> None:
        """Read the ``sweep`` section of a file."""
        section = document.value.get(SWEEP) if isinstance(document.value, dict) else None
        if section is None:
            return
        place = f"{path}:{document.line((SWEEP,))}: {SWEEP}"
        if not isinstance(section, Mapping):
            kind = words_for(section)
            self.problems.append(
                f"{place}: got {kind}; expected a section with dotted keys and a list of values for each"
            )
            return
        for key, values in section.items():
            line = f"{path}:{document.line((SWEEP, key))}"
            if not isinstance(values, list) or not values:
                kind = "is an empty list" if values == [] else f"got {words_for(values)}"
                text = f"{kind}; expected a list of values, such as {key}: [a, b]"
                self.problems.append(f"{line}: {SWEEP}.{key}: {text}")
                continue
            self._add(str(key), values, line)

    def override(self, text: str) -> bool:
        """Read an override; return False if it does not have several values."""
        key, equals, yaml_text = text.partition("=")
        label = f"override {text!r}"
        parts = split_values(yaml_text) if equals and not key.startswith("~") else []
        if len(parts) < 2:
            path = tuple(key.removeprefix("~").split("."))
            self.axes = {key_path: axis for key_path, axis in self.axes.items() if key_path[: len(path)] != path}
            return False
        if not all(part.strip() for part in parts):
            self.problems.append(f"{label}: a value in the list is empty; expected {key}=a,b, or quotes around a text")
            return True
        values = []
        for part in parts:
            try:
                document = parse_yaml(part, label)
            except ConfigError as error:
                self.problems += error.problems
                continue
            self.problems += [f"{label}: {fault.text}" for fault in document.faults]
            values.append(document.value)
        self._add(key, values, label)
        return True

    def _add(self, key: str, values: Sequence[Any], label: str) -> None:
        path: KeyPath = tuple(key.split("."))
        if not all(path):
            self.problems.append(f"{label}: {key!r} is not a key; expected a dotted key, such as quantizer.backend")
        elif path == ("output",):
            self.problems.append(
                f"{label}: output: each run of a sweep gets its own folder; set the folder of the sweep with --output"
            )
        else:
            self.axes[path] = Axis(path, tuple(values), label)


def read_sweep(paths: Sequence[str], overrides: Sequence[str] = ()) -> Sweep:
    """Return the sweep of run files and overrides; configurations are not created yet.

    Args:
        paths: the run files.
        overrides: as in ``load_run``; a key may have several values.

    Raises:
        ConfigError: a file cannot be read, or a list of values has problems.
    """
    files, problems = [], []
    for path in paths:
        document = read_yaml(path)
        reader = _Reader()
        reader.section(fspath(path), document)
        plain = tuple(text for text in overrides if not reader.override(text))
        if "~sweep" in plain:
            reader.axes = {
                key_path: axis for key_path, axis in reader.axes.items() if axis.label.startswith("override")
            }
        problems += reader.problems
        files.append(_File(fspath(path), document, plain, tuple(reader.axes.values())))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return Sweep(tuple(files))


def split_values(written: str) -> list[str]:
    """Split a value at its commas, except in brackets and quotes.

    A quote only counts at the start of a part or of an entry in brackets: in ``it's`` it is a letter.
    """
    parts, depth, quote = [""], 0, ""
    for letter in written:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in _QUOTES and (depth or not parts[-1].strip()):
            quote = letter
        elif letter in _OPEN:
            depth += 1
        elif letter in _CLOSED:
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += letter
    return parts


def _combinations(file: _File) -> Iterator[tuple[tuple[Axis, Any], ...]]:
    """Yield all combinations of axis values; the last axis changes fastest."""
    for values in product(*(axis.values for axis in file.axes)):
        yield tuple(zip(file.axes, values, strict=True))


def _configured(file: _File, values: Sequence[tuple[Axis, Any]]) -> RunConfig:
    draft = file.draft()
    for axis, value in values:
        draft.set(axis.path, value, axis.label)
    config = finished_run(draft, file.path)
    check_run(config)
    return config


def _short_names(axes: Sequence[Axis]) -> dict[KeyPath, str]:
    """Return the last part of each key, or the full key if two keys end alike."""
    ends = [axis.path[-1] for axis in axes]
    return {axis.path: str(axis.path[-1]) if ends.count(axis.path[-1]) == 1 else path_text(axis.path) for axis in axes}


def _name(stem: str, short_names: Mapping[KeyPath, str], values: Sequence[tuple[Axis, Any]]) -> str:
    parts = [stem] if stem else []
    for axis, value in values:
        plain = re.sub(r"[^\w.+=-]+", "_", _text(value)).strip("_")
        parts.append(f"{short_names[axis.path]}={plain}")
    name = ",".join(parts)
    encoded = name.encode()
    if len(encoded) <= _LONGEST:
        return name
    return f"{encoded[:_LONGEST].decode(errors='ignore')}-{hashlib.sha256(encoded).hexdigest()[:8]}"


def _text(value: Any) -> str:
    """Return a value as one line of YAML."""
    if isinstance(value, str):
        return value
    return str(yaml.safe_dump(value, default_flow_style=True, width=math.inf)).removesuffix("\n...\n").strip()
