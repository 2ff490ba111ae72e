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

__all__ = ["FrozenOperand"]


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
            raise ProxyError(
                f"{self._name}: the weight that arrives, {list(value.shape)}, is not the one that was frozen, "
                f"{list(self._shape)}: the model picks it at run time. Exclude this site, which leaves it float, or "
                "calibrate with data that reaches every choice, which does so by itself"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenOperand:
        return FrozenOperand()

    def __reduce__(self) -> tuple[type[FrozenOperand], tuple[()]]:
        return FrozenOperand, ()
