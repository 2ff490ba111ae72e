"""Simulation of a target's half precision in a frozen proxy, to score it without the target.

Tensors are half; matrix multiplications accumulate in float32 and round once. torch's own half kernels for CPUs do the
same, but take fifteen times as long.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from quantizer.numerics.formats import FLOAT16_MAX
from quantizer.observe.float16_modules import Float32Modules, convert_floats
from quantizer.observe.float16_overflow import MadeFloats, MaskTaint
from quantizer.rewrite.torch_products import product_name
from quantizer.utils.structure import mapped

_MARK = "_quantizer_simulation"


def simulate(proxy: nn.Module, dtype: torch.dtype, regions: Float32Modules) -> nn.Module:
    """Make a frozen proxy compute its floats in ``dtype``, in place; inputs and outputs stay float32.

    Wide modules stay float32.
    """
    if dtype is torch.float32:
        return proxy
    vars(proxy)[_MARK] = True
    pass_ = _Pass(dtype, regions.io_dtype(dtype), bool(regions.masked))
    # Before the hooks of ``convert_floats``: inputs are cast before the border of any module.
    proxy.register_forward_pre_hook(pass_.begin, with_kwargs=True)
    convert_floats(proxy, dtype, regions)
    proxy.register_forward_hook(pass_.end, always_call=True)
    return proxy


def is_simulation(model: nn.Module) -> bool:
    """Return whether ``simulate`` changed the type in which a model computes."""
    return _MARK in vars(model)


class _Pass:
    """The hooks around each pass of the proxy."""

    def __init__(self, dtype: torch.dtype, io_dtype: torch.dtype, masked: bool) -> None:
        self._dtype = dtype
        self._io_dtype = io_dtype
        self._masked = masked
        self.modes: list[ExitStack] = []

    def begin(self, proxy: nn.Module, args: Any, keywords: Any) -> Any:
        buffers = (buffer for buffer in proxy.buffers() if buffer.is_floating_point())
        self.modes.append(ExitStack())
        self.modes[-1].enter_context(_Target(self._dtype))
        self.modes[-1].enter_context(MadeFloats(self._dtype, self._masked, buffers))
        return mapped(lambda value: _cast(value, self._io_dtype), (args, keywords))

    def end(self, proxy: nn.Module, args: Any, result: Any) -> Any:
        # Registered with always_call: this also runs after an exception in the pass.
        self.modes.pop().close()
        return mapped(lambda value: _cast(value, torch.float32), result)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


class _Target(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that multiplies half tensors and reads masks as a target does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype
        self._masks = MaskTaint() if dtype is torch.float16 else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._masks is not None:
            # Also for a softmax in a wide module, whose input was half.
            args, kwargs = self._masks.read(func, args, kwargs)
        if not self._in_half((*args, *kwargs.values())):
            return func(*args, **kwargs)
        if product_name(func) is not None:
            args, kwargs = _pytree.tree_map(lambda value: _cast(value, torch.float32), (args, kwargs))
            return _pytree.tree_map(lambda value: _cast(value, self._dtype), func(*args, **kwargs))
        if self._masks is None:
            return func(*args, **kwargs)
        args, kwargs = tuple(map(_clamped, args)), {name: _clamped(value) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        self._masks.follow(func, args, kwargs, result)
        return result

    def _in_half(self, values: Any) -> bool:
        return any(
            value is self._dtype or (isinstance(value, Tensor) and value.dtype is self._dtype) for value in values
        )


def _clamped(value: Any) -> Any:
    """Return a number clamped to -FLOAT16_MAX, except -inf: torch does not fill half tensors with lower numbers."""
    return max(value, -FLOAT16_MAX) if isinstance(value, float) and value != -math.inf else value
