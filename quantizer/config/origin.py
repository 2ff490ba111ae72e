"""A configuration before validation: its values, their origins, and the problems so far."""

from __future__ import annotations

from typing import Any

from quantizer.config.describe import KeyPath, nearest, path_text, words_for
from quantizer.config.yaml_file import Document, parse_yaml
from quantizer.errors import ConfigError


class Draft:
    """Values from a file or mapping and from overrides, and their problems.

    Attributes:
        value: the values so far; the caller's mappings are never changed.
        label: the file name, or another name for the origin of the values.
        document: the file, if there is one.
        overrides: path and label of each override, in order.
        problems: position and text of each problem so far; the position is a line, from 10 ** 9 on for overrides.
        holes: paths of values that could not be read, so that validating them would only repeat the problem.
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
        position, where = place or self.place(path)
        shown = path_text(path)
        self.problems.append((position, f"{where}: {shown}: {text}" if shown else f"{where}: {text}"))

    def place(self, path: KeyPath) -> tuple[int, str]:
        """Return the origin of the value at ``path``: its position, and "FILE:LINE" or "override '...'"."""
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
        key, sign, written = text.partition("=")
        remove = key.startswith("~")
        path: KeyPath = tuple(key.removeprefix("~").split("."))
        if (remove and sign) or not (remove or sign) or not all(path):
            self.add((), "is no override; expected key=value, such as quantizer.backend=openvino, or ~key", place)
            return
        if remove:
            self._remove(path, place)
            return
        try:
            document = parse_yaml(written, label)
        except ConfigError as error:
            self.problems += [(place[0], problem) for problem in error.problems]
            return
        if self.set(path, document.value, label):
            for fault in document.faults:
                self.add((*path, *fault.path), fault.text, place)
                if fault.hole:
                    self.holes.append((*path, *fault.path))

    def set(self, path: KeyPath, value: Any, label: str) -> bool:
        """Set ``value`` at ``path``, and create missing sections; return False if a problem was added instead."""
        here = self.value
        for length, key in enumerate(path[:-1], start=1):
            below = here.get(key)
            if below is not None and not isinstance(below, dict):
                text = f"{path_text(path[:length])} is {words_for(below)}; expected a section: set it as a whole"
                self.add((), text, (10**9 + len(self.overrides), label))
                return False
            # A copy, since an alias may use the same section in another place.
            here[key] = here = dict(below or {})
        here[path[-1]] = value
        self._replaced(path, label)
        return True

    def _remove(self, path: KeyPath, place: tuple[int, str]) -> None:
        here = self.value
        for length, key in enumerate(path, start=1):
            if not isinstance(here, dict) or key not in here:
                names = [name for name in here if isinstance(name, str)] if isinstance(here, dict) else []
                near = nearest(str(key), names)
                hint = f"; did you mean {near!r}?" if near else ""
                self.add((), f"{path_text(path[:length])} is not set; expected a key to remove{hint}", place)
                return
            if length < len(path) and isinstance(here[key], dict):
                here[key] = dict(here[key])
            if length < len(path):
                here = here[key]
        del here[path[-1]]
        self._replaced(path, place[1])

    def _replaced(self, path: KeyPath, label: str) -> None:
        self.overrides.append((path, label))
        self.holes = [hole for hole in self.holes if hole[: len(path)] != path]
