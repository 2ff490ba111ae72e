"""Reading of a YAML file as plain values, with the line of each key and entry.

Accepted YAML: mappings with text keys, lists, text, numbers, true, false, null, and aliases. Tags, merge keys and
duplicate keys are problems. All problems are collected, not only the first.
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
"""Numbers such as 010 or 1:30, which YAML 1.1 reads as octal or base 60."""


@dataclass(frozen=True)
class Fault:
    """A problem of the YAML text.

    Attributes:
        line: the line, from 1.
        path: the path of the value.
        text: the problem, and the expected value.
        hole: the value could not be read and became None.
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
        faults: the problems of the text.
        root: the node tree, which knows the lines.
    """

    value: Any = None
    faults: list[Fault] = field(default_factory=list)
    root: yaml.Node | None = None
    _places: dict[int, dict[str, tuple[int, yaml.Node]]] = field(default_factory=dict)

    def line(self, path: KeyPath) -> int | None:
        """Return the line of the key or list entry at ``path``, from 1; None if the path does not exist."""
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
        """Return the line, from 0, and the value node of each key; cached for texts with thousands of keys."""
        keys = self._places.get(id(mapping))
        if keys is None:
            keys = self._places[id(mapping)] = {}
            for key, value in mapping.value:
                if isinstance(key, yaml.ScalarNode) and key.tag in _TEXTS:
                    keys.setdefault(key.value, (key.start_mark.line, value))
        return keys


class _Reader:
    """Converter of node trees to plain values.

    Attributes:
        loader: the loader that constructs numbers, true, false and null.
        faults: the faults so far.
        done: values by the id of their node; an alias is the same node.
        open: ids of the nodes being read, to detect a value that contains itself.
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
            self.fault(node, path, "contains itself through an alias; expected a finite value", hole=True)
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
            notation = "a base-60 number" if ":" in node.value else "an octal number"
            text = f"YAML reads {node.value!r} as {notation}; expected decimal digits without a leading 0: quote text"
            self.fault(node, path, text, hole=True)
            return None
        try:
            value = self.loader.construct_object(node)
        except (ValueError, KeyError, IndexError, yaml.YAMLError):
            kind = node.tag.replace(_TAG, "!!")
            self.fault(
                node, path, f"{node.value[:60]!r} is not a valid {kind}; expected a plain value: quote text", hole=True
            )
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
                name = f"{key_node.value!r} " if isinstance(key_node, yaml.ScalarNode) else ""
                self.fault(key_node, path, f"the key {name}is not text; expected a name: quote it if it is text")
                continue
            key = key_node.value
            if key in lines:
                text = f"the key appears twice, first in line {lines[key]}; expected it once: remove one"
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
        ConfigError: the text is not YAML. Valid YAML that a configuration may not contain is listed in ``faults``.
    """
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        reader = _Reader(loader)
        value = None if root is None else reader.value(root, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        cause = ", ".join(part for part in (error.context, error.problem) if part)
        line = mark.line + 1 if mark is not None else 1
        raise ConfigError([f"{label}:{line}: the YAML cannot be parsed: {cause}; expected valid YAML"]) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = repr(text[error.position : error.position + 1])
        problem = (
            f"{label}:{line}: the character {character} is not allowed in YAML; expected printable text: remove it"
        )
        raise ConfigError([problem]) from error
    except RecursionError as error:
        raise ConfigError([f"{label}:1: the YAML is nested too deeply; expected a few levels"]) from error
    return Document(value, reader.faults, root)


def read_yaml(path: str | PathLike[str]) -> Document:
    """Read one YAML file, as UTF-8.

    Raises:
        ConfigError: the file does not exist, cannot be read, or is not YAML.
    """
    try:
        # A pipe works, as in  quantizer run <(make_config), but must end.
        with Path(path).open("rb") as stream:
            content = stream.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise ValueError(f"it has more than {_LONGEST:,} bytes")
        text = content.decode("utf-8")
    except FileNotFoundError as error:
        siblings = _neighbours(Path(path))
        raise ConfigError([f"{path}: the file does not exist; expected a YAML file{siblings}"]) from error
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
