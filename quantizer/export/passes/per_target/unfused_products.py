"""Passes that keep a product, a Q, and the numbers between them apart, for a target that would compute them wrongly."""

from __future__ import annotations

from typing import Any

from quantizer.export.passes.base import MatchPass, add_constant, insert_before
from quantizer.qdq.flat_products import scales_by_negatives, scales_flat_product
from quantizer.qdq.graph import is_dequantize, maker, varying_inputs
from quantizer.qdq.misread_factors import is_read_both_ways, misplaces_numbers


class UnfusedProducts(MatchPass[Any]):
    """``* factors -> Q`` becomes ``* factors -> Max(both inputs) -> Q``, with the same values.

    So it is behind a product of two axes, or where a factor is not positive, see ``qdq/flat_products.py``.
    """

    left = "factors can still be fused with the Q behind them"

    def match(self, node: Any) -> Any | None:
        """Return what a Q rounds, if it has such factors; None for any other node."""
        return node.inputs[0] if scales_flat_product(node) or scales_by_negatives(node) else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        same = insert_before(node, "Max", [found, found], like=found, shape=found.shape)
        node.replace_input_with(0, same)


class NumbersBehindProducts(MatchPass[Any]):
    """``product -> * numbers`` becomes ``product -> Max(both inputs) -> * numbers``, with the same values.

    So it is where the engine would apply the numbers along another axis, see ``qdq/misread_factors.py``.
    """

    left = "numbers can still become part of the product before them"

    def match(self, node: Any) -> Any | None:
        """Return what a node applies such numbers to; None for any other node."""
        return varying_inputs(node)[0] if misplaces_numbers(node) else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        same = insert_before(node, "Max", [found, found], like=found, shape=found.shape)
        node.replace_input_with(list(node.inputs).index(found), same)


class WeightsReadOneWay(MatchPass[Any]):
    """``weight -> Transpose``, where a product reads the weight too, becomes ``copy of the weight -> Transpose``."""

    left = "a square weight is still read transposed and as it is"

    def match(self, node: Any) -> Any | None:
        """Return the weight that a node transposes, if something else reads it as it is; None for any other node."""
        return node.inputs[0] if is_read_both_ways(node) else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        dequantize = maker(found)
        if dequantize is None or not is_dequantize(dequantize):
            node.replace_input_with(0, _copied(model, found))
            return
        stored, *others = dequantize.inputs
        attributes = list(dequantize.attributes.values())
        same = insert_before(
            node,
            "DequantizeLinear",
            [_copied(model, stored), *others],
            like=found,
            shape=found.shape,
            attributes=attributes,
        )
        node.replace_input_with(0, same)


def _copied(model: Any, value: Any) -> Any:
    return add_constant(model, f"{value.name}.transposed", value.const_value.numpy(), value.dtype)
