"""A setting as a reader can give it: keywords of a call where the model was given in Python, else YAML of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from quantizer.common.plain_values import yaml_values
from quantizer.report.record import RunRecord

GIVEN_IN_PYTHON = "given in Python"
"""The name of a data set that a call in Python gave."""

_QUANTIZER = ("activations", "exclude", "weights")
"""Sections that a run's file holds in its ``quantizer`` section."""


def is_from_python(record: RunRecord) -> bool:
    """Return whether the run was a call of ``quantize_model``, which has no file to change."""
    data = record.config.get("data") or {}
    return (data.get("calibration") or {}).get("name") == GIVEN_IN_PYTHON


def shown_setting(setting: str, *, python: bool) -> str:
    """Return a setting to be pasted: ``exclude={"sites": ["head"]}``, or ``quantizer: {exclude: {sites: [head]}}``.

    Args:
        setting: one section in YAML, such as that of a ``Cure``.
        python: whether it is for a call in Python.
    """
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
