"""The check that a frozen site is called with the weight that was frozen.

A frozen site computes with its stored codes, whatever tensor its call gets. Code that picks a weight at run time
(``self.experts[i]``, ``self.table[:n]``) may pass another weight than in calibration.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch import nn

from quantizer.errors import ProxyError

__all__ = ["ComputedOperand", "FrozenOperand"]

_SAMPLE = 256
"""About how many values of a computed weight are compared."""

_OTHER = 0.5
"""From this relative error of the sample on, it is another weight: other floats of the same weight differ by far less,
and two weights by 1.4."""


class FrozenOperand:
    """The frozen parameter of one operand, or the frozen part of a parameter.

    Copies and casts of the proxy have other tensors, in which the parameter cannot be recognized: they do not check.

    Args:
        name: ``SITE.OPERAND``.
        parameter: the operand, or the parameter that it is a view of; None: check nothing.
        shape: the operand's shape.
        offset: the first element of the operand in the parameter.
    """

    def __init__(
        self, name: str = "", parameter: nn.Parameter | None = None, shape: tuple[int, ...] = (), offset: int = 0
    ) -> None:
        self._name = name
        self._parameter = None if parameter is None else weakref.ref(parameter)
        self._shape, self._offset = shape, offset

    def check(self, value: Tensor) -> None:
        """Raise if ``value`` is not the weight that was frozen.

        Raises:
            ProxyError: ``value`` is another parameter, or another part of this one.
        """
        parameter = None if self._parameter is None else self._parameter()
        if parameter is None or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        same = value.untyped_storage()._cdata == parameter.untyped_storage()._cdata
        offset = value.storage_offset() - parameter.storage_offset() if same else -1
        if tuple(value.shape) != self._shape or offset != self._offset:
            self._refuse(value)

    def _refuse(self, value: Tensor) -> None:
        raise ProxyError(
            f"{self._name}: the weight that arrives, {list(value.shape)}, is not the one that was frozen, "
            f"{list(self._shape)}: the model picks it at run time. Exclude this site, which leaves it float, or "
            "calibrate with data that reaches every choice, which does so by itself"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenOperand:
        return FrozenOperand()

    def __reduce__(self) -> tuple[type[FrozenOperand], tuple[()]]:
        return FrozenOperand, ()


class ComputedOperand(FrozenOperand):
    """The frozen weight of an operand that the model computes at each call, of which a sample is kept.

    Args:
        name: ``SITE.OPERAND``.
        weight: the weight that was frozen, contiguous.
    """

    def __init__(self, name: str, weight: Tensor) -> None:
        super().__init__(name, shape=tuple(weight.shape))
        self._sample = _sample(weight)

    def check(self, value: Tensor) -> None:
        """Raise if ``value`` is not the weight that was frozen, or one near it.

        Raises:
            ProxyError: ``value`` has another shape, or other values.
        """
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        if tuple(value.shape) != self._shape:
            self._refuse(value)
        difference = torch.linalg.vector_norm(_sample(value) - self._sample)
        if bool(difference > _OTHER * torch.linalg.vector_norm(self._sample)):
            self._refuse(value)


def _sample(value: Tensor) -> Tensor:
    """Return values spread over a weight [*], float32 on the CPU."""
    flat = value.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLE)].to("cpu", torch.float32)
