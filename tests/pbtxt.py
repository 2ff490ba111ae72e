"""A reader of protobuf's text format, as far as Triton's config.pbtxt uses it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_TOKEN = re.compile(r'\s*(?:#[^\n]*|(?P<token>"(?:[^"\\]|\\.)*"|-?[0-9]+|[A-Za-z_][A-Za-z0-9_]*|[\[\]{}:,]))')


def read_pbtxt(text: str) -> dict[str, Any]:
    """Return the fields of a message: a list of all values for each name, in order."""
    tokens = _tokens(text)
    message = _message(tokens, "")
    assert next(tokens, None) is None
    return message


def _tokens(text: str) -> Iterator[str]:
    place, text = 0, text.rstrip()
    while place < len(text):
        found = _TOKEN.match(text, place)
        assert found is not None, f"no token at {text[place : place + 20]!r}"
        place = found.end()
        if found["token"] is not None:
            yield found["token"]


def _message(tokens: Iterator[str], end: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    while (name := next(tokens, "")) != end:
        assert re.fullmatch("[A-Za-z_]+", name), f"{name!r} is no name of a field"
        mark = next(tokens)
        fields.setdefault(name, []).extend(_values(tokens, next(tokens) if mark == ":" else mark))
    return fields


def _values(tokens: Iterator[str], first: str) -> list[Any]:
    if first != "[":
        return [_value(tokens, first)]
    found: list[Any] = []
    token = next(tokens)
    while token != "]":
        found.append(_value(tokens, token))
        token = next(tokens)
        if token == ",":
            token = next(tokens)
            assert token != "]", "a comma before the end of a list"
        else:
            assert token == "]", f"no comma before {token!r}"
    return found


def _value(tokens: Iterator[str], first: str) -> Any:
    if first == "{":
        return _message(tokens, "}")
    if first.startswith('"'):
        return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], first[1:-1])
    return int(first) if re.fullmatch("-?[0-9]+", first) else first
