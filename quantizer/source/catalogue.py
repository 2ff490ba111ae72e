"""The catalogue of quantizable operations: one entry an operation, as data.

A new operation is one more entry in ``CATALOGUE``. The finder recognises it through whatever name it was imported
under, because it compares the *object* that a name stands for, not the name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from typing import Literal

__all__ = ["CATALOGUE", "Kind", "Operand", "Operation", "operation", "operation_of"]

Kind = Literal["linear", "conv", "matmul", "residual_add"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """One operand of an operation that can be held in low precision.

    ``index`` is its place among the positional arguments and ``keyword`` its name as torch spells it.
    ``weight_axis`` is the axis of the output channels when the operand is a parameter (None: never a weight).
    """

    name: str
    index: int
    keyword: str
    weight_axis: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """A quantizable operation and all the ways Python code spells it.

    ``functions`` are dotted names of callables, ``methods`` names of ``Tensor`` methods, ``operators`` names of
    classes in ``ast`` (``MatMult`` for ``@``).
    """

    name: str
    kind: Kind
    operands: tuple[Operand, ...]
    functions: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()


def _product(name: str, first: str, second: str, **spelling: tuple[str, ...]) -> Operation:
    """A matrix product of two operands; a parameter on the right has its output channels last."""
    operands = (
        Operand(name="lhs", index=0, keyword=first, weight_axis=-2),
        Operand(name="rhs", index=1, keyword=second, weight_axis=-1),
    )
    return Operation(name=name, kind="matmul", operands=operands, **spelling)


def _weighted(name: str, kind: Kind, *functions: str) -> Operation:
    """``f(input, weight, ...)`` with the output channels on the weight's first axis."""
    operands = (
        Operand(name="input", index=0, keyword="input"),
        Operand(name="weight", index=1, keyword="weight", weight_axis=0),
    )
    return Operation(name=name, kind=kind, operands=operands, functions=functions)


CATALOGUE: tuple[Operation, ...] = (
    _weighted("linear", "linear", "torch.nn.functional.linear"),
    _weighted("conv1d", "conv", "torch.nn.functional.conv1d", "torch.conv1d"),
    _weighted("conv2d", "conv", "torch.nn.functional.conv2d", "torch.conv2d"),
    _weighted("conv3d", "conv", "torch.nn.functional.conv3d", "torch.conv3d"),
    _product("matmul", "input", "other", functions=("torch.matmul",), methods=("matmul",), operators=("MatMult",)),
    _product("bmm", "input", "mat2", functions=("torch.bmm",), methods=("bmm",)),
    Operation(
        name="add",
        kind="residual_add",
        operands=(Operand(name="lhs", index=0, keyword="input"), Operand(name="rhs", index=1, keyword="other")),
        functions=("torch.add",),
        operators=("Add",),
    ),
)


def operation(name: str) -> Operation:
    """The entry called ``name``."""
    return next(entry for entry in CATALOGUE if entry.name == name)


def _resolve(dotted: str) -> Callable[..., Any]:
    module, _, attribute = dotted.rpartition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


@lru_cache(maxsize=1)
def _by_identity() -> dict[int, Operation]:
    return {id(_resolve(dotted)): entry for entry in CATALOGUE for dotted in entry.functions}


def operation_of(function: object) -> Operation | None:
    """The entry that ``function`` is a spelling of, or None."""
    return _by_identity().get(id(function))
