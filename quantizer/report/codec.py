"""The conversion of records to plain JSON values and back, which checks every value against its annotation.

JSON has no infinity and no NaN: they are written as the strings ``"inf"``, ``"-inf"`` and ``"nan"``.

Reading and atomic writing of ``report.json``.

A setting as a reader can give it: keywords of a call where the model was given in Python, else YAML of a run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml

from quantizer.common.paths import regular_file
from quantizer.common.plain_values import decoded, json_values, yaml_values
from quantizer.errors import QuantizerError
from quantizer.files import whole_file
from quantizer.report.record import VERSION, RunRecord

_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def mapping_from_record(record: RunRecord) -> dict[str, Any]:
    """Return ``record`` as JSON values."""
    mapping = {item.name: _encode(getattr(record, item.name), item.name) for item in dataclasses.fields(record)}
    record_from_mapping(mapping)  # raises on a wrong type now, not when the report is read
    return mapping


def record_from_mapping(mapping: Any, where: str = "report") -> RunRecord:
    """Return the record of which :func:`mapping_from_record` made the mapping."""
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


def write_text_atomic(path: Path | str, text: str) -> Path:
    """Write ``text`` as UTF-8 to a temporary file beside ``path``, then rename it to ``path``.

    After a failure or an interruption the former file is unchanged, and no temporary file is left.
    """
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")
    return Path(path)


def write_record(record: RunRecord, path: Path | str) -> Path:
    """Write ``record`` as JSON to ``path``."""
    text = json.dumps(mapping_from_record(record), indent=2, ensure_ascii=False, allow_nan=False)
    return write_text_atomic(path, text + "\n")


def read_record(path: Path | str) -> RunRecord:
    """Return the record in a file of :func:`write_record`."""
    path = Path(path)
    try:
        values = json_values(regular_file(path).read_bytes())
    except FileNotFoundError as error:
        raise QuantizerError(f"{path}: no such file; give the folder of a finished run") from error
    except (OSError, UnicodeDecodeError) as error:
        raise QuantizerError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:
        raise QuantizerError(f"{path}: not a JSON file ({error}); it is broken: run the configuration again") from error
    return record_from_mapping(values, str(path))


GIVEN_IN_PYTHON = "given in Python"
"""The name of a data set that a call in Python gave."""

_QUANTIZER = ("activations", "exclude", "weights")
"""Sections that a run's file holds in its ``quantizer`` section."""


def is_from_python(record: RunRecord) -> bool:
    """Return whether the run was a call of ``quantize_model``, which has no file to change."""
    data = record.config.get("data") or {}
    return (data.get("calibration") or {}).get("name") == GIVEN_IN_PYTHON


def shown_setting(setting: str, *, python: bool) -> str:
    """Return a setting to be pasted: ``exclude={"sites": ["head"]}``, or ``quantizer: {exclude: {sites: [head]}}``."""
    told: Mapping[str, Any] = yaml_values(setting.encode())
    ((section, values),) = told.items()
    if python:
        return f"{section}={_python(values)}"
    whole = {"quantizer": told} if section in _QUANTIZER else told
    return _flow(whole).removeprefix("{").removesuffix("}")


def _python(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: {_python(inside)}" for key, inside in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True).strip()
