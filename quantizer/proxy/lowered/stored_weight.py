"""A weight that is in its site as codes, and that code outside of the site may read as floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

__all__ = ["StoredWeight"]


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

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StoredWeight({self._read()!r})"


def _values(value: Any) -> Any:
    return value._read() if isinstance(value, StoredWeight) else value
