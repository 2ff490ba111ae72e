"""The check that a frozen site is called with the weight that was frozen.

A frozen site computes with its stored codes, whatever tensor its call gets. Code that picks a weight at run time
(``self.experts[i]``, ``self.table[:n]``) may pass another weight than in calibration.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.errors import ProxyError
from quantizer.proxy.weight import WeightView

_SAMPLE = 256
"""About how many values of a computed weight are compared."""

_OTHER = 0.5
"""From this relative error of the sample on, it is another weight: other floats of the same weight differ by far less,
and two weights by 1.4."""


class FrozenOperand:
    """The frozen parameter of one operand, or the frozen part of a parameter.

    Copies and casts of the proxy have other tensors, in which the parameter cannot be recognized: they do not check.
    """

    def __init__(self, name: str = "", parameter: nn.Parameter | None = None, view: WeightView | None = None) -> None:
        self._name = name
        self._parameter = None if parameter is None else weakref.ref(parameter)
        self._view = view

    def check(self, value: Tensor) -> None:
        """Raise if ``value`` is not the weight that was frozen, nor this weight spread over a batch."""
        parameter = None if self._parameter is None else self._parameter()
        if parameter is None or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        view = self._view
        shape = tuple(parameter.shape) if view is None else tuple(view.shape[axis] for axis in view.order)
        same = value.untyped_storage()._cdata == parameter.untyped_storage()._cdata
        offset = value.storage_offset() - parameter.storage_offset() if same else -1
        if tuple(value.shape) == shape and offset == (0 if view is None else view.offset):
            return
        weight = parameter if view is None else view.of(parameter)
        _require_alike(self._name, shape, _sample(weight), value)

    def follow(self, replaced: Mapping[int, tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Look at the second of a pair of parameters where the first, by its id, was the one that was frozen."""
        parameter = None if self._parameter is None else self._parameter()
        if parameter is not None and id(parameter) in replaced:
            self._parameter = weakref.ref(replaced[id(parameter)][1])

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenOperand:
        return FrozenOperand()

    def __reduce__(self) -> tuple[type[FrozenOperand], tuple[()]]:
        return FrozenOperand, ()


class ComputedOperand(FrozenOperand):
    """The frozen weight of an operand that the model computes at each call, of which a sample is kept."""

    def __init__(self, name: str, weight: Tensor) -> None:
        super().__init__(name)
        self._shape, self._values = tuple(weight.shape), _sample(weight)

    def check(self, value: Tensor) -> None:
        """Raise if ``value`` is not the weight that was frozen, or one near it, spread over a batch or not."""
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        _require_alike(self._name, self._shape, self._values, value)


def spread_as(weight: Tensor, value: Tensor) -> Tensor:
    """Return a weight [*] with its axes of length 1 as long as those of the operand that arrives."""
    if weight.dim() != value.dim():
        return weight
    sizes: list[Any] = [-1] * weight.dim()
    for axis, size in enumerate(_fixed_shape(weight)):
        # A size of a graph is no int, and is not compared, which would fix it.
        if size == 1 and not (isinstance(value.shape[axis], int) and value.shape[axis] == 1):
            sizes[axis] = value.shape[axis]
    return weight if all(isinstance(size, int) and size == -1 for size in sizes) else weight.expand(sizes)


def _fixed_shape(weight: Tensor) -> tuple[int, ...]:
    """Return the shape of a stored weight, in numbers: in ``torch.jit.trace`` sizes are tensors of its graph."""
    tracing = torch._C._get_tracing_state()
    if tracing is None:
        return tuple(weight.shape)
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        return tuple(weight.shape)
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def _require_alike(name: str, shape: tuple[int, ...], sample: Tensor, value: Tensor) -> None:
    """Raise if an operand has not the shape of a weight, up to axes of length 1 that are spread, or other values."""
    fits = value.dim() == len(shape) and all(size in (1, got) for size, got in zip(shape, value.shape, strict=True))
    if fits:
        entry = value
        for axis, size in enumerate(shape):
            entry = entry.narrow(axis, 0, 1) if size == 1 else entry
        difference = torch.linalg.vector_norm(_sample(entry) - sample)
        fits = not bool(difference > _OTHER * torch.linalg.vector_norm(sample))
    if not fits:
        raise ProxyError(
            f"{name}: the weight that arrives, {list(value.shape)}, is not the one that was frozen, {list(shape)}: the "
            "model picks it at run time. Exclude this site, which leaves it float, or calibrate with data that reaches "
            "every choice, which does so by itself"
        )


def _sample(value: Tensor) -> Tensor:
    """Return values spread over a weight [*], float32 on the CPU."""
    flat = value.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLE)].to("cpu", torch.float32)
