"""Pass that keeps the scales of a product apart from its readers, for a target that would misplace them."""

from __future__ import annotations

from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass
from quantizer.export.passes.base import add_constant
from quantizer.export.passes.base import largest_number
from quantizer.qdq.shared_products import is_shared_product

__all__ = ["UnsharedProducts"]

_LIMIT = 2.0**100
"""No sum of products of bytes, times a scale, is as large: the Clip changes no value."""


class UnsharedProducts(MatchPass[Any]):
    """``product -> several readers`` becomes ``product -> Clip -> several readers``, with the same values.

    The Clip is the only reader of the product, and part of its kernel: it costs nothing.
    """

    left = "the readers of a product can still take its scales into themselves"

    def match(self, node: Any) -> Any | None:
        """Return the result of such a product; None for any other node."""
        return node.outputs[0] if is_shared_product(node) else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        import onnx_ir

        kind = found.dtype.numpy()
        limit = min(_LIMIT, largest_number(kind))
        bounds = [
            add_constant(model, f"{found.name}.{name}", np.asarray(number, dtype=kind), found.dtype)
            for name, number in (("least", -limit), ("most", limit))
        ]
        same = onnx_ir.Node("", "Clip", [found, *bounds])
        same.metadata_props.update(node.metadata_props)
        result = same.outputs[0]
        result.shape, result.type = found.shape, found.type
        if found.is_graph_output():
            result.name, found.name = found.name, f"{found.name}.product"
        found.replace_all_uses_with(result, replace_graph_outputs=True)
        same.replace_input_with(0, found)
        model.graph.insert_after(node, same)
