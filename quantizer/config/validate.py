"""Validation of a draft, with all problems of all sections in one error."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from quantizer.config.describe import KeyPath, Slot, nearest, path_text, paths_ending_in, slot_at, words_for
from quantizer.config.origin import Draft
from quantizer.config.section import Section
from quantizer.errors import ConfigError

S = TypeVar("S", bound=Section)

_HINTED = 100
"""How many problems get a suggestion; a file with more problems is no configuration."""


def finish(draft: Draft, schema: type[S], at: KeyPath = ()) -> S:
    """Return the validated section of a draft.

    Args:
        draft: the values, and the problems so far.
        schema: the section's class.
        at: the path of the section in the draft; a missing section has its default values.

    Raises:
        ConfigError: a list of all problems, in the order of the lines.
    """
    value = draft.value
    for key in at:
        value = value.get(key, {})
    section: S | None = None
    try:
        section = schema.model_validate(value)
    except ValidationError as error:
        note_problems(error, draft, schema, at)
    if draft.problems or section is None:
        raise ConfigError([text for _, text in sorted(draft.problems, key=lambda problem: problem[0])])
    return section


def note_problems(error: ValidationError, draft: Draft, schema: type[Section], at: KeyPath = ()) -> None:
    """Add each problem of ``error`` to the draft, with messages of this package."""
    for number, detail in enumerate(error.errors(include_url=False)):
        path = (*at, *detail["loc"])
        if any(path[: len(hole)] == hole for hole in draft.holes):
            continue
        if detail["type"] == "cross_field":
            for key, text in detail["ctx"]["problems"]:
                above, below = (at, key[1:]) if key.startswith("/") else (path, key)
                draft.add((*above, *filter(None, below.split("."))), text)
        else:
            draft.add(path, _explain(detail, schema, at, hint=number < _HINTED))


def check_keys(value: Mapping[Any, Any], draft: Draft, schema: type[Section]) -> None:
    """Add the unknown keys of the top level to the draft."""
    for key in value:
        if key not in schema.model_fields:
            draft.add((key,), _unknown(str(key), (), schema, (), hint=True))


def _explain(detail: ErrorDetails, schema: type[Section], at: KeyPath, *, hint: bool) -> str:
    """Return the message of a problem: the value, the expected values, and a suggestion."""
    path, value, kind = detail["loc"], detail["input"], detail["type"]
    if kind == "extra_forbidden":
        return _unknown(str(path[-1]), path[:-1], schema, at, hint=hint)
    if kind == "invalid_key":
        return f"the key is {words_for(path[-1])}; expected a name (in YAML: quote it if it is one)"
    slot = slot_at(schema, path)
    expected = f"; expected {slot.expected()}" if slot is not None else ""
    if kind == "missing":
        whole = slot_at(schema, path[:-1]) if isinstance(path[-1], int) else None
        return f"is missing; expected {whole.expected()}" if whole is not None else f"is missing{expected}"
    if kind == "too_long":
        return f"got a list of {detail['ctx']['actual_length']}{expected}"
    if kind == "string_too_short":
        return f"is empty{expected}; leave the key out where nothing is meant"
    return f"got {words_for(value)}{expected}{_hint(value, slot)}"


def _unknown(key: str, above: KeyPath, schema: type[Section], at: KeyPath, *, hint: bool) -> str:
    slot = slot_at(schema, above)
    names = slot.names() if slot is not None else []
    text = f"unknown key; expected one of {', '.join(names)}"
    if not hint:
        return text
    near = nearest(key, names)
    elsewhere = [path_text((*at, *path)) for path in paths_ending_in(schema, key)]
    if near is None and elsewhere:
        near = elsewhere[0]
    return text + (f"; did you mean {near!r}?" if near else "")


def _hint(value: Any, slot: Slot | None) -> str:
    if slot is None:
        return ""
    if value is None and slot.section is not None:
        return "; leave the key out for the default"
    if not isinstance(value, str):
        return ""
    near = nearest(value, slot.names()) if slot.section is None else None
    if near is not None:
        return f"; did you mean {near!r}?"
    if slot.annotation in (int, float):
        return _number_hint(value, slot.annotation)
    return f"; write [{value}]" if slot.child(0) is not None and value.isidentifier() else ""


def _number_hint(text: str, kind: type[int] | type[float]) -> str:
    # YAML 1.1 reads 1e-3 as text, because a float needs a dot.
    try:
        number = float(text)
        shown = str(int(number)) if kind is int else yaml.safe_dump(number).split("\n")[0]
    except (ValueError, OverflowError):
        return ""
    if (kind is int and number != int(number)) or not isfinite(number):
        return ""
    return f"; YAML reads this as text: write {shown}, without quotes"
