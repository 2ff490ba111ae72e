"""An ``ExportedProgram`` of torch as the module that it unlifts to."""

from __future__ import annotations

from typing import TypeAlias
from weakref import WeakKeyDictionary

from torch import nn
from torch.export import ExportedProgram

__all__ = ["Model", "module_of"]

Model: TypeAlias = nn.Module | ExportedProgram
"""What a ``Quantizer`` takes."""

_MODULES: WeakKeyDictionary[ExportedProgram, nn.Module] = WeakKeyDictionary()


def module_of(model: Model) -> nn.Module:
    """Return the module of a program, the same each time, with its parameters and their names; a module as it is.

    The checks of the program's guards are left out: its examples bind what it was exported for, not the data.
    """
    if not isinstance(model, ExportedProgram):
        return model
    if model not in _MODULES:
        _MODULES[model] = model.module(check_guards=False)
    return _MODULES[model]
