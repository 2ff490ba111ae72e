"""The object that a running call calls, and how the text of the call refers to it.

The lookup runs no code of the model: attributes are read from where objects store them, never through properties.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import types
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quantizer.operations.catalogue import METHODS, Operation, operation_of

_UNKNOWN = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Called:
    """The object behind a call.

    Attributes:
        operation: the catalogue's entry for the object, if there is one.
        known: whether the object could be determined.
        instead: the form of the call in the text if it is not the operation's own name, so that the finder cannot
            recognize it; None: it is the name.
    """

    operation: Operation | None
    known: bool = True
    instead: str | None = None


def called(node: ast.expr, frame: types.FrameType) -> Called:
    """Return the object that the function expression of a call means in a running frame."""
    if isinstance(node, ast.Attribute) and node.attr in METHODS:
        base = _resolve(node.value, frame)
        # Take a base without a name, such as the result of a call, for a tensor.
        if base is _UNKNOWN or isinstance(base, Tensor):
            return Called(operation=METHODS[node.attr])
    value, plain = _resolve(node, frame), isinstance(node, ast.Name | ast.Attribute)
    partial = False
    while isinstance(value, functools.partial):
        value, partial = value.func, True
    entry = operation_of(value)
    if entry is None:
        return Called(operation=None, known=_is_known(value))
    if partial:
        return Called(operation=entry, instead="a functools.partial of")
    if isinstance(node, ast.Name) and node.id in frame.f_locals:
        return Called(operation=entry, instead="a local name for")
    if plain and _is_spelled_out(node, frame):
        return Called(operation=entry)
    return Called(operation=entry, instead="an attribute that holds" if plain else "an expression that gives")


def _is_known(value: Any) -> bool:
    """Return whether a value certainly is no operation of the catalogue: Python's builtins may call one."""
    return value is not _UNKNOWN and getattr(value, "__module__", None) != "builtins"


def _is_spelled_out(node: ast.expr, frame: types.FrameType) -> bool:
    """Return whether a dotted name consists of modules and tensor classes only, as the finder can follow it."""
    while isinstance(node, ast.Attribute):
        node = node.value
        base = _resolve(node, frame)
        if not isinstance(base, types.ModuleType) and not (isinstance(base, type) and issubclass(base, Tensor)):
            return False
    return True


def _resolve(node: ast.expr, frame: types.FrameType) -> Any:
    """Return the object that an expression means in a frame; ``_UNKNOWN`` if the expression is not simple."""
    if isinstance(node, ast.Name):
        for names in (frame.f_locals, frame.f_globals, vars(builtins)):
            if node.id in names:
                return names[node.id]
        return _UNKNOWN
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Attribute):
        return _attribute(_resolve(node.value, frame), node.attr)
    if isinstance(node, ast.Subscript):
        return _item(_resolve(node.value, frame), _resolve(node.slice, frame))
    if isinstance(node, ast.Call) and node.args:
        function = _resolve(node.func, frame)
        if function is functools.partial:
            inner = _resolve(node.args[0], frame)
            return functools.partial(inner) if callable(inner) else _UNKNOWN
        if function is getattr and len(node.args) > 1:
            name = _resolve(node.args[1], frame)
            return _attribute(_resolve(node.args[0], frame), name) if isinstance(name, str) else _UNKNOWN
    return _UNKNOWN


def _attribute(base: Any, name: str) -> Any:
    if base is _UNKNOWN:
        return _UNKNOWN
    if isinstance(base, types.ModuleType):
        # Read the module's dictionary, since getattr on a lazy module would import half a library.
        return base.__dict__.get(name, _UNKNOWN)
    if isinstance(base, nn.Module) and name in base._modules:
        return base._modules[name]
    found = inspect.getattr_static(base, name, _UNKNOWN)
    return found.__func__ if isinstance(found, staticmethod) else found


def _item(base: Any, key: Any) -> Any:
    if type(base) is dict and isinstance(key, str | int):
        return base.get(key, _UNKNOWN)
    if type(base) in (list, tuple) and isinstance(key, int) and -len(base) <= key < len(base):
        return base[key]
    return _UNKNOWN
