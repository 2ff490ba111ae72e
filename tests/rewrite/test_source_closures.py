"""Functions that hold something else: clones that share nothing with what they were made of but what stays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from quantizer.rewrite.closures import held, rebound


class Thing:
    """Something that has a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def named(self, before: str = "") -> str:
        return before + self.name


def _called(function: Callable[..., str]) -> Callable[..., str]:
    return lambda *args, **keywords: function(*args, **keywords)


def _wrapped(thing: Thing) -> Callable[..., str]:
    @functools.wraps(thing.named)
    def outer(before: str = "", *, after: str = "") -> str:
        return thing.named(before) + after

    return outer


def _recursive(thing: Thing) -> Callable[..., str]:
    def count(before: str = "", times: int = 2) -> str:
        return before + thing.name if times == 0 else count(before, times - 1)

    return count


HOLDERS: dict[str, Callable[[Thing], Callable[..., str]]] = {
    "method": lambda thing: thing.named,
    "closure": lambda thing: lambda before="": thing.named(before),
    "closure-of-closure": lambda thing: _called(_called(thing.named)),
    "wraps": _wrapped,
    "partial": lambda thing: functools.partial(Thing.named, thing),
    "partial-of-closure": lambda thing: functools.partial(_called(thing.named)),
    "partial-keyword": lambda thing: functools.partial(lambda before="", *, held: held.named(before), held=thing),
    "holds-itself": _recursive,
}


@pytest.mark.parametrize("name", HOLDERS)
def test_it_holds_the_twin(name: str) -> None:
    first, second = Thing("first"), Thing("second")
    function = HOLDERS[name](first)
    assert any(part is first for part in held(function))
    clone = rebound(function, lambda value: second if value is first else None)
    assert clone("the ") == "the second"
    assert function("the ") == "the first"
    assert not any(part is first for part in held(clone))
    assert type(clone) is type(function)


@pytest.mark.parametrize("name", HOLDERS)
def test_it_is_itself_where_nothing_has_a_twin(name: str) -> None:
    function = HOLDERS[name](Thing("first"))
    assert rebound(function, lambda value: None) is function


def test_attributes_and_defaults_stay() -> None:
    def function(before: str = "a ", *, after: str = "!") -> str:
        return thing.named(before) + after

    thing: Any = Thing("first")
    function.mark = "kept"  # type: ignore[attr-defined]
    clone = rebound(function, lambda value: Thing("second") if value is thing else None)
    assert clone() == "a second!"
    assert (clone.mark, clone.__qualname__, clone.__kwdefaults__) == ("kept", function.__qualname__, {"after": "!"})


def test_a_name_that_is_never_bound() -> None:
    first = Thing("first")

    def function() -> str:
        return first.name if first else missing

    if first is None:
        missing = ""
    assert rebound(function, lambda value: Thing("second") if value is first else None)() == "second"
