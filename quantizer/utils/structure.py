"""Leaves of the nested structures that models take and return.

torch's pytree handles tuples, lists, dictionaries and registered classes. Models also return unregistered dataclasses,
classes of attrs and mappings of libraries, which this file handles as well.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

EXPORTED = "exported_outputs"
"""The attribute of a model with the names of the outputs that its files contain; a model without it exports all."""

_PLAIN = (Tensor, bool, int, float, str, type(None))


def leaves(value: Any) -> list[Any]:
    """Return the leaves of a structure, in order."""
    return flattened(value)[0]


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a structure with ``function(leaf)`` in place of each leaf."""
    leaf_values, rebuild = flattened(value)
    return rebuild([function(leaf) for leaf in leaf_values])


def flattened(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the leaves of a structure, and a function that rebuilds the structure with other leaves."""
    known, tree = pytree.tree_flatten(value)
    inside = [_parts(leaf) for leaf in known]
    if all(parts is None for parts in inside):
        return known, lambda replaced: pytree.tree_unflatten(replaced, tree)
    below = [None if parts is None else flattened(parts) for parts in inside]
    all_leaves = [
        each for leaf, nested in zip(known, below, strict=True) for each in ([leaf] if nested is None else nested[0])
    ]

    def rebuilt(replaced: Sequence[Any]) -> Any:
        remaining, nodes = list(replaced), []
        for leaf, nested in zip(known, below, strict=True):
            count = 1 if nested is None else len(nested[0])
            own_leaves, remaining = remaining[:count], remaining[count:]
            nodes.append(own_leaves[0] if nested is None else _with_parts(leaf, nested[1](own_leaves)))
        return pytree.tree_unflatten(nodes, tree)

    return all_leaves, rebuilt


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return the named parts of a mapping with text keys, a dataclass or a class of attrs; otherwise None."""
    if isinstance(value, type):
        return None
    if isinstance(value, Mapping):
        return dict(value) if all(isinstance(key, str) for key in value) else None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(type(value), "__attrs_attrs__"):
        return {field.name: getattr(value, field.name) for field in type(value).__attrs_attrs__}
    return dict(vars(value)) if isinstance(value, SimpleNamespace) else None


def exported(model: Any, output: Any) -> Any:
    """Return the part of a model's output that its files contain: the names in ``exported_outputs``, or all of it."""
    names, fields = getattr(model, EXPORTED, ()), fields_of(output)
    if fields is None or not names or not all(isinstance(fields.get(name), Tensor) for name in names):
        return output
    return {name: value for name, value in fields.items() if name in names}


def _parts(leaf: Any) -> Any:
    """Return the parts of a structure that torch takes for a leaf; None for a real leaf."""
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
            # A frozen class refuses setattr().
            object.__setattr__(copied, name, part)
    return copied
