"""Passes that keep apart what an engine would compute wrongly, or more slowly, if it fused it."""

from __future__ import annotations

from typing import Any

import numpy as np

from quantizer.export.passes.base import (
    MatchPass,
    add_constant,
    drop_unread,
    insert_before,
    largest_number,
    replace_node,
    take_out,
)
from quantizer.export.passes.quantizers import is_within, starts_at_zero
from quantizer.numerics.qtype import UINT8
from quantizer.qdq.element_types import has_odd_pairs
from quantizer.qdq.graph import (
    attribute,
    constant,
    floats,
    is_dequantize,
    is_dequantized,
    is_quantize,
    maker,
    scalar,
    varying_inputs,
)
from quantizer.qdq.openvino import (
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


class UnfusedProducts(MatchPass[Any]):
    """``* factors -> Q`` becomes ``* factors -> Max(both inputs) -> Q``, with the same values.

    So it is behind a product of two axes, or where a factor is not positive, see ``qdq/openvino.py``.
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

    So it is where the engine would apply the numbers along another axis, see ``qdq/openvino.py``.
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
    """``ReduceMax(x) -> ...`` becomes ``ReduceMax(x) -> Max(both inputs) -> ...``, with the same values.

    Args:
        kinds: the operators of such reductions.
        misread: the operators of those that count only where factors of channels behind them would be misread.
    """

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


class FactorsBeforeReductions(MatchPass[Any]):
    """``x * factors -> ReduceMean`` becomes ``x * factors -> Max(both inputs) -> ReduceMean`` in files with Q/DQ.

    Args:
        kinds: the operators of such reductions.
    """

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

    def apply(self, model: Any, node: Any, found: Any) -> None:
        same = insert_before(node, "Max", [found, found], like=found, shape=found.shape)
        node.replace_input_with(0, same)


class UnfusedRectifiers(MatchPass[Any]):
    """``MatMul -> Relu -> Q`` becomes ``MatMul -> Max(0) -> Q``, with the same values; a Clip has a Max before it."""

    left = "a rectifier still stands between a product and a Q that does not replace it"

    def match(self, node: Any) -> Any | None:
        """Return the result of the product before such a rectifier; None for any other node."""
        if node.op_type not in ("Relu", "Clip") or node.outputs[0].is_graph_output():
            return None
        product = node.inputs[0].producer()
        if product is None or product.op_type != "MatMul" or not all(map(is_dequantized, product.inputs)):
            return None
        quantizers = [reader for reader in node.outputs[0].consumers() if is_quantize(reader)]
        alone = len(node.inputs[0].uses()) == 1 and not node.inputs[0].is_graph_output()
        return node.inputs[0] if alone and quantizers and not any(_replaces(one, node) for one in quantizers) else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        low = 0.0 if node.op_type == "Relu" else _lower(node)
        other = found
        if low is not None:
            array = np.array(low, found.dtype.numpy())
            other = add_constant(model, f"{found.name}.low", array, found.dtype)
        held = insert_before(node, "Max", [found, other], like=found, shape=found.shape)
        if node.op_type == "Relu":
            take_out(model, node, held)
        else:
            node.replace_input_with(0, held)


def _lower(clip: Any) -> float | None:
    value = clip.inputs[1] if len(clip.inputs) > 1 else None
    return None if value is None else scalar(value)


def _replaces(quantize: Any, rectifier: Any) -> bool:
    """Return whether a Q clips all that a rectifier before it does."""
    scale = scalar(quantize.inputs[1])
    if scale is None or not starts_at_zero(quantize):
        return False
    return rectifier.op_type == "Relu" or is_within(rectifier, scale * UINT8.qmax)


class GathersApart(MatchPass[Any]):
    """``product -> Gather`` becomes ``product -> Max(both inputs) -> Gather``, with the same values."""

    left = "zero points of a product can still be moved behind a Gather"

    def match(self, node: Any) -> Any | None:
        """Return what a Gather reads, if it is such a product; None for any other node."""
        return node.inputs[0] if gathers_zero_points(node) else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        same = insert_before(node, "Max", [found, found], like=found, shape=found.shape)
        node.replace_input_with(0, same)


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


class ConcatsBeforeQuantize(MatchPass[Any]):
    """``Concat -> Q`` becomes ``Concat -> Max(both inputs) -> Q``, with the same values."""

    left = "a concatenation can still be joined behind the Q"

    def match(self, node: Any) -> Any | None:
        """Return what a Q rounds, if a concatenation of places makes it; None for any other node."""
        return node.inputs[0] if joins_before(node) else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        same = insert_before(node, "Max", [found, found], like=found, shape=found.shape)
        node.replace_input_with(0, same)


_BYTES = {"INT4": "INT8", "UINT4": "UINT8"}


class PairsOfCodes(MatchPass[str]):
    """``INT4 [K, N] -> DQ -> MatMul`` with an odd K becomes ``INT8 [K, N] -> DQ -> MatMul``, with the same codes."""

    left = "a weight of INT4 still has an odd number of inputs"

    def match(self, node: Any) -> str | None:
        """Return the format for the codes of a dequantizer; None for a node that stays."""
        return _BYTES[node.inputs[0].dtype.name] if has_odd_pairs(node) else None

    def apply(self, model: Any, node: Any, found: str) -> None:
        import onnx_ir

        element = onnx_ir.DataType[found]
        for place in (0, 2):
            value = node.inputs[place] if place < len(node.inputs) else None
            if value is not None:
                codes = value.const_value.numpy().astype(element.numpy())
                node.replace_input_with(place, add_constant(model, f"{value.name}_bytes", codes, element))
                drop_unread(model, value)


class RowsOfCodes(MatchPass[Any]):
    """``DQ(t, s, axis 0) -> Gather`` becomes ``Gather -> Cast`` of the codes, times the scales of those rows."""

    left = "a whole table is still dequantized for some of its rows"

    def match(self, node: Any) -> Any | None:
        """Return the DQ of a stored table of INT8 with a scale a row, out of which rows are taken."""
        if node.op_type != "Gather" or attribute(node, "axis", 0) != 0:
            return None
        table = node.inputs[0].producer()
        if not is_dequantize(table) or table.inputs[0].const_value is None or attribute(table, "block_size", 0):
            return None
        codes, scales, *zero = table.inputs
        symmetric = not zero or zero[0] is None or not np.any(zero[0].const_value.numpy())
        rows = codes.shape.is_static() and len(codes.shape) == 2 and attribute(table, "axis", 1) == 0
        return table if rows and symmetric and codes.dtype.name == "INT8" and len(scales.shape) == 1 else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        import onnx_ir

        result, (codes, scales) = node.outputs[0], found.inputs[:2]
        column = floats(scales)
        assert column is not None
        tall = add_constant(model, f"{scales.name}_of_rows", column[:, None], scales.dtype)
        first = [onnx_ir.AttrInt64("axis", 0)]
        taken = insert_before(node, "Gather", [codes, node.inputs[1]], like=codes, shape=result.shape, attributes=first)
        to = [onnx_ir.AttrInt64("to", scales.dtype)]
        cast = insert_before(node, "Cast", [taken], like=result, shape=result.shape, attributes=to)
        step = insert_before(node, "Gather", [tall, node.inputs[1]], like=tall, shape=None, attributes=first)
        made = insert_before(node, "Mul", [cast, step], like=result, shape=result.shape)
        replace_node(model, node, made)
        if not found.outputs[0].uses():
            inputs = [value for value in found.inputs if value is not None]
            model.graph.remove(found, safe=True)
            for value in inputs:
                drop_unread(model, value)
