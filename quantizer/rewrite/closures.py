"""Objects in closure cells, ``__self__`` and arguments of partials, and copies of functions with other objects."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

_UNBOUND = object()


def cells(function: types.FunctionType) -> Iterator[Any]:
    """Yield the contents of a function's closure cells."""
    for cell in function.__closure__ or ():
        value = contents(cell)
        if value is not _UNBOUND:
            yield value


def held(value: Any) -> list[Any]:
    """Return all objects that a function, method or ``functools.partial`` reaches, including itself, each once."""
    reached: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if id(current) not in reached:
            reached[id(current)] = current
            waiting += _parts(current)
    return list(reached.values())


def rebound(value: Any, twin: Callable[[Any], Any], *, shared: bool = False) -> Any:
    """Return a copy of a function, method or partial with ``twin(x)`` in place of each x whose twin is not None.

    A value that reaches no such x is returned unchanged. ``shared``: the copy shares all other closure cells with the
    original, so that a new binding in one of them applies to both.
    """
    clones: dict[int, Any] = {}

    def clone(part: Any) -> Any:
        if id(part) in clones:
            return clones[id(part)]
        other = twin(part)
        if other is not None:
            return other
        if all(twin(inner) is None for inner in held(part)):
            return part
        if isinstance(part, types.MethodType):
            return types.MethodType(clone(part.__func__), clone(part.__self__))
        if isinstance(part, functools.partial):
            keywords = {name: clone(argument) for name, argument in part.keywords.items()}
            partial = functools.partial(clone(part.func), *map(clone, part.args), **keywords)
            vars(partial).update({name: clone(attribute) for name, attribute in vars(part).items()})
            return partial
        return clone_function(part)

    def clone_function(function: types.FunctionType) -> types.FunctionType:
        # Cells are filled after the clone is registered, because a function may contain itself.
        new_cells = tuple(
            old
            if shared and (contents(old) is _UNBOUND or all(twin(part) is None for part in held(contents(old))))
            else types.CellType()
            for old in function.__closure__ or ()
        )
        copied = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, new_cells
        )
        clones[id(function)] = copied
        copy_attributes(function, copied)
        if function.__defaults__:
            copied.__defaults__ = tuple(map(clone, function.__defaults__))
        if function.__kwdefaults__:
            copied.__kwdefaults__ = {name: clone(value) for name, value in function.__kwdefaults__.items()}
        for old, new in zip(function.__closure__ or (), new_cells, strict=True):
            value = contents(old)
            if value is not _UNBOUND and new is not old:
                new.cell_contents = clone(value)
        if hasattr(function, "__wrapped__"):
            copied.__wrapped__ = clone(function.__wrapped__)  # type: ignore[attr-defined]
        return copied

    return clone(value)


def copy_attributes(original: types.FunctionType, function: types.FunctionType) -> None:
    """Copy all attributes of ``original`` to ``function`` except code, globals, defaults and closure."""
    function.__kwdefaults__ = dict(original.__kwdefaults__) if original.__kwdefaults__ else None
    if sys.version_info >= (3, 14) and original.__annotate__ is not None:
        # Annotations are evaluated when they are read, and may name what exists for type checkers only.
        function.__annotate__ = original.__annotate__
    else:
        function.__annotations__ = dict(original.__annotations__)
    function.__doc__ = original.__doc__
    function.__qualname__ = original.__qualname__
    function.__module__ = original.__module__
    function.__dict__.update(original.__dict__)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, types.FunctionType):
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*cells(value), *defaults, *([value.__wrapped__] if hasattr(value, "__wrapped__") else ())]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values(), *vars(value).values()]
    return []


def contents(cell: types.CellType) -> Any:
    """Return the content of a cell; a sentinel if the name was never bound."""
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell: the name was never bound
        return _UNBOUND
