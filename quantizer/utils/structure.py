"""The leaves of what models take and return, whatever structure they are in.

torch looks into tuples, lists and dictionaries, and into classes that were registered with it. Models return others
too: dataclasses and classes of attrs that nobody registered, named ones among them, and mappings of libraries.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

_PLAIN = (Tensor, bool, int, float, str, type(None))


def leaves(value: Any) -> list[Any]:
    """Return the leaves of a structure, in order."""
    return flattened(value)[0]


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a structure with ``function(leaf)`` in the place of each leaf."""
    found, rebuilt = flattened(value)
    return rebuilt([function(leaf) for leaf in found])


def flattened(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the leaves of a structure, and a function that returns the structure with other leaves."""
    known, tree = pytree.tree_flatten(value)
    inside = [_parts(leaf) for leaf in known]
    if all(parts is None for parts in inside):
        return known, lambda given: pytree.tree_unflatten(given, tree)
    below = [None if parts is None else flattened(parts) for parts in inside]
    found = [each for leaf, one in zip(known, below, strict=True) for each in ([leaf] if one is None else one[0])]

    def rebuilt(given: Sequence[Any]) -> Any:
        rest, made = list(given), []
        for leaf, one in zip(known, below, strict=True):
            count = 1 if one is None else len(one[0])
            mine, rest = rest[:count], rest[count:]
            made.append(mine[0] if one is None else _with_parts(leaf, one[1](mine)))
        return pytree.tree_unflatten(made, tree)

    return found, rebuilt


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return the named parts of a mapping by text, a dataclass or a class of attrs; None for anything else."""
    if isinstance(value, type):
        return None
    if isinstance(value, Mapping):
        return dict(value) if all(isinstance(key, str) for key in value) else None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(type(value), "__attrs_attrs__"):
        return {field.name: getattr(value, field.name) for field in type(value).__attrs_attrs__}
    return dict(vars(value)) if isinstance(value, SimpleNamespace) else None


def _parts(leaf: Any) -> Any:
    """Return what is in a structure that torch takes for a leaf; None if it is a leaf."""
    if isinstance(leaf, _PLAIN):
        return None
    fields = fields_of(leaf)
    if fields is None and isinstance(leaf, list | tuple):
        return [*leaf]
    return fields


def _with_parts(value: Any, parts: Any) -> Any:
    """Return a copy of a structure with other parts, as ``_parts`` returned them."""
    if isinstance(value, tuple):
        return tuple.__new__(type(value), parts)
    if isinstance(value, Mapping) and not hasattr(value, "__setitem__"):
        return parts
    copied = copy.copy(value)
    if isinstance(value, list):
        copied[:] = parts
        return copied
    for name, part in parts.items():
        if isinstance(value, Mapping):
            copied[name] = part
        else:
            # A frozen class refuses it otherwise.
            object.__setattr__(copied, name, part)
    return copied
