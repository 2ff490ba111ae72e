"""An ``ExportedProgram`` of torch as the module that it unlifts to."""

from __future__ import annotations

from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from quantizer.errors import ProxyError

Model: TypeAlias = nn.Module | ExportedProgram
"""What a ``Quantizer`` takes."""

_MODULES: WeakKeyDictionary[ExportedProgram, nn.Module] = WeakKeyDictionary()


def module_of(model: Model) -> nn.Module:
    """Return the module of a program, the same each time, with its parameters and their names; a module as it is.

    The checks of the program's guards are left out: its examples bind what it was exported for, not the data.
    """
    if not isinstance(model, ExportedProgram):
        refuse_compiled(model)
        return model
    if model not in _MODULES:
        _MODULES[model] = _with_named_convolutions(model.module(check_guards=False))
    return _MODULES[model]


def refuse_compiled(model: object) -> None:
    """Raise for a model that is TorchScript as a whole, whose source is gone; a part of a model may be."""
    if isinstance(model, torch.jit.ScriptModule):
        raise ProxyError(
            f"{model.original_name} is compiled by torch.jit, and no Python source of it is left to quantize: pass the "
            "module that was scripted or traced"
        )


def _with_named_convolutions(module: fx.GraphModule) -> fx.GraphModule:
    """Call each convolution by the operator of its kind, as before ``run_decompositions``; it computes the same."""
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.convolution.default:
            node.target, node.args = _named_convolution(*node.args)
    module.recompile()
    return module


def _named_convolution(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, added: Any, groups: int
) -> tuple[Any, tuple[Any, ...]]:
    """Return the operator and its arguments for those of ``aten.convolution``; ``added`` is the output padding."""
    axes = len(stride)
    if not transposed:
        return getattr(torch.ops.aten, f"conv{axes}d").default, (x, weight, bias, stride, padding, dilation, groups)
    overloads = getattr(torch.ops.aten, f"conv_transpose{axes}d")
    function = overloads.default if axes == 1 else overloads.input
    return function, (x, weight, bias, stride, padding, added, groups, dilation)
