"""Functions under decorators: finding the one that was written, and cloning what stands around it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

__all__ = ["between", "clone_chain", "innermost", "transplant", "variables_that_lead_to"]

_EMPTY = object()


def innermost(function: types.FunctionType, name: str | None = None) -> types.FunctionType:
    """The function that decorators wrap.

    Found through ``__wrapped__``, else (a decorator without ``functools.wraps``) through closure cells: a function
    made by another one is a wrapper where its cells lead to exactly one function that was written under ``name``.
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
    wrapper: types.FunctionType, inner: types.FunctionType, replacement: types.FunctionType
) -> types.FunctionType | None:
    """The same wrappers around ``replacement``; None where no closure cell leads to ``inner``."""
    clones = {id(inner): replacement}

    def clone(function: types.FunctionType) -> types.FunctionType:
        if id(function) in clones:
            return clones[id(function)]
        # Cells are filled after the clone is known: a wrapper may hold itself.
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        copied = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        clones[id(function)] = copied
        _copy_attributes(function, copied)
        for old, new in zip(function.__closure__ or (), cells, strict=True):
            value = _contents(old)
            if value is not _EMPTY:
                new.cell_contents = clone(value) if _leads_to(value, inner) else value
        wrapped = getattr(function, "__wrapped__", None)
        if isinstance(wrapped, types.FunctionType) and _leads_to(wrapped, inner):
            copied.__wrapped__ = clone(wrapped)  # type: ignore[attr-defined]
        return copied

    # A wrapper that knows the function as __wrapped__ only calls it through something that was not cloned.
    if not any(_leads_to(value, inner, cells_only=True) for value in _cells(wrapper)):
        return None
    return clone(wrapper)


def between(wrapper: types.FunctionType, inner: types.FunctionType) -> list[types.FunctionType]:
    """The functions around ``inner``, from ``wrapper`` on."""
    return [wrapper, *(found for found in _reached(wrapper) if found is not inner and _leads_to(found, inner))]


def variables_that_lead_to(inner: types.FunctionType, wrapper: types.FunctionType) -> set[str]:
    """The closure variables of a wrapper through which it knows ``inner``."""
    cells = zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True)
    return {name for name, cell in cells if _leads_to(_contents(cell), inner)}


def transplant(original: types.FunctionType, code: types.CodeType, namespace: dict[str, Any]) -> types.FunctionType:
    """A function with the code ``code`` and all else as in ``original``."""
    function = types.FunctionType(code, namespace, original.__name__, original.__defaults__, original.__closure__)
    _copy_attributes(original, function)
    return function


def _copy_attributes(original: types.FunctionType, function: types.FunctionType) -> None:
    function.__kwdefaults__ = dict(original.__kwdefaults__) if original.__kwdefaults__ else None
    function.__annotations__ = dict(original.__annotations__)
    function.__doc__ = original.__doc__
    function.__qualname__ = original.__qualname__
    function.__module__ = original.__module__
    function.__dict__.update(original.__dict__)


def _reached(function: types.FunctionType, cells_only: bool = False) -> list[types.FunctionType]:
    """Functions that a function's closure cells (and ``__wrapped__``) lead to, each once, without itself."""
    found: dict[int, types.FunctionType] = {id(function): function}
    waiting = [function]
    while waiting:
        current = waiting.pop()
        wrapped = () if cells_only else (getattr(current, "__wrapped__", None),)
        for value in (*_cells(current), *wrapped):
            if isinstance(value, types.FunctionType) and id(value) not in found:
                found[id(value)] = value
                waiting.append(value)
    return list(found.values())[1:]


def _leads_to(value: Any, inner: types.FunctionType, cells_only: bool = False) -> bool:
    if not isinstance(value, types.FunctionType):
        return False
    return value is inner or any(found is inner for found in _reached(value, cells_only))


def _cells(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        value = _contents(cell)
        if value is not _EMPTY:
            yield value


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell: the name was never bound
        return _EMPTY
