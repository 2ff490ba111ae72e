"""Values out of files: whatever a text holds, it is a value of the type that was asked for, or one clear error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import pytest

from quantizer.utils.plain_values import decoded, json_values, yaml_values


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    sizes: tuple[int, ...] = ()
    share: float | None = None


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner | None = None
    kinds: Mapping[str, Literal["a", "b"]] = field(default_factory=dict)
    colours: Collection[Colour] = ()
    pair: tuple[float, str] | None = None


@pytest.mark.parametrize(
    ("values", "made"),
    [
        ({"name": "x"}, Outer("x")),
        ({"name": "x", "inner": {"sizes": [1, 2], "share": 1}}, Outer("x", Inner((1, 2), 1.0))),
        ({"name": "x", "kinds": {"k": "a"}, "colours": ["red"]}, Outer("x", None, {"k": "a"}, frozenset([Colour.RED]))),
        ({"name": "x", "pair": [1.5, "y"]}, Outer("x", pair=(1.5, "y"))),
    ],
)
def test_values_become_records(values: Any, made: Outer) -> None:
    assert decoded(Outer, values, "file") == made


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], r"file: expected an object with the fields of Outer, got \[\]"),
        ({}, "file: missing field 'name'"),
        ({"name": "x", "more": 1}, "file: unknown field 'more'; known: name, inner, "),
        ({"name": 1}, "file.name: expected a string, got 1"),
        ({"name": "half \ud800"}, "file.name: expected a string of whole characters"),
        ({"name": "x", "inner": {"sizes": [1, "2"]}}, r"file.inner.sizes\[1\]: expected a whole number, got '2'"),
        ({"name": "x", "inner": {"sizes": [True]}}, r"file.inner.sizes\[0\]: expected a whole number, got True"),
        ({"name": "x", "inner": {"sizes": [2**63]}}, r"sizes\[0\]: expected a whole number that fits in 64 bits"),
        ({"name": "x", "inner": {"share": 10**400}}, "file.inner.share: expected a number"),
        ({"name": "x", "inner": {"share": "x"}}, "file.inner.share: expected a number or null, got 'x'"),
        ({"name": "x", "kinds": {"k": "c"}}, "file.kinds.k: expected one of 'a', 'b', got 'c'"),
        ({"name": "x", "kinds": {1: "a"}}, "file.kinds: a key: expected a string, got 1"),
        ({"name": "x", "colours": ["blue"]}, r"file.colours\[0\]: expected one of 'red', got 'blue'"),
        ({"name": "x", "pair": [1.5]}, "file.pair: expected a list of 2, got a list of 1"),
    ],
)
def test_other_values_are_named_with_their_place(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoded(Outer, values, "file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff", "can't decode byte"),
        (b"{", "Expecting property name"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deep"),
        (b'{"a": "\\ud800"}', "half a character"),
        (b"9" * 5_000, "Exceeds the limit"),
    ],
    ids=["binary", "cut", "deep", "surrogate", "digits"],
)
def test_texts_that_are_no_json(text: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        json_values(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff", "can't decode byte"),
        (b"a: [1", "expected ',' or ']'"),
        # libyaml recurses for each level: this text ended the process.
        (b"[" * 100_000 + b"]" * 100_000, "nested more than 100 deep"),
        (b"- " * 5_000 + b"1", "nested more than 100 deep"),
        (b"a: 2001-99-99", "month must be in 1..12"),
        (b"a: " + b"9" * 5_000, "Exceeds the limit"),
        (b"a: !!python/object:os.system {}", "could not determine a constructor"),
    ],
    ids=["binary", "cut", "deep", "deep list", "date", "digits", "object"],
)
def test_texts_that_are_no_yaml(text: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        yaml_values(text)
