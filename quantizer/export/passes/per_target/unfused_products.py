"""Pass that keeps a product of two axes apart from the next, for a target that would make one wrong kernel of both."""

from __future__ import annotations

from typing import Any

from quantizer.export.passes.base import MatchPass
from quantizer.export.passes.base import insert_before
from quantizer.qdq.flat_products import scales_flat_product

__all__ = ["UnfusedProducts"]


class UnfusedProducts(MatchPass[Any]):
    """``MatMul ... * factors -> Q`` becomes ``MatMul ... * factors -> Max(both inputs) -> Q``, with the same values."""

    left = "factors behind a product of two axes can still be fused with the next one"

    def match(self, node: Any) -> Any | None:
        """Return what a Q rounds, if that is such a product; None for any other node."""
        return node.inputs[0] if scales_flat_product(node) else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        same = insert_before(model, node, "Max", [found, found], like=found, shape=found.shape)
        node.replace_input_with(0, same)
