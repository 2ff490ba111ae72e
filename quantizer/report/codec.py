"""The conversion of records to plain JSON values and back, which checks every value against its annotation.

JSON has no infinity and no NaN: they are written as the strings ``"inf"``, ``"-inf"`` and ``"nan"``.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from quantizer.common.plain_values import decoded
from quantizer.errors import QuantizerError
from quantizer.report.record import VERSION, RunRecord

_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def mapping_from_record(record: RunRecord) -> dict[str, Any]:
    """Return ``record`` as JSON values.

    Raises:
        QuantizerError: a value cannot be written as JSON, or has not the type that its field declares.
    """
    mapping = {item.name: _encode(getattr(record, item.name), item.name) for item in dataclasses.fields(record)}
    record_from_mapping(mapping)  # raises on a wrong type now, not when the report is read
    return mapping


def record_from_mapping(mapping: Any, where: str = "report") -> RunRecord:
    """Return the record of which :func:`mapping_from_record` made the mapping.

    Args:
        mapping: JSON values.
        where: the name of the source, for messages.

    Raises:
        QuantizerError: the version is another one, a field is missing or unknown, or a value has the wrong type.
    """
    if not isinstance(mapping, Mapping):
        raise QuantizerError(f"{where}: expected an object with the fields of a run record, got {_name(mapping)}")
    version = mapping.get("version")
    if version != VERSION or isinstance(version, bool):
        raise QuantizerError(
            f"{where}: version {version!r}, but this quantizer reads version {VERSION} only; "
            "read it with the quantizer that wrote it, or run the configuration again"
        )
    try:
        record: RunRecord = decoded(RunRecord, mapping, where, _NON_FINITE)
    except ValueError as error:
        raise QuantizerError(f"{error}; the file is broken: run the configuration again") from error
    return record


def _encode(value: Any, path: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            item.name: _encode(getattr(value, item.name), f"{path}.{item.name}") for item in dataclasses.fields(value)
        }
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


def _name(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
