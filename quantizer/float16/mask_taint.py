"""Tracking of the low numbers of masks through a pass, so that a softmax reads the same masks as in the exported file.

There the constant of a mask is ``FLOAT16_MASK``, see ``ClampMasks``. During a pass it is unknown if a low constant
will reach a softmax: it keeps its value, is tracked through the operations that pass it on, and is raised only when a
softmax reads it. Low numbers that reach no softmax, such as factors, bounds or infinite results, keep their values, as
in the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils.weak import WeakIdKeyDictionary

from quantizer.numerics.float16 import FLOAT16_MASK
from quantizer.operations.aten_products import product_name

_CONSTANTS = frozenset({"fill_", "fill", "full", "full_like", "lift_fresh", "new_full", "scalar_tensor", "_to_copy"})
_MOVES = frozenset(
    {
        *("_reshape_alias", "_to_copy", "_unsafe_view", "alias", "as_strided", "cat", "clone", "constant_pad_nd"),
        *("copy_", "detach", "expand", "index", "index_select", "lift_fresh", "permute", "repeat", "reshape", "select"),
        *("slice", "split", "split_with_sizes", "squeeze", "stack", "t", "transpose", "tril", "triu", "tril_", "triu_"),
        *("unbind", "unsqueeze", "view", "clamp", "clamp_min", "clamp_max", "maximum", "minimum"),
    }
)
_FACTORS = frozenset({"mul", "mul_", "div", "div_", "sub", "sub_"})
_MASKS = frozenset(
    {
        *("add", "add_", "index_fill", "index_fill_", "index_put", "index_put_", "masked_fill", "masked_fill_"),
        *("masked_scatter", "masked_scatter_", "scatter", "scatter_", "where"),
    }
)
_BOUNDS = frozenset({"clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "maximum", "minimum"})
_SOFTMAX = frozenset({"_softmax", "_safe_softmax", "softmax"})


class MaskTaint:
    """The tensors of one pass that contain low numbers, each with a flag if these mask other values."""

    def __init__(self) -> None:
        self._held: Any = WeakIdKeyDictionary()

    def read(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments for an operation; for softmax and fused attention masks are raised to FLOAT16_MASK."""
        name = _name(func)
        if not (name in _SOFTMAX or "attention" in name) or not any(map(self._masks, _leaves(args, kwargs))):
            return args, kwargs
        raised: tuple[Any, Any] = _pytree.tree_map(
            lambda leaf: leaf.clamp(min=FLOAT16_MASK) if self._masks(leaf) else leaf, (args, kwargs)
        )
        return raised

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record if the result of an operation contains low numbers, and if they mask other values."""
        name = _name(func)
        if product_name(func) is not None or name not in _MOVES | _FACTORS | _MASKS | _CONSTANTS:
            return
        number = name not in _BOUNDS and any(
            isinstance(leaf, float) and leaf < FLOAT16_MASK for leaf in _leaves(args, kwargs)
        )
        constant = name in _CONSTANTS and any(map(_is_low, _pytree.tree_leaves(result)))
        tensors = [leaf for leaf in _leaves(args, kwargs) if isinstance(leaf, Tensor) and leaf in self._held]
        if not (number or constant or tensors):
            return
        masks = name in _MASKS or any(self._masks(tensor) for tensor in tensors)
        for leaf in _pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self._held[leaf] = masks

    def _masks(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and bool(self._held.get(leaf, False))


def _name(func: Any) -> str:
    name: str = func.name().partition(".")[0]
    return name.removeprefix("aten::")


def _leaves(*values: Any) -> Iterator[Any]:
    for value in values:
        yield from _pytree.tree_leaves(value)


def _is_low(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.dtype is torch.float16 and bool(leaf < FLOAT16_MASK)
