"""The functions of a class that may be rewritten: its own and those of its bases, except torch's containers."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.recurrence.layer import RecurrentLayer
from quantizer.proxy.recurrence.recurrence import Recurrence
from quantizer.proxy.site import SourceCall

FUNCTIONS = (types.FunctionType, property, staticmethod, classmethod)

# These compute nothing; the additions in their source are of indices.
_LEFT_ALONE = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

# Children that instrumentation adds: a model's loops over its children must not see them.
HIDDEN = (SourceCall, OperandQuantizer, Recurrence, RecurrentLayer)

# Python calls these without their name in the text, for example in a loop over a module.
IMPLICIT = frozenset({"__iter__", "__len__", "__getitem__", "__contains__", "__reversed__"})


def own_functions(cls: type) -> dict[str, Any]:
    """Return the functions that a class itself defines, by name, and its ``forward`` even if that is no function."""
    return {name: own for name, own in vars(cls).items() if name == "forward" or isinstance(own, FUNCTIONS)}


def reachable_attributes(cls: type, reachable: frozenset[str]) -> Iterator[tuple[type, str, Any]]:
    """Yield every reachable attribute of a class and its bases, the most derived first."""
    for base in cls.__mro__:
        if is_ours(base):
            yield from ((base, name, attribute) for name, attribute in vars(base).items() if name in reachable)


def is_ours(cls: type) -> bool:
    """Return whether the functions of ``cls`` may be rewritten."""
    left_alone = (*_LEFT_ALONE, OperandQuantizer, Recurrence)
    return cls is not object and cls not in left_alone and not issubclass(cls, SourceCall)
