"""Functions under decorators: search for the function as written, and copies of its wrappers.

A function that needs a host gets it as a keyword, through the wrappers around it. A wrapper that filters or reads its
keywords, or sometimes calls the function without them, would drop the host or fail on it; its source tells.
"""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from quantizer.errors import SourceError
from quantizer.rewrite.closures import cells, contents, copy_attributes, rebound
from quantizer.rewrite.source_file import definition_of


def innermost(function: types.FunctionType, name: str | None = None) -> types.FunctionType:
    """Return the function that decorators wrap.

    The search follows ``__wrapped__``, else (a decorator without ``functools.wraps``) closure cells: a function made by
    another one is a wrapper if its cells lead to exactly one function that was written under ``name``.
    """
    name = name or function.__name__
    seen: set[int] = set()
    while id(function) not in seen:
        seen.add(id(function))
        wrapped = getattr(function, "__wrapped__", None)
        if isinstance(wrapped, types.FunctionType):
            function = wrapped
        elif function.__code__.co_name != name and "<locals>." in function.__code__.co_qualname:
            inner = [found for found in _reached(function) if found.__code__.co_name == name]
            function = inner[0] if len(inner) == 1 else function
    return function


def clone_chain(
    wrapper: types.FunctionType,
    inner: types.FunctionType,
    replacement: types.FunctionType,
    registries: Mapping[int, Any] = types.MappingProxyType({}),
) -> types.FunctionType | None:
    """Return the same wrappers around ``replacement``; None if no closure cell leads to ``inner``.

    ``registries`` take the place of others, which are given by their ids.
    """
    # A wrapper that holds the function only as __wrapped__ calls it through something that was not cloned.
    if not any(_leads_to(value, inner, cells_only=True) for value in cells(wrapper)):
        return None
    clone: types.FunctionType = rebound(
        wrapper, lambda value: replacement if value is inner else registries.get(id(value))
    )
    return clone


def between(wrapper: types.FunctionType, inner: types.FunctionType) -> list[types.FunctionType]:
    """Return the functions around ``inner``, from ``wrapper`` on."""
    return [wrapper, *(found for found in _reached(wrapper) if found is not inner and _leads_to(found, inner))]


def registries_of(wrapper: types.FunctionType, inner: types.FunctionType) -> Iterator[MutableMapping[Any, Any]]:
    """Yield the registries in closure cells of wrappers around ``inner``, from which they choose what to call."""
    for function in between(wrapper, inner):
        yield from (value for value in cells(function) if isinstance(value, MutableMapping))


def copied_registry(registry: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """Return a registry of its own with the same values, which are not copied."""
    copied = copy.copy(registry)
    # A class of registries holds what was added in attributes.
    for name, value in vars(copied).items() if hasattr(copied, "__dict__") else ():
        if isinstance(value, MutableMapping):
            vars(copied)[name] = copy.copy(value)
    return copied


def variables_that_lead_to(inner: types.FunctionType, wrapper: types.FunctionType) -> set[str]:
    """Return the closure variables of a wrapper that lead to ``inner``."""
    named = zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True)
    return {name for name, cell in named if _leads_to(contents(cell), inner)}


def transplant(original: types.FunctionType, code: types.CodeType, namespace: dict[str, Any]) -> types.FunctionType:
    """Return a copy of ``original`` with the code ``code``."""
    function = types.FunctionType(code, namespace, original.__name__, original.__defaults__, original.__closure__)
    copy_attributes(original, function)
    return function


def _reached(function: types.FunctionType, cells_only: bool = False) -> list[types.FunctionType]:
    """Return the functions that closure cells (and ``__wrapped__``) lead to, each once, without the function itself."""
    found: dict[int, types.FunctionType] = {id(function): function}
    waiting = [function]
    while waiting:
        current = waiting.pop()
        wrapped = () if cells_only else (getattr(current, "__wrapped__", None),)
        for value in (*cells(current), *wrapped):
            if isinstance(value, types.FunctionType) and id(value) not in found:
                found[id(value)] = value
                waiting.append(value)
    return list(found.values())[1:]


def _leads_to(value: Any, inner: types.FunctionType, cells_only: bool = False) -> bool:
    if not isinstance(value, types.FunctionType):
        return False
    return value is inner or any(found is inner for found in _reached(value, cells_only))


def hand_on_keywords(wrapper: types.FunctionType, inner: types.FunctionType) -> bool:
    """Return whether all wrappers around ``inner`` only pass all of their further keywords on to it."""
    return all(_hands_on(function, inner) for function in between(wrapper, inner))


def _hands_on(wrapper: types.FunctionType, inner: types.FunctionType) -> bool:
    """Return whether a wrapper's text passes ``**keywords`` in each call of the wrapped function, and nowhere else."""
    try:
        node = definition_of(wrapper)
    except SourceError:
        return False
    if node is None or node.args.kwarg is None:
        return False
    keywords, wrapped = node.args.kwarg.arg, variables_that_lead_to(inner, wrapper)
    body = [found for statement in node.body for found in ast.walk(statement)]
    if any(isinstance(found, ast.arg) and found.arg in {keywords, *wrapped} for found in body):
        return False
    handed = [found for found in body if isinstance(found, ast.Call) and _hands(found, wrapped, keywords)]
    names = [found.id for found in body if isinstance(found, ast.Name)]
    if {"locals", "vars"} & {*names}:
        return False
    uses = sum(names.count(name) for name in wrapped)
    return len(handed) == names.count(keywords) == uses > 0


def _hands(call: ast.Call, wrapped: set[str], keywords: str) -> bool:
    """Return whether a call is ``wrapped(..., **keywords)``."""
    starred = [word.value for word in call.keywords if word.arg is None]
    return (
        isinstance(call.func, ast.Name)
        and call.func.id in wrapped
        and any(isinstance(value, ast.Name) and value.id == keywords for value in starred)
    )
