"""A weight that is in its site as codes, and that code outside of the site may read as floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from quantizer.proxy.operand_quantizer import OperandQuantizer, is_recorded


class StoredWeight(Tensor):
    """A tensor with the shape, type and place of a weight, whose values are made when something computes with it.

    A module's ``F.linear(x, self.weight)`` reads its weight at each call, and the site then computes with the codes:
    values that were made for the read would be made for nothing.
    """

    _read: Callable[[], Tensor]

    @staticmethod
    def of(like: Tensor, dtype: torch.dtype, read: Callable[[], Tensor]) -> StoredWeight:
        """Return the weight of the shape and place of ``like``, whose values ``read`` returns."""
        make: Any = Tensor._make_wrapper_subclass
        made: StoredWeight = make(StoredWeight, like.shape, dtype=dtype, device=like.device, requires_grad=False)
        made._read = read
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            # As a parameter it stays what it is.
            return StoredWeight.of(args[0], args[0].dtype, args[0]._read)
        args, kwargs = _pytree.tree_map(_values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._read().clone()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array, as ``Tensor.numpy`` does."""
        return self._read().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self._read().__array__(dtype)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StoredWeight({self._read()!r})"


def _values(value: Any) -> Any:
    return value._read() if isinstance(value, StoredWeight) else value


class LazyWeight(OperandQuantizer):
    """A stored weight that is dequantized only where something other than its site computes with it.

    Attributes:
        shown: what the module reads as its weight; None: it was not read yet.
    """

    shown: StoredWeight | None

    @staticmethod
    def of(quantizer: OperandQuantizer) -> None:
        """Turn the quantizer of a stored weight into a lazy one."""
        quantizer.__class__ = LazyWeight
        vars(quantizer)["shown"] = None

    def as_parameter(self) -> Tensor:
        """Return the weight, whose values are made when they are needed; in a compiled graph, what makes them."""
        if is_recorded():
            return super().as_parameter()
        shown = self.shown
        if shown is None:
            assert self.stored is not None
            shown = self.shown = StoredWeight.of(self.stored, self.stored_dtype, super().as_parameter)
        return shown

    def forward(self, x: Any) -> Any:
        # A lookup that limits norms writes to the rows that it reads: to values, which are made once.
        return _values(super().forward(x))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.shown = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without what the module reads, which refers to this very object."""
        return {**super().__getstate__(), "shown": None}  # type: ignore[no-untyped-call]
