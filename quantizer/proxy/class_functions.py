"""The functions of a class that may be rewritten: its own and those of its bases, containers of torch left out."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.site import Site

__all__ = ["FUNCTIONS", "IMPLICIT", "SITES", "is_ours", "own_functions", "reachable_attributes"]

FUNCTIONS = (types.FunctionType, property, staticmethod, classmethod)

# They compute nothing, and the additions in their source are of indices.
_LEFT_ALONE = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

# What a model that was instrumented before holds already, which must see its own parts.
SITES = (Site, OperandQuantizer)

# Python calls these without their name in the text: in a loop over a module, say.
IMPLICIT = frozenset({"__iter__", "__len__", "__getitem__", "__contains__", "__reversed__"})


def own_functions(cls: type) -> dict[str, Any]:
    """Return what a class itself defines and may run, by name; its forward too where that is no function."""
    return {name: own for name, own in vars(cls).items() if name == "forward" or isinstance(own, FUNCTIONS)}


def reachable_attributes(cls: type, reachable: frozenset[str]) -> Iterator[tuple[type, str, Any]]:
    """Yield every reachable attribute of a class and its bases, the most derived first."""
    for base in cls.__mro__:
        if is_ours(base):
            yield from ((base, name, attribute) for name, attribute in vars(base).items() if name in reachable)


def is_ours(cls: type) -> bool:
    """Return whether the functions of ``cls`` may be rewritten."""
    return cls is not object and cls not in _LEFT_ALONE and cls not in SITES
