"""The share of a model's multiply-adds whose operands are both rounded, counted alike for all tools.

A tensor counts as rounded when a quantizer gave it, and stays so through operations that only move its values, or scale
them by a number: views, transposes, casts, slices, concatenations of rounded ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from quantizer.rewrite.torch_products import PRODUCTS, is_composite, product_name

__all__ = ["RoundedShare"]

_QUANTIZERS = {"TensorQuantizer", "BaseQuantizer"}
"""Classes of modules that round what they are given, or return it as it is: of Model Optimizer and of NNCF."""

_ROUND = {"quantizer::fake_quantize", "quantizer::dequantize", "quantizer::fake_quantize_dynamic"}
_MOVES = (
    "_reshape_alias _to_copy _unsafe_view alias as_strided cat clone constant_pad_nd contiguous detach expand "
    "flip gather im2col index index_select lift_fresh max_pool2d_with_indices permute reflection_pad1d relu "
    "repeat roll select slice split split_with_sizes squeeze stack t transpose unbind unfold unsafe_split "
    "unsqueeze upsample_nearest2d view"
)
_MOVE = {f"aten::{name}" for name in _MOVES.split()}
_SCALE = {"aten::mul", "aten::div", "aten::neg"}
_FUSED = "aten::_scaled_dot_product"


class RoundedShare(TorchDispatchMode):
    """Counts while it is entered; of fused attention the first product alone can have rounded operands on both sides.

    Attributes:
        multiply_adds: of all products.
        rounded: of those whose operands are all rounded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.multiply_adds = self.rounded = 0
        self._marks: Any = WeakIdKeyDictionary()

    @property
    def share(self) -> float | None:
        """The share of rounded ones, 0 to 1; None without a product."""
        return self.rounded / self.multiply_adds if self.multiply_adds else None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what runs in the block."""
        handle = register_module_forward_hook(self._after_module)
        try:
            with self:
                yield
        finally:
            handle.remove()

    def _after_module(self, module: nn.Module, args: Any, result: Any) -> None:
        rounds = any(base.__name__ in _QUANTIZERS for base in type(module).__mro__)
        if rounds and isinstance(result, Tensor) and not any(result is value for value in args):
            self._marks[result] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        product = None if is_composite(func) else product_name(func)
        if product is not None:
            self._count(product, args, result)
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        floats = [value for value in given if value.is_floating_point()]
        moves = (name in _MOVE or (name in _SCALE and len(given) == 1)) and self._all_rounded(floats)
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                if name in _ROUND or name.startswith("aten::fake_quantize") or moves:
                    self._marks[value] = True
                elif value in self._marks:
                    del self._marks[value]
        return result

    def _all_rounded(self, values: list[Tensor]) -> bool:
        return bool(values) and all(value in self._marks for value in values)

    def _count(self, name: str, args: Any, result: Any) -> None:
        product = PRODUCTS[name]
        count = product.count(args, result)
        self.multiply_adds += count
        if name.startswith(_FUSED):
            query, key = args[:2]
            self.rounded += query.numel() * key.shape[-2] if self._all_rounded([query, key]) else 0
        elif self._all_rounded(product.tensors(args)):
            self.rounded += count
