"""Passes that keep apart what OpenVINO would compute wrongly, or more slowly, if it fused it.

``UnfusedProducts``, ``NumbersBehindProducts`` and ``WeightsReadOneWay`` keep a product, a Q, and the numbers between
them apart.

``UnsharedProducts`` and ``BiasesApart`` keep the scales and the bias of a product apart from what reads it.

``UnfusedReductions`` and ``FactorsBeforeReductions`` keep a reduction apart from what follows it.

OpenVINO fuses a ReduceMax with the Q behind it, and then keeps the maximum itself in bytes: 1.4 becomes 1 before the Q
divides it by the scale. With a ReduceMean it fuses the factors of channels, and may read those of another axis, see
``export/qdq/openvino.py``. It fuses one reader alone, and a Max that reads the result twice is two.

``GathersApart``, ``KeptAxes`` and ``ConcatsBeforeQuantize`` keep the axes of scales and zero points, which would
otherwise be those of another tensor.

What goes wrong without them, and where it was measured, stands in ``export/qdq/openvino.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass, add_constant, drop_unread, insert_before, largest_number
from quantizer.export.qdq.graph import attribute, constant, is_dequantize, is_quantize, maker, varying_inputs
from quantizer.export.qdq.openvino import (
    gathers_axis,
    gathers_zero_points,
    is_read_both_ways,
    is_shared_product,
    joins_before,
    misplaces_numbers,
    misreads_channels,
    misreads_channels_before,
    scales_by_negatives,
    scales_flat_product,
    sized_biases,
)


class _MaxBetween(MatchPass[Any]):
    """``x -> node`` becomes ``x -> Max(x, x) -> node``, with the same values.

    OpenVINO fuses such a Max with neither of the two. ``match`` returns x, which is an input of the node.
    """

    def apply(self, model: Any, node: Any, found: Any) -> None:
        same = insert_before(node, "Max", [found, found], like=found, shape=found.shape)
        node.replace_input_with(list(node.inputs).index(found), same)


class UnfusedProducts(_MaxBetween):
    """``* factors -> Q`` becomes ``* factors -> Max(both inputs) -> Q``, with the same values.

    So it is behind a product of two axes, or where a factor is not positive, see ``export/qdq/openvino.py``.
    """

    left = "factors can still be fused with the Q behind them"

    def match(self, node: Any) -> Any | None:
        """Return what a Q rounds, if it has such factors; None for any other node."""
        return node.inputs[0] if scales_flat_product(node) or scales_by_negatives(node) else None


class NumbersBehindProducts(_MaxBetween):
    """``product -> * numbers`` becomes ``product -> Max(both inputs) -> * numbers``, with the same values.

    So it is where the engine would apply the numbers along another axis, see ``export/qdq/openvino.py``.
    """

    left = "numbers can still become part of the product before them"

    def match(self, node: Any) -> Any | None:
        """Return what a node applies such numbers to; None for any other node."""
        return varying_inputs(node)[0] if misplaces_numbers(node) else None


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


class UnfusedReductions(MatchPass[Any]):
    """``ReduceMax(x) -> ...`` becomes ``ReduceMax(x) -> Max(both inputs) -> ...``, with the same values."""

    left = "a reduction can still be fused with its reader"

    def __init__(self, kinds: frozenset[str], misread: frozenset[str] = frozenset()) -> None:
        self.kinds, self.misread = kinds, misread

    def match(self, node: Any) -> Any | None:
        """Return the result of a reduction of floats; None for one that nothing but such a Max reads."""
        if node.op_type not in self.kinds and not (node.op_type in self.misread and misreads_channels(node)):
            return None
        result = node.outputs[0]
        readers = [reader for reader, _ in result.uses()]
        apart = len(readers) == 2 and readers[0] is readers[1] and readers[0].op_type == "Max"
        floats = result.dtype is not None and result.dtype.is_floating_point()
        return result if readers and floats and not apart else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        import onnx_ir

        same = onnx_ir.Node("", "Max", [found, found])
        same.metadata_props.update(node.metadata_props)
        same.outputs[0].shape, same.outputs[0].type = found.shape, found.type
        for reader, index in tuple(found.uses()):
            if reader is not same:
                reader.replace_input_with(index, same.outputs[0])
        model.graph.insert_after(node, same)


class FactorsBeforeReductions(_MaxBetween):
    """``x * factors -> ReduceMean`` becomes ``x * factors -> Max(both inputs) -> ReduceMean`` in files with Q/DQ."""

    left = "factors can still be moved behind a reduction"

    def __init__(self, kinds: frozenset[str]) -> None:
        self.kinds = kinds

    def match(self, node: Any) -> Any | None:
        """Return what is reduced, if factors of channels before the reduction would be misread behind it."""
        if node.op_type not in self.kinds or not misreads_channels_before(node):
            return None
        given = node.inputs[0]
        floats = given.dtype is not None and given.dtype.is_floating_point()
        return given if floats and any(is_quantize(other) for other in node.graph) else None


class GathersApart(_MaxBetween):
    """``product -> Gather`` becomes ``product -> Max(both inputs) -> Gather``, with the same values."""

    left = "zero points of a product can still be moved behind a Gather"

    def match(self, node: Any) -> Any | None:
        """Return what a Gather reads, if it is such a product; None for any other node."""
        return node.inputs[0] if gathers_zero_points(node) else None


class KeptAxes(MatchPass[int]):
    """``Gather(x, 3)`` becomes ``Gather(x, [3]) -> Squeeze``, with the same values."""

    left = "an index behind a product still takes out its axis"

    def match(self, node: Any) -> int | None:
        """Return the index that a node reads of its axis; None for a node that stays."""
        if not gathers_axis(node):
            return None
        index = constant(node.inputs[1])
        assert index is not None
        return int(index)

    def apply(self, model: Any, node: Any, found: int) -> None:
        import onnx_ir

        axis, given, result, index = attribute(node, "axis", 0), node.inputs[0], node.outputs[0], node.inputs[1]
        sizes = list(given.shape)
        sizes[axis] = 1
        int64 = onnx_ir.DataType.INT64
        held = {"index": [found], "axis": [axis % len(sizes)]}
        at, axes = (add_constant(model, f"{result.name}.{key}", np.array(held[key]), int64) for key in held)
        attributes = [onnx_ir.AttrInt64("axis", axis)]
        kept = insert_before(
            node, "Gather", [given, at], like=result, shape=onnx_ir.Shape(sizes), attributes=attributes
        )
        taken = insert_before(node, "Squeeze", [kept, axes], like=result, shape=result.shape)
        name = result.name
        result.replace_all_uses_with(taken, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
        drop_unread(model, index)
        taken.name = name


class ConcatsBeforeQuantize(_MaxBetween):
    """``Concat -> Q`` becomes ``Concat -> Max(both inputs) -> Q``, with the same values."""

    left = "a concatenation can still be joined behind the Q"

    def match(self, node: Any) -> Any | None:
        """Return what a Q rounds, if a concatenation of places makes it; None for any other node."""
        return node.inputs[0] if joins_before(node) else None
