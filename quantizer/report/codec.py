"""Between records and plain JSON values, with every value checked against its annotation.

JSON has no infinity and no NaN: they are written as the strings ``"inf"``, ``"-inf"`` and ``"nan"``.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from quantizer.errors import QuantizerError
from quantizer.report.record import VERSION
from quantizer.report.record import RunRecord

__all__ = ["mapping_from_record", "record_from_mapping"]

_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_WORDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


def mapping_from_record(record: RunRecord) -> dict[str, Any]:
    """``record`` as JSON values only.

    Raises:
        QuantizerError: a value that JSON cannot hold, or that is not of the type its field declares.
    """
    mapping = {item.name: _encode(getattr(record, item.name), item.name) for item in dataclasses.fields(record)}
    record_from_mapping(mapping)  # what is written can be read: a wrong type is found here, not by the reader
    return mapping


def record_from_mapping(mapping: Any, where: str = "report") -> RunRecord:
    """The record that :func:`mapping_from_record` gave.

    Args:
        mapping: JSON values.
        where: what is being read, for messages.

    Raises:
        QuantizerError: another version, a missing or unknown field, or a value of the wrong type.
    """
    if not isinstance(mapping, Mapping):
        raise QuantizerError(f"{where}: expected an object with the fields of a run record, got {_name(mapping)}")
    version = mapping.get("version")
    if version != VERSION or isinstance(version, bool):
        raise QuantizerError(
            f"{where}: version {version!r}, but this quantizer reads version {VERSION} only; "
            "read it with the quantizer that wrote it, or run the configuration again"
        )
    record = _decode(RunRecord, mapping, where)
    assert isinstance(record, RunRecord)
    return record


def _encode(value: Any, path: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _encode(getattr(value, item.name), f"{path}.{item.name}") for item in _fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _encode(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, PurePath):
        return value.as_posix()
    raise QuantizerError(
        f"{path}: a value of type {type(value).__name__} cannot be written to a report; give a string, number or list"
    )


def _fields(value: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(value)


def _decode(hint: Any, value: Any, path: str) -> Any:
    """``value`` as the type ``hint``, which is one of those that records use."""
    if hint is Any:
        return value
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return _decode_union(typing.get_args(hint), value, path)
    if origin is tuple:
        return _decode_tuple(typing.get_args(hint), value, path)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise _wrong(path, "an object", value)
        item_hint = typing.get_args(hint)[1]
        return {key: _decode(item_hint, item, f"{path}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return _decode_record(hint, value, path)
    if hint is float:
        if isinstance(value, str) and value in _NON_FINITE:
            return _NON_FINITE[value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise _wrong(path, _WORDS[hint], value)


def _decode_union(options: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in options:
        return None
    rest = [option for option in options if option is not type(None)]
    if len(rest) == 1:
        return _decode(rest[0], value, path)
    exact = [option for option in rest if type(value) is option]  # 3 stays an int where an int or a float may stand
    for option in exact or rest:
        try:
            return _decode(option, value, path)
        except QuantizerError:
            continue
    raise _wrong(path, " or ".join(_WORDS[option] for option in options), value)


def _decode_tuple(hints: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _wrong(path, "a list", value)
    if hints[-1] is Ellipsis:
        hints = (hints[0],) * len(value)
    if len(hints) != len(value):
        raise _wrong(path, f"a list of {len(hints)}", value)
    return tuple(_decode(hint, item, f"{path}[{n}]") for n, (hint, item) in enumerate(zip(hints, value, strict=True)))


def _decode_record(cls: Any, value: Any, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(path, f"an object with the fields of {cls.__name__}", value)
    hints = typing.get_type_hints(cls)
    known = {item.name: item for item in _fields(cls)}
    unknown = sorted(set(value) - set(known))
    if unknown:
        raise QuantizerError(f"{path}: unknown field {unknown[0]!r}; known: {', '.join(known)}")
    required = [
        name
        for name, item in known.items()
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    ]
    missing = [name for name in required if name not in value]
    if missing:
        raise QuantizerError(f"{path}: missing field {', '.join(map(repr, missing))}; the file is broken: run again")
    return cls(**{name: _decode(hints[name], item, f"{path}.{name}") for name, item in value.items()})


def _wrong(path: str, expected: str, value: Any) -> QuantizerError:
    return QuantizerError(f"{path}: expected {expected}, got {_name(value)}")


def _name(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
