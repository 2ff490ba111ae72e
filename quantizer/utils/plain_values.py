"""Parsing and type checks of JSON and YAML files, which may be damaged, edited by hand or malicious.

A ``ValueError`` names the position in the file and the expected value; the caller adds the name of the file. The strict
mode of pydantic does not suffice: it accepts integers that overflow in torch, reads 1e400 as infinity, and supports
neither ``Collection`` nor strings for infinity.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

import yaml

_DEEPEST = 100
"""Accepted levels of nesting. libyaml recurses for each level, and 100,000 of them crash the process."""
_LARGEST = 2**63
_WORDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
# Both loaders give the same safe values; libyaml is several times as fast on a large file.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def json_values(text: str | bytes) -> Any:
    """Return the values of a JSON text."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        values = json.loads(text)
        # An escape may be a lone surrogate, which can neither be printed nor written.
        if "\\u" in text:
            json.dumps(values, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"a text in it holds half a character ({error.object[error.start]!r})") from error
    return values


def yaml_values(text: bytes) -> Any:
    """Return the values of a YAML text in UTF-8."""
    try:
        decoded_text = text.decode("utf-8")
        depth = 0
        for event in yaml.parse(decoded_text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise ValueError(f"it is nested more than {_DEEPEST} deep")
        return yaml.load(decoded_text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except (RecursionError, OverflowError, TypeError, KeyError, IndexError, AttributeError) as error:
        # PyYAML does not catch the errors of values such as 0b, 1:99999... or a date with month 13.
        raise ValueError(f"a value in it is not valid YAML ({type(error).__name__}: {error})") from error


def decoded(hint: Any, value: Any, path: str, strings: Mapping[str, float] = types.MappingProxyType({})) -> Any:
    """Return a plain value converted to the type of an annotation, recursively.

    Args:
        hint: a dataclass, an enumeration, ``str``, ``int``, ``float``, ``bool``, ``Any``, or a union, ``tuple``,
            ``list``, ``Collection`` (gives a set) or ``Mapping`` of these. No plain value matches any other class.
        value: the value from a file.
        path: its position in the file, for messages: ``sites[3].operands[0].axis``.
        strings: strings that stand for numbers, such as ``inf``, with their numbers.

    Raises:
        ValueError: the value does not match the annotation.
    """
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return _of_union(typing.get_args(hint), value, path, strings)
    if origin in (tuple, list, Collection):
        return _of_sequence(origin, typing.get_args(hint), value, path, strings)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _of_mapping(typing.get_args(hint)[1], value, path, strings)
    if origin is typing.Literal:
        return _of_choice({entry: entry for entry in typing.get_args(hint)}, value, path)
    if dataclasses.is_dataclass(hint):
        return _of_record(hint, value, path, strings)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _of_choice({entry.value: entry for entry in hint}, value, path)
    if hint is float and isinstance(value, str) and value in strings:
        return strings[value]
    return _of_scalar(hint, value, path)


def _of_scalar(hint: Any, value: Any, path: str) -> Any:
    kinds = (int, float) if hint is float else hint
    if not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool):
        raise _wrong(path, _words(hint), value)
    if isinstance(value, int) and abs(value) >= _LARGEST:
        raise ValueError(f"{path}: expected {_words(hint)} that fits in 64 bits, got one of {value.bit_length()} bits")
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _wrong(path, "a string of whole characters", value) from error
    return float(value) if hint is float else value


def _of_union(options: tuple[Any, ...], value: Any, path: str, strings: Mapping[str, float]) -> Any:
    if value is None and type(None) in options:
        return None
    value_options = [option for option in options if option is not type(None)]
    if len(value_options) == 1 and value_options[0] not in _WORDS and value_options[0] is not Any:
        # The message about the part that is wrong is more precise than one about the whole value.
        return decoded(value_options[0], value, path, strings)
    exact = [
        option for option in value_options if type(value) is option
    ]  # for a union of int and float, 3 stays an int
    for option in exact or value_options:
        try:
            return decoded(option, value, path, strings)
        except ValueError:
            continue
    raise _wrong(path, " or ".join(map(_words, options)), value)


def _of_sequence(
    result_type: type, hints: tuple[Any, ...], value: Any, path: str, strings: Mapping[str, float]
) -> Collection[Any]:
    if not isinstance(value, list | tuple):
        raise _wrong(path, "a list", value)
    if result_type is not tuple or hints[-1] is Ellipsis:
        hints = (hints[0],) * len(value)
    if len(hints) != len(value):
        raise _wrong(path, f"a list of {len(hints)}", value)
    pairs = enumerate(zip(hints, value, strict=True))
    result = [decoded(hint, item, f"{path}[{number}]", strings) for number, (hint, item) in pairs]
    if result_type is Collection:
        return frozenset(result)
    return result if result_type is list else tuple(result)


def _of_mapping(hint: Any, value: Any, path: str, strings: Mapping[str, float]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(path, "an object", value)
    for key in value:
        _of_scalar(str, key, f"{path}: a key")
    return {key: decoded(hint, item, f"{path}.{key}", strings) for key, item in value.items()}


def _of_record(cls: Any, value: Any, path: str, strings: Mapping[str, float]) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(path, f"an object with the fields of {cls.__name__}", value)
    hints, required = _fields(cls)
    unknown = [key for key in value if key not in hints]
    if unknown:
        raise ValueError(f"{path}: unknown field {_shown(unknown[0])}; known: {', '.join(hints)}")
    missing = [name for name in required if name not in value]
    if missing:
        raise ValueError(f"{path}: missing field {', '.join(map(repr, missing))}")
    return cls(**{name: decoded(hints[name], item, f"{path}.{name}", strings) for name, item in value.items()})


def _of_choice(choices: Mapping[Any, Any], value: Any, path: str) -> Any:
    for plain, entry in choices.items():
        if type(plain) is type(value) and plain == value:
            return entry
    raise _wrong(path, f"one of {', '.join(map(repr, choices))}", value)


@functools.cache
def _fields(cls: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the type of each field of a dataclass, and the names of the fields without a default."""
    hints = typing.get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.init]
    required = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    return {field.name: hints[field.name] for field in fields}, required


def _words(hint: Any) -> str:
    return _WORDS.get(hint) or ("a list" if typing.get_origin(hint) in (tuple, list) else f"a {hint.__name__}")


def _wrong(path: str, expected: str, value: Any) -> ValueError:
    return ValueError(f"{path}: expected {expected}, got {_shown(value)}")


def _shown(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _LARGEST:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, float) and not math.isfinite(value):
        return f"the number {value}"
    if isinstance(value, Mapping):
        return "an object" if value else "{}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "[]"
    text = ascii(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
