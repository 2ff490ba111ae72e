"""Parameters as operands, also through a view: ``weight.t()`` is a weight, with its axes in another order.

A view is kept as data, so that a saved plan can take it again from a parameter: a reshape, then a permutation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import nn

from quantizer.calibrators.histogram import in_memory_order

__all__ = ["Weight", "WeightView", "Weights", "is_transformed", "laid_out", "non_finite"]


@dataclass(frozen=True, slots=True)
class WeightView:
    """A parameter, or an unbroken part of it from element ``offset`` on, in another shape.

    ``parameter.flatten()[offset : offset + prod(shape)].reshape(shape).permute(order)``: the packed projections of an
    attention are three parts of one parameter.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    offset: int = 0

    def of(self, parameter: Tensor) -> Tensor:
        """Return the operand, contiguous."""
        part = parameter.detach().flatten()[self.offset : self.offset + math.prod(self.shape)]
        return laid_out(part.reshape(self.shape).permute(self.order))


def laid_out(value: Tensor) -> Tensor:
    """Return a tensor with the strides of a new one: torch calls others contiguous too where an axis has one index, and
    kernels go by them."""
    return value.contiguous().reshape(-1).reshape(value.shape)


@dataclass(frozen=True, slots=True)
class Weight:
    """An operand that is a parameter: its path (None: no module registered it) and how it is seen (None: as it is)."""

    parameter: nn.Parameter
    path: str | None
    view: WeightView | None = None

    def tensor(self) -> Tensor:
        """Return the weight as the operand shows it."""
        return self.parameter.detach() if self.view is None else self.view.of(self.parameter)


class Weights:
    """Tells which operands are parameters of a model.

    A view is known by the memory that it shares with a parameter, which holds in every gradient mode and for
    ``.detach()`` and ``.data`` too.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]] = ()) -> None:
        self._paths: dict[int, str] = {}
        self._owners: dict[int, list[nn.Parameter]] = {}
        for path, parameter in parameters:
            self._paths[id(parameter)] = path
            if parameter.layout == torch.strided:
                self._owners.setdefault(_storage(parameter), []).append(parameter)

    def find(self, value: object) -> Weight | None:
        """Return the weight that an operand is; None where it is no parameter and no unbroken part of one."""
        if isinstance(value, nn.Parameter):
            return Weight(value, self._paths.get(id(value)))
        if not isinstance(value, Tensor) or is_transformed(value) or value.layout != torch.strided:
            return None
        for parameter in self._owners.get(_storage(value), ()):
            view = _view(parameter, value)
            if view is not None:
                return Weight(parameter, self._paths[id(parameter)], view)
        return None

    def shown_by(self, value: Tensor) -> list[str]:
        """Return the paths of the parameters whose memory a tensor shows, also where it shows only some of it."""
        if isinstance(value, nn.Parameter):
            return [self._paths[id(value)]] if id(value) in self._paths else []
        if is_transformed(value) or value.layout != torch.strided:
            return []
        return [self._paths[id(parameter)] for parameter in self._owners.get(_storage(value), ())]


def is_transformed(value: object) -> bool:
    """Return whether a tensor stands for others inside ``torch.vmap`` or ``torch.func``: it has no memory."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def non_finite(value: Tensor) -> str | None:
    """Return a value of a weight [*] that no code can hold: ``NaN``, ``inf``, else ``-inf``; None: there is none."""
    if value.is_meta or value.layout != torch.strided or value.numel() == 0 or not value.is_floating_point():
        return None
    # Of floats of 8 bits torch knows no extremes.
    low, high = (float(bound) for bound in torch.aminmax(_wide(in_memory_order(value.detach()))))
    if math.isnan(low) or math.isnan(high):
        return "NaN"
    return None if math.isfinite(low) and math.isfinite(high) else "-inf" if high != math.inf else "inf"


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype.itemsize == 1 else value


def _storage(value: Tensor) -> int:
    # The id of the memory itself: an address alone may be that of an empty tensor.
    identity: int = value.untyped_storage()._cdata
    return identity


def _view(parameter: nn.Parameter, value: Tensor) -> WeightView | None:
    """Return how ``value`` shows ``parameter`` or a part of it; None where it does not, or not element by element."""
    offset = int(value.storage_offset() - parameter.storage_offset())
    inside = offset >= 0 and offset + value.numel() <= parameter.numel()
    if value.dtype != parameter.dtype or not inside or not parameter.is_contiguous():
        return None
    # From the slowest axis in memory to the fastest; an axis of length 1 may stand anywhere.
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda axis: (-strides[axis], value.shape[axis] != 1))
    shape = tuple(value.shape[axis] for axis in order)
    dense = all(
        size == 1 or strides[axis] == math.prod(shape[place + 1 :])
        for place, (axis, size) in enumerate(zip(order, shape, strict=True))
    )
    if not dense:
        return None
    return WeightView(shape, tuple(order.index(axis) for axis in range(value.dim())), offset)
