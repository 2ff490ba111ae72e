"""Reading of a YAML file as plain values, with the line of each key and entry.

Only the YAML that a configuration needs is accepted: mappings with text as keys, lists, text, numbers, true, false,
null, and aliases. Tags, merge keys and duplicate keys are problems; all problems are collected, not only the first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from quantizer.config.describe import KeyPath
from quantizer.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_VALUES = {_TAG + name for name in ("bool", "int", "float", "null")}
# A date, '=' and '<<' are special in YAML, but plain text in a configuration.
_TEXTS = {_TAG + name for name in ("str", "timestamp", "value", "merge")}
_INT_LIMIT = 2**63
_LONGEST = 2**26
_NUMBERS = {_TAG + "int", _TAG + "float"}
_OLD_NUMBER = re.compile(r"[-+]?(0[0-9_]+|[0-9_]+(:[0-9_]+)+(\.[0-9_]*)?)")
"""Numbers such as 010 or 1:30, which YAML 1.1 reads in another base than ten, against the expectation of users."""


@dataclass(frozen=True)
class Fault:
    """A part of the text that is not a plain value.

    Attributes:
        line: the line, from 1.
        path: the path of the value.
        text: the problem, and the expected value.
        hole: the value could not be read, and is replaced by None.
    """

    line: int
    path: KeyPath
    text: str
    hole: bool = False


@dataclass
class Document:
    """One parsed YAML text.

    Attributes:
        value: the plain value.
        faults: the parts of the text that are not plain values.
        root: the node tree, which has the lines.
    """

    value: Any = None
    faults: list[Fault] = field(default_factory=list)
    root: yaml.Node | None = None
    _places: dict[int, dict[str, tuple[int, yaml.Node]]] = field(default_factory=dict)

    def line(self, path: KeyPath) -> int | None:
        """Return the line of the key or list entry at ``path``, from 1; None if the text has no such path."""
        node = self.root
        line = node.start_mark.line if node is not None else None
        for step in path:
            if isinstance(node, yaml.MappingNode) and step in self._keys(node):
                line, node = self._keys(node)[str(step)]
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
                node = node.value[step]
                line = node.start_mark.line
            else:
                return None
        return line + 1 if line is not None else None

    def _keys(self, mapping: yaml.MappingNode) -> dict[str, tuple[int, yaml.Node]]:
        """Return the line, from 0, and the value of each key; cached, because a text may have thousands of keys."""
        found = self._places.get(id(mapping))
        if found is None:
            found = self._places[id(mapping)] = {}
            for key, value in mapping.value:
                if isinstance(key, yaml.ScalarNode) and key.tag in _TEXTS:
                    found.setdefault(key.value, (key.start_mark.line, value))
        return found


class _Reader:
    """A converter of node trees to plain values.

    Attributes:
        loader: the loader that constructs numbers, true, false and null.
        faults: the faults so far.
        done: values by the id of their node; an alias is the same node again.
        open: ids of the nodes that are being read, to detect a value that contains itself.
    """

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self.loader = loader
        self.faults: list[Fault] = []
        self.done: dict[int, Any] = {}
        self.open: set[int] = set()

    def fault(self, node: yaml.Node, path: KeyPath, text: str, hole: bool = False) -> None:
        self.faults.append(Fault(node.start_mark.line + 1, path, text, hole))

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if id(node) in self.open:
            self.fault(node, path, "contains itself through an alias; expected a value that ends", hole=True)
            return None
        if id(node) not in self.done:
            self.open.add(id(node))
            self.done[id(node)] = self._read(node, path)
            self.open.remove(id(node))
        return self.done[id(node)]

    def _read(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.ScalarNode) and node.tag in _TEXTS:
            return node.value
        if isinstance(node, yaml.ScalarNode) and node.tag in _VALUES:
            return self._scalar(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.value(entry, (*path, index)) for index, entry in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path)
        tag = node.tag.replace(_TAG, "!!")
        self.fault(
            node, path, f"the YAML tag {tag!r} is not allowed; expected a plain value: remove the tag", hole=True
        )
        return None

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        if node.tag in _NUMBERS and _OLD_NUMBER.fullmatch(node.value):
            what = "a number to the base of 60" if ":" in node.value else "an octal number"
            text = f"{node.value!r} is {what} to YAML; expected decimal digits without a leading 0: quote text"
            self.fault(node, path, text, hole=True)
            return None
        try:
            value = self.loader.construct_object(node)
        except (ValueError, KeyError, IndexError, yaml.YAMLError):
            kind = node.tag.replace(_TAG, "!!")
            self.fault(node, path, f"{node.value[:60]!r} is no {kind}; expected a plain value: quote text", hole=True)
            return None
        if isinstance(value, int) and abs(value) >= _INT_LIMIT:
            self.fault(node, path, "the number is too large; expected one that fits in 64 bits", hole=True)
            return None
        return value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                self.fault(key_node, path, "merge keys ('<<') are not supported; expected the keys written out")
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag not in _TEXTS:
                shown = f"{key_node.value!r} " if isinstance(key_node, yaml.ScalarNode) else ""
                self.fault(key_node, path, f"the key {shown}is not text; expected a name (quote it if it is one)")
                continue
            key = key_node.value
            if key in lines:
                text = f"the key is written twice, first in line {lines[key]}; expected it once: remove one"
                self.fault(key_node, (*path, key), text)
                continue
            lines[key] = key_node.start_mark.line + 1
            mapping[key] = self.value(value_node, (*path, key))
        return mapping


def parse_yaml(text: str, label: str) -> Document:
    """Read one YAML text.

    Args:
        text: the YAML.
        label: the file name, for messages.

    Raises:
        ConfigError: the text is not YAML. YAML that no configuration may have is recorded in ``faults`` instead.
    """
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        reader = _Reader(loader)
        value = None if root is None else reader.value(root, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.context, error.problem) if part)
        line = mark.line + 1 if mark is not None else 1
        raise ConfigError([f"{label}:{line}: the YAML does not parse: {what}; expected valid YAML"]) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        shown = repr(text[error.position : error.position + 1])
        problem = f"{label}:{line}: the character {shown} is not allowed in YAML; expected printable text: remove it"
        raise ConfigError([problem]) from error
    except RecursionError as error:
        raise ConfigError([f"{label}:1: the YAML is nested too deeply; expected a few levels"]) from error
    return Document(value, reader.faults, root)


def read_yaml(path: str | PathLike[str]) -> Document:
    """Read one YAML file, as UTF-8.

    Raises:
        ConfigError: there is no such file, it cannot be read, or it is not YAML.
    """
    try:
        # A pipe is fine, as of  quantizer run <(make_config), but not without an end.
        with Path(path).open("rb") as stream:
            content = stream.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise ValueError(f"it has more than {_LONGEST:,} bytes")
        text = content.decode("utf-8")
    except FileNotFoundError as error:
        near = _neighbours(Path(path))
        raise ConfigError([f"{path}: there is no such file; expected a YAML file{near}"]) from error
    except IsADirectoryError as error:
        raise ConfigError([f"{path}: this is a folder; expected a YAML file{_neighbours(Path(path) / 'x')}"]) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        problem = f"{path}:{line}: byte 0x{error.object[error.start]:02x} is not UTF-8; expected a text file in UTF-8"
        raise ConfigError([problem]) from error
    except (OSError, ValueError) as error:
        raise ConfigError([f"{path}: cannot be read ({error}); expected a readable YAML file"]) from error
    return parse_yaml(text, str(path))


def _neighbours(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix in {".yaml", ".yml"})
    except OSError:
        return ""
    return f"; in that folder: {', '.join(names[:8])}" if names else ""
