"""Parameters as operands, also through a view: ``weight.t()`` is a weight, with its axes in another order.

A view is recorded as data (an offset, a reshape, a permutation), so that a saved plan can apply it to a parameter. What
is computed from parameters and buffers alone is a weight too, and so is its computation data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantizer.numerics.granularity import in_memory_order
from quantizer.proxy.computed_weights import Computation


@dataclass(frozen=True, slots=True)
class WeightView:
    """A view of a parameter, or of a contiguous part of it from element ``offset`` on, in another shape.

    It is ``parameter.flatten()[offset : offset + prod(shape)].reshape(shape).permute(order)``. For example, the packed
    projections of an attention are three parts of one parameter.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    offset: int = 0

    def of(self, parameter: Tensor) -> Tensor:
        """Return the operand, contiguous."""
        part = parameter.detach().flatten()[self.offset : self.offset + math.prod(self.shape)]
        return laid_out(part.reshape(self.shape).permute(self.order))


def laid_out(value: Tensor) -> Tensor:
    """Return a tensor with the strides of a new one: with an axis of length 1, torch calls other strides contiguous
    too, and kernels depend on the strides."""
    return value.contiguous().reshape(-1).reshape(value.shape)


@dataclass(frozen=True, slots=True)
class Weight:
    """An operand that is a parameter, or is computed from parameters and buffers alone.

    Attributes:
        parameters: the parameter, or all that the computation reads.
        paths: their paths; empty: no module registered the parameter.
        view: the operand as a view of the parameter (None: it is the parameter itself, or computed).
        computation: how the operand is computed (None: it is not).
    """

    parameters: tuple[Tensor, ...]
    paths: tuple[str, ...]
    view: WeightView | None = None
    computation: Computation | None = None

    @classmethod
    def computed(cls, computation: Computation, inputs: Sequence[Tensor]) -> Weight:
        """Return the weight of a computation on these parameters and buffers, with the values that they have now."""
        return cls(tuple(inputs), computation.inputs, computation=computation.with_buffers_of(inputs))

    @property
    def path(self) -> str | None:
        """The path of the parameter, or of the largest one of a computation; None if no module registered it."""
        sizes = [value.numel() for value in self.parameters]
        return self.paths[sizes.index(max(sizes))] if self.paths else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the operand."""
        if self.computation is not None:
            return tuple(self.tensor().shape)
        first, view = self.parameters[0], self.view
        return tuple(first.shape if view is None else (view.shape[at] for at in view.order))

    def tensor(self) -> Tensor:
        """Return the operand's values [*]."""
        return operand_of(self.parameters, self.view, self.computation)

    def is_same(self, other: Weight) -> bool:
        """Return whether another weight is this one: of the same parameters, in the same way."""
        # With other values of buffers it is another computation: a model may write into them.
        if self.view != other.view or self.computation != other.computation:
            return False
        both = zip(self.parameters, other.parameters, strict=True)
        # Proxies have buffers of their own.
        return all(one is two or not isinstance(one, nn.Parameter) for one, two in both)


def operand_of(parameters: Sequence[Tensor], view: WeightView | None, computation: Computation | None) -> Tensor:
    """Return the values [*] of a weight."""
    if computation is not None:
        return laid_out(computation.of(parameters))
    return parameters[0].detach() if view is None else view.of(parameters[0])


class Weights:
    """The parameters of a model, to tell which operands are parameters or views of them.

    A view is recognized by the memory that it shares with a parameter. This works in every gradient mode, and for
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
        """Return the weight that an operand is; None if it is neither a parameter nor a contiguous part of one."""
        if isinstance(value, nn.Parameter):
            path = self._paths.get(id(value))
            return Weight((value,), () if path is None else (path,))
        if not isinstance(value, Tensor) or is_transformed(value) or value.layout != torch.strided:
            return None
        for parameter in self._owners.get(_storage(value), ()):
            view = _view(parameter, value)
            if view is not None:
                return Weight((parameter,), (self._paths[id(parameter)],), view)
        return None

    def shown_by(self, value: Tensor) -> list[str]:
        """Return the paths of the parameters whose memory a tensor shares, fully or in part."""
        if isinstance(value, nn.Parameter):
            return [self._paths[id(value)]] if id(value) in self._paths else []
        if is_transformed(value) or value.layout != torch.strided:
            return []
        return [self._paths[id(parameter)] for parameter in self._owners.get(_storage(value), ())]


def is_transformed(value: object) -> bool:
    """Return whether a tensor is a wrapper inside ``torch.vmap`` or ``torch.func``, which has no memory of its own."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def non_finite(value: Tensor) -> str | None:
    """Return the first of ``NaN``, ``inf`` and ``-inf`` that is in a weight [*]; None if all its values are finite."""
    if value.is_meta or value.layout != torch.strided or value.numel() == 0 or not value.is_floating_point():
        return None
    # torch has no aminmax of 8-bit floats.
    low, high = (float(bound) for bound in torch.aminmax(_wide(in_memory_order(value.detach()))))
    if math.isnan(low) or math.isnan(high):
        return "NaN"
    return None if math.isfinite(low) and math.isfinite(high) else "-inf" if high != math.inf else "inf"


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype.itemsize == 1 else value


def _storage(value: Tensor) -> int:
    # The id of the storage: addresses are not unique, since empty tensors may share one.
    identity: int = value.untyped_storage()._cdata
    return identity


def _view(parameter: nn.Parameter, value: Tensor) -> WeightView | None:
    """Return ``value`` as a view of ``parameter`` or a part of it; None if it is not one with each element once."""
    offset = int(value.storage_offset() - parameter.storage_offset())
    inside = offset >= 0 and offset + value.numel() <= parameter.numel()
    if value.dtype != parameter.dtype or not inside or not parameter.is_contiguous():
        return None
    # From the slowest axis in memory to the fastest; the place of an axis of length 1 does not matter.
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
