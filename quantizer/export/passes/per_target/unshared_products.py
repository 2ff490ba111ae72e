"""Pass that keeps the scales of a product apart from its readers, for a target that would misplace them."""

from __future__ import annotations

from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass
from quantizer.export.passes.base import add_constant
from quantizer.export.passes.base import drop_unread
from quantizer.export.passes.base import largest_number
from quantizer.qdq.graph import floats
from quantizer.qdq.shared_products import is_shared_product

__all__ = ["BiasesApart", "UnsharedProducts"]

_LIMIT = 2.0**100
"""No sum of products of bytes, times a scale, is as large: the Clip changes no value."""

_SIZED = frozenset({"Resize", "Shape", "Size"})
"""Operators with which a file computes with the sizes of its tensors."""


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
        _insert_behind(model, node, same)


class BiasesApart(MatchPass[Any]):
    """``Conv(x, w, b)`` becomes ``Conv(x, w) -> Add(b)`` in files that compute with sizes, with the same values.

    OpenVINO reads the first as a convolution, its shape, and an addition of the bias in that shape. Where the file
    itself computes with a size, it then takes the size from there, which makes a second reader of the convolution. The
    addition is no part of its kernel any more but of the Q behind it, where all channels get the bias of the first.
    """

    left = "the bias of a convolution can still be read through its shape"

    def match(self, node: Any) -> Any | None:
        """Return the bias of a convolution, if it is a constant."""
        if node.op_type not in ("Conv", "ConvTranspose") or len(node.inputs) < 3:
            return None
        sizes = any(other.op_type in _SIZED for other in node.graph)
        return node.inputs[2] if sizes and floats(node.inputs[2]) is not None else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        import onnx_ir

        result = node.outputs[0]
        spatial = [1] * (len(node.inputs[1].shape) - 2)
        bias = floats(found)
        assert bias is not None
        added = add_constant(model, f"{found.name}.channels", bias.reshape(1, -1, *spatial), found.dtype)
        node.resize_inputs(2)
        drop_unread(model, found)
        add = onnx_ir.Node("", "Add", [result, added])
        add.metadata_props.update(node.metadata_props)
        _insert_behind(model, node, add)


def _insert_behind(model: Any, node: Any, reader: Any) -> None:
    """Make ``reader``, whose first input is the result of ``node``, the only one that reads it."""
    found, result = node.outputs[0], reader.outputs[0]
    result.shape, result.type = found.shape, found.type
    if found.is_graph_output():
        result.name, found.name = found.name, f"{found.name}.product"
    found.replace_all_uses_with(result, replace_graph_outputs=True)
    reader.replace_input_with(0, found)
    model.graph.insert_after(node, reader)
