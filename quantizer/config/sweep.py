"""A sweep: the runs of one or several files, one for each combination of the values that some keys have.

Values come from the section ``sweep`` of a file, dotted keys with a list each, and from overrides with commas outside
brackets and quotes: ``quantizer.backend=openvino,onnxruntime``. In brackets a list is one value, as it is in a file.
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
"""The most bytes in the name of a run, which is that of its folder too, before a hash ends it."""

_OPEN, _CLOSED, _QUOTES = "[{(", "]})", "'\""


@dataclass(frozen=True)
class Axis:
    """A key and the values that it has in turn.

    Attributes:
        path: the path of the key.
        values: the values, in their order.
        label: where they are written, for messages.
    """

    path: KeyPath
    values: tuple[Any, ...]
    label: str


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        name: the name, which is that of its folder below the folder of the sweep.
        config: its configuration.
    """

    name: str
    config: RunConfig


@dataclass(frozen=True)
class _File:
    """A file with its overrides, and the axes of its combinations."""

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
    """The runs of files and overrides, none of which is made before ``runs``."""

    files: tuple[_File, ...]

    @property
    def is_single(self) -> bool:
        """True if this is one file without any list of values: one run, and no sweep."""
        return len(self.files) == 1 and not self.files[0].axes

    @property
    def count(self) -> int:
        """The number of runs."""
        return sum(math.prod(len(axis.values) for axis in file.axes) for file in self.files)

    def folder(self) -> str:
        """Return the folder without ``--output``: that of the file's run; of several files, one with their names.

        Raises:
            ConfigError: the file has problems.
        """
        if len(self.files) > 1:
            return f"runs/{'+'.join(file.stem for file in self.files)}"
        first = next(_combinations(self.files[0]))
        return _configured(self.files[0], first).output

    def runs(self, folder: Path) -> list[SweepRun]:
        """Return all runs, each with its own folder below ``folder`` as output.

        Raises:
            ConfigError: a list of all problems of all configurations, or two runs have one name.
        """
        runs: list[SweepRun] = []
        told: dict[str, str] = {}
        problems: dict[str, None] = {}
        for file in self.files:
            named = _short_names(file.axes)
            for values in _combinations(file):
                name = _name(file.stem if len(self.files) > 1 else "", named, values)
                what = ", ".join(f"{path_text(axis.path)}={_text(value)}" for axis, value in values)
                whole = f"{file.path} with {what}" if what else file.path
                if name in told:
                    text = f"two runs have the name {name!r}: {told[name]}, and {whole}"
                    problems.setdefault(f"{text}; expected other values, each once, or other names of files")
                told[name] = whole
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
    """Reads the axes of one file; problems are collected."""

    axes: dict[KeyPath, Axis] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def section(self, path: str, document: Document) -> None:
        """Read the section ``sweep``."""
        section = document.value.get(SWEEP) if isinstance(document.value, dict) else None
        if section is None:
            return
        where = f"{path}:{document.line((SWEEP,))}: {SWEEP}"
        if not isinstance(section, Mapping):
            got = words_for(section)
            self.problems.append(f"{where}: got {got}; expected a section, each key in dots with a list of its values")
            return
        for key, values in section.items():
            line = f"{path}:{document.line((SWEEP, key))}"
            if not isinstance(values, list) or not values:
                got = "is an empty list" if values == [] else f"got {words_for(values)}"
                text = f"{got}; expected a list of values, such as {key}: [a, b]"
                self.problems.append(f"{line}: {SWEEP}.{key}: {text}")
                continue
            self._add(str(key), values, line)

    def override(self, text: str) -> bool:
        """Read an override with several values; return False if it is an ordinary one."""
        key, sign, written = text.partition("=")
        label = f"override {text!r}"
        parts = split_values(written) if sign and not key.startswith("~") else []
        if len(parts) < 2:
            path = tuple(key.removeprefix("~").split("."))
            self.axes = {at: axis for at, axis in self.axes.items() if at[: len(path)] != path}
            return False
        if not all(part.strip() for part in parts):
            self.problems.append(f"{label}: has an empty value in its list; expected {key}=a,b, or quotes for a text")
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
            self.problems.append(f"{label}: {key!r} is no key; expected one in dots, such as quantizer.backend")
        elif path == ("output",):
            self.problems.append(
                f"{label}: output: each run of a sweep has its own folder; name the sweep's by --output"
            )
        else:
            self.axes[path] = Axis(path, tuple(values), label)


def read_sweep(paths: Sequence[str], overrides: Sequence[str] = ()) -> Sweep:
    """Read files and overrides, without making the configurations of their runs.

    Args:
        paths: the files, each with a run.
        overrides: as for ``load_run``, and with several values for one key.

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
            reader.axes = {at: axis for at, axis in reader.axes.items() if axis.label.startswith("override")}
        problems += reader.problems
        files.append(_File(fspath(path), document, plain, tuple(reader.axes.values())))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return Sweep(tuple(files))


def split_values(written: str) -> list[str]:
    """Return the parts of a value between its commas, those in brackets and quotes left out.

    A quote counts where a part, or an entry in brackets, begins with it: in ``it's`` it is a letter.
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
    """Yield the value of each axis, the last axis changing fastest."""
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
    """Return the last part of each key, or all of it where two keys end alike."""
    ends = [axis.path[-1] for axis in axes]
    return {axis.path: str(axis.path[-1]) if ends.count(axis.path[-1]) == 1 else path_text(axis.path) for axis in axes}


def _name(stem: str, named: Mapping[KeyPath, str], values: Sequence[tuple[Axis, Any]]) -> str:
    parts = [stem] if stem else []
    for axis, value in values:
        plain = re.sub(r"[^\w.+=-]+", "_", _text(value)).strip("_")
        parts.append(f"{named[axis.path]}={plain}")
    whole = ",".join(parts)
    encoded = whole.encode()
    if len(encoded) <= _LONGEST:
        return whole
    return f"{encoded[:_LONGEST].decode(errors='ignore')}-{hashlib.sha256(encoded).hexdigest()[:8]}"


def _text(value: Any) -> str:
    """Return a value as it would be written in YAML, in one line."""
    if isinstance(value, str):
        return value
    return str(yaml.safe_dump(value, default_flow_style=True, width=math.inf)).removesuffix("\n...\n").strip()
