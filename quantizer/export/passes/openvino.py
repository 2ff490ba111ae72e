"""Graph passes that separate operators which OpenVINO would fuse wrongly or slowly.

``export/qdq/openvino.py`` describes each problem and where it was measured. OpenVINO fuses an operator only with a
single reader, so most passes insert ``Max(x, x)``, which changes no value.
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
    """Pass that changes ``x -> node`` to ``x -> Max(x, x) -> node``; ``match`` returns x, an input of the node."""

    def apply(self, model: Any, node: Any, matched: Any) -> None:
        same = insert_before(node, "Max", [matched, matched], like=matched, shape=matched.shape)
        node.replace_input_with(list(node.inputs).index(matched), same)


class UnfusedProducts(_MaxBetween):
    """``* factors -> Q`` becomes ``* factors -> Max(x, x) -> Q``.

    Applies behind a linear layer with two axes, or if a factor is not positive.
    """

    left = "factors can still be fused with the Q behind them"

    def match(self, node: Any) -> Any | None:
        """Return the input of a Q with such factors; None for any other node."""
        return node.inputs[0] if scales_flat_product(node) or scales_by_negatives(node) else None


class NumbersBehindProducts(_MaxBetween):
    """``MatMul -> * constant`` becomes ``MatMul -> Max(x, x) -> * constant``.

    Applies where OpenVINO would apply the constant along another axis.
    """

    left = "a constant can still be fused with the MatMul before it"

    def match(self, node: Any) -> Any | None:
        """Return the input that a node combines with such a constant; None for any other node."""
        return varying_inputs(node)[0] if misplaces_numbers(node) else None


class WeightsReadOneWay(MatchPass[Any]):
    """``weight -> Transpose`` becomes ``copy of the weight -> Transpose`` if another node reads the weight."""

    left = "a square weight is still read both directly and transposed"

    def match(self, node: Any) -> Any | None:
        """Return the transposed weight if another node reads it directly; None for any other node."""
        return node.inputs[0] if is_read_both_ways(node) else None

    def apply(self, model: Any, node: Any, matched: Any) -> None:
        dequantize = maker(matched)
        if dequantize is None or not is_dequantize(dequantize):
            node.replace_input_with(0, _add_copy(model, matched))
            return
        stored, *others = dequantize.inputs
        attributes = list(dequantize.attributes.values())
        same = insert_before(
            node,
            "DequantizeLinear",
            [_add_copy(model, stored), *others],
            like=matched,
            shape=matched.shape,
            attributes=attributes,
        )
        node.replace_input_with(0, same)


def _add_copy(model: Any, value: Any) -> Any:
    return add_constant(model, f"{value.name}.transposed", value.const_value.numpy(), value.dtype)


_LIMIT = 2.0**100
"""Larger than any result of an INT8 matrix multiplication, so the Clip changes no value."""


class UnsharedProducts(MatchPass[Any]):
    """``MatMul -> several readers`` becomes ``MatMul -> Clip -> several readers``.

    The Clip becomes part of the kernel of the MatMul or Conv, so it costs no time.
    """

    left = "the readers of a MatMul or Conv can still be fused with its scales"

    def match(self, node: Any) -> Any | None:
        """Return the result of such a MatMul or Conv; None for any other node."""
        return node.outputs[0] if is_shared_product(node) else None

    def apply(self, model: Any, node: Any, matched: Any) -> None:
        import onnx_ir

        kind = matched.dtype.numpy()
        limit = min(_LIMIT, largest_number(kind))
        bounds = [
            add_constant(model, f"{matched.name}.{name}", np.asarray(number, dtype=kind), matched.dtype)
            for name, number in (("least", -limit), ("most", limit))
        ]
        same = onnx_ir.Node("", "Clip", [matched, *bounds])
        same.metadata_props.update(node.metadata_props)
        _insert_behind(node, same)


class BiasesApart:
    """``Conv(x, w, b)`` becomes ``Conv(x, w) -> Add(b)`` in files that compute sizes, see ``sized_biases``."""

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        convolutions = sized_biases(model.graph.all_nodes())
        for node in convolutions:
            _move_bias(model, node)
        return len(convolutions)

    def ensures(self, model: Any) -> str | None:
        unchanged = next((node.name for node in sized_biases(model.graph.all_nodes())), None)
        return None if unchanged is None else f"the bias of a convolution can still be lost: {unchanged}"


def _move_bias(model: Any, node: Any) -> None:
    """Move the bias of a convolution into an Add behind it."""
    import onnx_ir

    result, bias = node.outputs[0], node.inputs[2]
    channels = [1, -1, *[1] * (len(node.inputs[1].shape) - 2)]
    array = constant(bias)
    node.resize_inputs(2)
    if array is None:
        sizes = add_constant(model, f"{bias.name}.sizes", np.array(channels, np.int64), onnx_ir.DataType.INT64)
        added = insert_before(node, "Reshape", [bias, sizes], like=bias, shape=None)
    else:
        added = add_constant(model, f"{bias.name}.channels", array.reshape(channels), result.dtype)
        drop_unread(model, bias)
    add = onnx_ir.Node("", "Add", [result, added])
    add.metadata_props.update(node.metadata_props)
    _insert_behind(node, add)


def _insert_behind(node: Any, reader: Any) -> None:
    """Insert ``reader``, whose first input is the result of ``node``, between ``node`` and all its readers."""
    source, result = node.outputs[0], reader.outputs[0]
    result.shape, result.type = source.shape, source.type
    if source.is_graph_output():
        result.name, source.name = source.name, f"{source.name}.product"
    source.replace_all_uses_with(result, replace_graph_outputs=True)
    reader.replace_input_with(0, source)
    node.graph.insert_after(node, reader)


class UnfusedReductions(MatchPass[Any]):
    """``ReduceMax(x) -> ...`` becomes ``ReduceMax(x) -> Max(y, y) -> ...``.

    OpenVINO stores the unscaled maximum in the integers of a Q behind it: 1.4 becomes 1. With a ReduceMean it may apply
    per-channel factors along another axis.
    """

    left = "a reduction can still be fused with its reader"

    def __init__(self, kinds: frozenset[str], misread: frozenset[str] = frozenset()) -> None:
        self.kinds, self.misread = kinds, misread

    def match(self, node: Any) -> Any | None:
        """Return the float result of a reduction, unless only such a Max reads it."""
        if node.op_type not in self.kinds and not (node.op_type in self.misread and misreads_channels(node)):
            return None
        result = node.outputs[0]
        readers = [reader for reader, _ in result.uses()]
        separated = len(readers) == 2 and readers[0] is readers[1] and readers[0].op_type == "Max"
        floats = result.dtype is not None and result.dtype.is_floating_point()
        return result if readers and floats and not separated else None

    def apply(self, model: Any, node: Any, matched: Any) -> None:
        import onnx_ir

        same = onnx_ir.Node("", "Max", [matched, matched])
        same.metadata_props.update(node.metadata_props)
        same.outputs[0].shape, same.outputs[0].type = matched.shape, matched.type
        for reader, index in tuple(matched.uses()):
            if reader is not same:
                reader.replace_input_with(index, same.outputs[0])
        model.graph.insert_after(node, same)


class FactorsBeforeReductions(_MaxBetween):
    """``x * factors -> ReduceMean`` becomes ``x * factors -> Max(y, y) -> ReduceMean`` in Q/DQ files."""

    left = "factors can still be moved behind a reduction"

    def __init__(self, kinds: frozenset[str]) -> None:
        self.kinds = kinds

    def match(self, node: Any) -> Any | None:
        """Return the input of a reduction behind which factors would be misread; None otherwise."""
        if node.op_type not in self.kinds or not misreads_channels_before(node):
            return None
        value = node.inputs[0]
        floats = value.dtype is not None and value.dtype.is_floating_point()
        return value if floats and any(is_quantize(other) for other in node.graph) else None


class GathersApart(_MaxBetween):
    """``MatMul -> Gather`` becomes ``MatMul -> Max(x, x) -> Gather``."""

    left = "zero points can still be moved behind a Gather"

    def match(self, node: Any) -> Any | None:
        """Return the input of a Gather of such a result; None for any other node."""
        return node.inputs[0] if gathers_zero_points(node) else None


class KeptAxes(MatchPass[int]):
    """``Gather(x, 3)`` becomes ``Gather(x, [3]) -> Squeeze``."""

    left = "a Gather behind a MatMul or Conv still removes an axis"

    def match(self, node: Any) -> int | None:
        """Return the index of such a Gather; None for any other node."""
        if not gathers_axis(node):
            return None
        index = constant(node.inputs[1])
        assert index is not None
        return int(index)

    def apply(self, model: Any, node: Any, matched: int) -> None:
        import onnx_ir

        axis, value, result, index = attribute(node, "axis", 0), node.inputs[0], node.outputs[0], node.inputs[1]
        sizes = list(value.shape)
        sizes[axis] = 1
        int64 = onnx_ir.DataType.INT64
        constants = {"index": [matched], "axis": [axis % len(sizes)]}
        at, axes = (add_constant(model, f"{result.name}.{key}", np.array(constants[key]), int64) for key in constants)
        attributes = [onnx_ir.AttrInt64("axis", axis)]
        gathered = insert_before(
            node, "Gather", [value, at], like=result, shape=onnx_ir.Shape(sizes), attributes=attributes
        )
        squeezed = insert_before(node, "Squeeze", [gathered, axes], like=result, shape=result.shape)
        name = result.name
        result.replace_all_uses_with(squeezed, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
        drop_unread(model, index)
        squeezed.name = name


class ConcatsBeforeQuantize(_MaxBetween):
    """``Concat -> Q`` becomes ``Concat -> Max(x, x) -> Q``."""

    left = "a Concat can still be moved behind the Q"

    def match(self, node: Any) -> Any | None:
        """Return the input of a Q behind a Concat of positions; None for any other node."""
        return node.inputs[0] if joins_before(node) else None
