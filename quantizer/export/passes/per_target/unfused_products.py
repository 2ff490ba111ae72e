"""Pass that keeps factors of channels apart from the Q behind them, for a target that would compute both wrongly."""

from __future__ import annotations

from typing import Any

from quantizer.export.passes.base import MatchPass
from quantizer.export.passes.base import insert_before
from quantizer.qdq.flat_products import scales_by_negatives
from quantizer.qdq.flat_products import scales_flat_product

__all__ = ["UnfusedProducts"]


class UnfusedProducts(MatchPass[Any]):
    """``* factors -> Q`` becomes ``* factors -> Max(both inputs) -> Q``, with the same values.

    So it is behind a product of two axes, or where a factor is not positive, see ``qdq/flat_products.py``.
    """

    left = "factors can still be fused with the Q behind them"

    def match(self, node: Any) -> Any | None:
        """Return what a Q rounds, if it has such factors; None for any other node."""
        return node.inputs[0] if scales_flat_product(node) or scales_by_negatives(node) else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        same = insert_before(model, node, "Max", [found, found], like=found, shape=found.shape)
        node.replace_input_with(0, same)
