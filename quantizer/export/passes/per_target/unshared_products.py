"""Pass that keeps the scales of a product apart from its readers, for a target that would misplace them."""

from __future__ import annotations

from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass, add_constant, drop_unread, insert_before, largest_number
from quantizer.qdq.graph import constant
from quantizer.qdq.shared_products import is_shared_product, sized_biases

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
        _insert_behind(node, same)


class BiasesApart:
    """``Conv(x, w, b)`` becomes ``Conv(x, w) -> Add(b)`` in files that compute with sizes, with the same values.

    See ``sized_biases`` for what OpenVINO does to the bias.
    """

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        found = sized_biases(model.graph.all_nodes())
        for node in found:
            _set_apart(model, node)
        return len(found)

    def ensures(self, model: Any) -> str | None:
        left = next((node.name for node in sized_biases(model.graph.all_nodes())), None)
        return None if left is None else f"the bias of a convolution can still be read through its shape: {left}"


def _set_apart(model: Any, node: Any) -> None:
    """Move the bias of a convolution into an Add behind it."""
    import onnx_ir

    result, bias = node.outputs[0], node.inputs[2]
    channels = [1, -1, *[1] * (len(node.inputs[1].shape) - 2)]
    held = constant(bias)
    node.resize_inputs(2)
    if held is None:
        sizes = add_constant(model, f"{bias.name}.sizes", np.array(channels, np.int64), onnx_ir.DataType.INT64)
        added = insert_before(node, "Reshape", [bias, sizes], like=bias, shape=None)
    else:
        added = add_constant(model, f"{bias.name}.channels", held.reshape(channels), result.dtype)
        drop_unread(model, bias)
    add = onnx_ir.Node("", "Add", [result, added])
    add.metadata_props.update(node.metadata_props)
    _insert_behind(node, add)


def _insert_behind(node: Any, reader: Any) -> None:
    """Make ``reader``, whose first input is the result of ``node``, the only one that reads it."""
    found, result = node.outputs[0], reader.outputs[0]
    result.shape, result.type = found.shape, found.type
    if found.is_graph_output():
        result.name, found.name = found.name, f"{found.name}.product"
    found.replace_all_uses_with(result, replace_graph_outputs=True)
    reader.replace_input_with(0, found)
    node.graph.insert_after(node, reader)
