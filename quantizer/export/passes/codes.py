"""Passes that choose where codes are made, moved, and how they are stored.

``BytesFirst`` casts inputs of bytes at once, for targets that read bytes nowhere else.

``image.permute(0, 3, 1, 2).float()`` of a uint8 image is a Transpose of bytes. As INT32 it is the same numbers.

``MovesOfCodes`` lets operators that only move values move their codes.

A maximum of neighbours, a repetition or another order of values gives values with the same codes, so that a Q and DQ
behind it change nothing. An engine that finds them there moves bytes, and the next operator finds a quantized operand.

``UnsignedActivations`` stores activations as UINT8 with zero point 128, for CPUs that multiply unsigned by signed
bytes.

Legend: s the scale, q the INT8 code of a value, -128 <= q <= 127.

AVX512-VNNI's ``vpdpbusd`` multiplies unsigned by signed bytes. With u = q + 128 and zero point 128, s * (u - 128) is
s * q: the same values, in the storage that the kernels of a CPU engine take.

``PairsOfCodes`` stores INT4 weights with an odd number of inputs as INT8, for a target that reads them wrongly.

See ``export/qdq/graph.py``.

``RowsOfCodes`` dequantizes the rows that are looked up, for a target that would dequantize the whole table.

Legend: t the codes of a table [V x D], s its scales [V], i the rows.

    Gather(DQ(t, s), i) = Cast(Gather(t, i)) * Gather(s, i)

ONNX Runtime computes a DQ of a table at each run: of MiniLM's 30,522 rows, which takes 6 ms where the whole text of 128
tokens takes 11. OpenVINO computes it once, and holds the table in floats.
"""

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
"""Operators that make no new numbers."""
_COMPARED = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_WIDE = "INT32"


class BytesFirst:
    """``Transpose(x) -> Cast`` of an input x of bytes becomes ``Cast(x, INT32) -> Transpose -> Cast``.

    Sums and products of bytes wrap around, and stay as they are.
    """

    def __init__(self, narrow: Collection[str]) -> None:
        self._narrow = frozenset(narrow)

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        import onnx_ir

        found = [value for value in model.graph.inputs if self._reached(value)]
        for value in found:
            reached = self._reached(value)
            for node in reached:
                for place, given in enumerate(node.inputs):
                    if element(given) in self._narrow and given.const_value is not None:
                        array = given.const_value.numpy().astype(np.int32)
                        wide = add_constant(model, f"{given.name}_wide", array, onnx_ir.DataType[_WIDE])
                        node.replace_input_with(place, wide)
                for made in node.outputs:
                    if element(made) in self._narrow:
                        made.type = onnx_ir.TensorType(onnx_ir.DataType[_WIDE])
            cast = onnx_ir.Node("", "Cast", [value], [onnx_ir.AttrInt64("to", int(onnx_ir.DataType[_WIDE]))])
            cast.outputs[0].shape, cast.outputs[0].type = value.shape, onnx_ir.TensorType(onnx_ir.DataType[_WIDE])
            cast.metadata_props.update(reached[0].metadata_props)
            for node in reached:
                for place, given in enumerate(node.inputs):
                    if given is value:
                        node.replace_input_with(place, cast.outputs[0])
            model.graph.insert_before(model.graph[0], cast)
        return len(found)

    def ensures(self, model: Any) -> str | None:
        left = [value.name for value in model.graph.inputs if self._reached(value)]
        return f"an input of bytes is still read by more than casts: {left[0]}" if left else None

    def _reached(self, value: Any) -> list[Any]:
        """Return the nodes but casts that read a narrow input or what layout makes of it; empty if it must stay."""
        if element(value) not in self._narrow:
            return []
        found: dict[Any, None] = {}
        pending = [value]
        while pending:
            one = pending.pop()
            if one.is_graph_output():
                return []
            for node, _ in one.uses():
                if node.op_type == "Cast" or node in found:
                    continue
                if node.graph is not value.graph or node.op_type not in _LAYOUT | _COMPARED:
                    return []
                found[node] = None
                pending += [made for made in node.outputs if element(made) in self._narrow]
        others = (given for node in found for given in node.inputs if element(given) in self._narrow)
        known = {id(value)} | {id(made) for node in found for made in node.outputs}
        return list(found) if all(id(one) in known or one.const_value is not None for one in others) else []


class MovesOfCodes(MatchPass[tuple[Any, Any]]):
    """``Q -> DQ -> MaxPool`` becomes ``Q -> DQ -> MaxPool -> Q -> DQ``, of one scale, where no Q reads it."""

    left = "an operator still moves floats that have codes"

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

    def apply(self, model: Any, node: Any, found: tuple[Any, Any]) -> None:
        quantize, dequantize = found
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
        # In the order of the graph: behind one move may be another.
        changed = super().run(model)
        if changed:
            model.graph.sort()
        return changed


def _only_moves(node: Any) -> bool:
    """Return whether the results of an operator are values of its first input."""
    if node.op_type in ("MaxPool", "DepthToSpace", "SpaceToDepth", *MOVES):
        return len(node.outputs) == 1
    mode = node.attributes["mode"].as_string() if "mode" in node.attributes else "nearest"
    return node.op_type == "Resize" and mode == "nearest"


_ZERO = -INT8.qmin
_NAME = "quantizer_unsigned_zero_point"


class UnsignedActivations:
    """``Q(x, s, int8 0) -> DQ`` becomes ``Q(x, s, uint8 128) -> DQ(.., uint8 128)``; codes that are a result stay."""

    def __init__(self, where: Literal["weighted", "all"]) -> None:
        self.where = where

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        import onnx_ir

        chosen = list(self._signed(model))
        if not chosen:
            return 0
        zero = add_constant(model, _NAME, np.array(_ZERO, dtype=np.uint8), onnx_ir.DataType.UINT8)
        for quantize in chosen:
            _set_zero_point(quantize, zero)
            quantize.outputs[0].type = onnx_ir.TensorType(onnx_ir.DataType.UINT8)
            for dequantize, _ in quantize.outputs[0].uses():
                _set_zero_point(dequantize, zero)
        return len(chosen)

    def ensures(self, model: Any) -> str | None:
        left = [node.name for node in self._signed(model)]
        return f"an activation is still signed: {left[0]}" if left else None

    def _signed(self, model: Any) -> Iterator[Any]:
        for node in model.graph:
            if node.op_type != "QuantizeLinear" or not _is_signed_scalar(node.inputs[2]):
                continue
            if _is_read_as_a_value(node) and (self.where == "all" or _feeds_a_weighted_product(node)):
                yield node


def _is_signed_scalar(zero_point: Any) -> bool:
    """Return whether a zero point is one INT8 number: no other format fits UINT8, and only one number is written."""
    constant = zero_point.const_value
    return constant is not None and constant.dtype.name == INT8.onnx_type and len(constant.shape) == 0


def _is_read_as_a_value(quantize: Any) -> bool:
    """Return whether only DQs read the codes, and no output of the graph is one of them."""
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
