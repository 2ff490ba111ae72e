"""Graph passes that choose where values are quantized and how quantized values are stored."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Literal

import numpy as np

from quantizer.export.passes.base import MatchPass, add_constant, drop_unread, insert_before, replace_node
from quantizer.export.qdq.graph import (
    attribute,
    element,
    floats,
    has_odd_pairs,
    is_dequantize,
    is_dequantized,
    is_quantize,
    pair_before,
    readers,
)
from quantizer.export.qdq.operand import MOVES
from quantizer.numerics.formats import INT8

_LAYOUT = frozenset(
    {
        "Transpose",
        "Reshape",
        "Squeeze",
        "Unsqueeze",
        "Flatten",
        "Identity",
        "Slice",
        "Gather",
        "Split",
        "Expand",
        "Tile",
    }
    | {"Concat", "Where", "Pad", "Max", "Min", "DepthToSpace", "SpaceToDepth", "GatherElements", "GatherND"}
)
"""Operators that only move or select values."""
_COMPARED = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_WIDE = "INT32"


class BytesFirst:
    """``Transpose(x) -> Cast`` of a byte input x becomes ``Cast(x, INT32) -> Transpose -> Cast``.

    For targets that accept bytes only in a Cast of an input. Sums and products of bytes wrap around, and stay
    unchanged.
    """

    def __init__(self, narrow: Collection[str]) -> None:
        self._narrow = frozenset(narrow)

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        import onnx_ir

        inputs = [value for value in model.graph.inputs if self._nodes_reached(value)]
        for value in inputs:
            nodes = self._nodes_reached(value)
            for node in nodes:
                for index, value_read in enumerate(node.inputs):
                    if element(value_read) in self._narrow and value_read.const_value is not None:
                        array = value_read.const_value.numpy().astype(np.int32)
                        wide = add_constant(model, f"{value_read.name}_wide", array, onnx_ir.DataType[_WIDE])
                        node.replace_input_with(index, wide)
                for result in node.outputs:
                    if element(result) in self._narrow:
                        result.type = onnx_ir.TensorType(onnx_ir.DataType[_WIDE])
            cast = onnx_ir.Node("", "Cast", [value], [onnx_ir.AttrInt64("to", int(onnx_ir.DataType[_WIDE]))])
            cast.outputs[0].shape, cast.outputs[0].type = value.shape, onnx_ir.TensorType(onnx_ir.DataType[_WIDE])
            cast.metadata_props.update(nodes[0].metadata_props)
            for node in nodes:
                for index, value_read in enumerate(node.inputs):
                    if value_read is value:
                        node.replace_input_with(index, cast.outputs[0])
            model.graph.insert_before(model.graph[0], cast)
        return len(inputs)

    def ensures(self, model: Any) -> str | None:
        unchanged = [value.name for value in model.graph.inputs if self._nodes_reached(value)]
        return f"a byte input is still read by other operators than Cast: {unchanged[0]}" if unchanged else None

    def _nodes_reached(self, value: Any) -> list[Any]:
        """Return the nodes that read a byte input through layout operators; empty if it must not change."""
        if element(value) not in self._narrow:
            return []
        reached: dict[Any, None] = {}
        pending = [value]
        while pending:
            tensor = pending.pop()
            if tensor.is_graph_output():
                return []
            for node, _ in tensor.uses():
                if node.op_type == "Cast" or node in reached:
                    continue
                if node.graph is not value.graph or node.op_type not in _LAYOUT | _COMPARED:
                    return []
                reached[node] = None
                pending += [result for result in node.outputs if element(result) in self._narrow]
        narrow_reads = (read for node in reached for read in node.inputs if element(read) in self._narrow)
        known = {id(value)} | {id(result) for node in reached for result in node.outputs}
        return (
            list(reached)
            if all(id(tensor) in known or tensor.const_value is not None for tensor in narrow_reads)
            else []
        )


class QuantizedMoves(MatchPass[tuple[Any, Any]]):
    """``Q -> DQ -> MaxPool`` becomes ``Q -> DQ -> MaxPool -> Q -> DQ`` with one scale, where no Q reads it.

    An operator that moves values returns the same quantized values, so the added pair changes nothing. The engine moves
    bytes, and the next operator reads a quantized operand.
    """

    left = "an operator still moves floats where quantized values exist"

    def match(self, node: Any) -> tuple[Any, Any] | None:
        """Return the Q and the DQ before an operator that moves values; None for any other node."""
        if not _only_moves(node) or node.outputs[0].is_graph_output():
            return None
        pair = pair_before(node.inputs[0])
        if pair is None or not is_quantize(pair[0]):
            return None
        scale = floats(pair[0].inputs[1])
        read = readers(node.outputs[0])
        return pair if scale is not None and scale.ndim == 0 and read and not all(map(is_quantize, read)) else None

    def apply(self, model: Any, node: Any, matched: tuple[Any, Any]) -> None:
        quantize, dequantize = matched
        moved = node.outputs[0]
        first = readers(moved)[0]
        codes = insert_before(
            first, "QuantizeLinear", [moved, *quantize.inputs[1:]], like=quantize.outputs[0], shape=moved.shape
        )
        values = insert_before(
            first, "DequantizeLinear", [codes, *dequantize.inputs[1:]], like=moved, shape=moved.shape
        )
        codes.producer().metadata_props.update(node.metadata_props)
        values.producer().metadata_props.update(node.metadata_props)
        for reader, place in list(moved.uses()):
            if reader is not codes.producer():
                reader.replace_input_with(place, values)

    def run(self, model: Any) -> int:
        # Moves can follow each other, so the graph is sorted again.
        changed = super().run(model)
        if changed:
            model.graph.sort()
        return changed


def _only_moves(node: Any) -> bool:
    """Return whether an operator only moves values of its first input."""
    if node.op_type in ("MaxPool", "DepthToSpace", "SpaceToDepth", *MOVES):
        return len(node.outputs) == 1
    mode = node.attributes["mode"].as_string() if "mode" in node.attributes else "nearest"
    return node.op_type == "Resize" and mode == "nearest"


_ZERO = -INT8.qmin
_NAME = "quantizer_unsigned_zero_point"


class UnsignedActivations:
    """``Q(x, s, int8 0) -> DQ`` becomes ``Q(x, s, uint8 128) -> DQ(.., uint8 128)``.

    AVX512-VNNI's ``vpdpbusd`` multiplies unsigned by signed bytes. With scale s, INT8 value q and u = q + 128:
    s * (u - 128) = s * q. Quantized values that are a graph output stay signed.
    """

    def __init__(self, where: Literal["weighted", "all"]) -> None:
        self.where = where

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        import onnx_ir

        quantizers = list(self._signed(model))
        if not quantizers:
            return 0
        zero = add_constant(model, _NAME, np.array(_ZERO, dtype=np.uint8), onnx_ir.DataType.UINT8)
        for quantize in quantizers:
            _set_zero_point(quantize, zero)
            quantize.outputs[0].type = onnx_ir.TensorType(onnx_ir.DataType.UINT8)
            for dequantize, _ in quantize.outputs[0].uses():
                _set_zero_point(dequantize, zero)
        return len(quantizers)

    def ensures(self, model: Any) -> str | None:
        unchanged = [node.name for node in self._signed(model)]
        return f"an activation is still signed: {unchanged[0]}" if unchanged else None

    def _signed(self, model: Any) -> Iterator[Any]:
        for node in model.graph:
            if node.op_type != "QuantizeLinear" or not _is_signed_scalar(node.inputs[2]):
                continue
            if _has_only_dequantizers(node) and (self.where == "all" or _feeds_a_weighted_product(node)):
                yield node


def _is_signed_scalar(zero_point: Any) -> bool:
    """Return whether a zero point is a single INT8 number; only INT8 activations fit into UINT8."""
    constant = zero_point.const_value
    return constant is not None and constant.dtype.name == INT8.onnx_type and len(constant.shape) == 0


def _has_only_dequantizers(quantize: Any) -> bool:
    """Return whether only DequantizeLinear nodes read the output of a Q, which is not a graph output."""
    codes = quantize.outputs[0]
    readers = [(reader.op_type, index) for reader, index in codes.uses()]
    return not codes.is_graph_output() and all(reader == ("DequantizeLinear", 0) for reader in readers)


def _set_zero_point(node: Any, zero: Any) -> None:
    if len(node.inputs) < 3:
        node.resize_inputs(3)
    node.replace_input_with(2, zero)


def _feeds_a_weighted_product(quantize: Any) -> bool:
    readers = [reader for dequantize, _ in quantize.outputs[0].uses() for reader, _ in dequantize.outputs[0].uses()]
    return any(_is_stored_weight(value) for reader in readers for value in reader.inputs)


def _is_stored_weight(value: Any) -> bool:
    return is_dequantized(value) and bool(value.producer().inputs[0].is_initializer())


_BYTES = {"INT4": "INT8", "UINT4": "UINT8"}


class OddPairsAsBytes(MatchPass[str]):
    """``INT4 [K, N] -> DQ -> MatMul`` with an odd K becomes ``INT8 [K, N] -> DQ -> MatMul``.

    For targets that misread such INT4 weights, see ``export/qdq/graph.py``. The values do not change.
    """

    left = "an INT4 weight still has an odd number of inputs"

    def match(self, node: Any) -> str | None:
        """Return the byte format for the stored values of a DQ; None for any other node."""
        return _BYTES[node.inputs[0].dtype.name] if has_odd_pairs(node) else None

    def apply(self, model: Any, node: Any, matched: str) -> None:
        import onnx_ir

        element = onnx_ir.DataType[matched]
        for place in (0, 2):
            value = node.inputs[place] if place < len(node.inputs) else None
            if value is not None:
                codes = value.const_value.numpy().astype(element.numpy())
                node.replace_input_with(place, add_constant(model, f"{value.name}_bytes", codes, element))
                drop_unread(model, value)


class QuantizedRows(MatchPass[Any]):
    """``DQ(t, s, axis 0) -> Gather`` becomes ``Gather -> Cast`` of the integers, times the scales of those rows.

    For a stored table t [V x D], its scales s [V] and row indices i: Gather(DQ(t, s), i) = Cast(Gather(t, i)) *
    Gather(s, i). ONNX Runtime otherwise dequantizes the whole table in each run: 6 ms for the 30,522 rows of MiniLM,
    whose run takes 11 ms.
    """

    left = "a whole table is still dequantized to read some rows"

    def match(self, node: Any) -> Any | None:
        """Return the DQ of a stored INT8 table with one scale per row, if the node gathers rows of it."""
        if node.op_type != "Gather" or attribute(node, "axis", 0) != 0:
            return None
        table = node.inputs[0].producer()
        if not is_dequantize(table) or table.inputs[0].const_value is None or attribute(table, "block_size", 0):
            return None
        codes, scales, *zero = table.inputs
        symmetric = not zero or zero[0] is None or not np.any(zero[0].const_value.numpy())
        rows = codes.shape.is_static() and len(codes.shape) == 2 and attribute(table, "axis", 1) == 0
        return table if rows and symmetric and codes.dtype.name == "INT8" and len(scales.shape) == 1 else None

    def apply(self, model: Any, node: Any, matched: Any) -> None:
        import onnx_ir

        result, (codes, scales) = node.outputs[0], matched.inputs[:2]
        column = floats(scales)
        assert column is not None
        tall = add_constant(model, f"{scales.name}_of_rows", column[:, None], scales.dtype)
        first = [onnx_ir.AttrInt64("axis", 0)]
        gathered = insert_before(
            node, "Gather", [codes, node.inputs[1]], like=codes, shape=result.shape, attributes=first
        )
        to = [onnx_ir.AttrInt64("to", scales.dtype)]
        cast = insert_before(node, "Cast", [gathered], like=result, shape=result.shape, attributes=to)
        step = insert_before(node, "Gather", [tall, node.inputs[1]], like=tall, shape=None, attributes=first)
        scaled = insert_before(node, "Mul", [cast, step], like=result, shape=result.shape)
        replace_node(model, node, scaled)
        if not matched.outputs[0].uses():
            inputs = [value for value in matched.inputs if value is not None]
            model.graph.remove(matched, safe=True)
            for value in inputs:
                drop_unread(model, value)
