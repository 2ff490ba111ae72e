"""Graph passes that store weights quantized, in the layout that engines read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quantizer.export.passes.base import MatchPass, add_constant, drop_unread, insert_before
from quantizer.export.qdq.graph import attribute, block_size, floats, is_dequantize, is_dequantized
from quantizer.numerics import torch_operators as ops
from quantizer.numerics.formats import QTYPES, QType

_EXPERTS = 3  # axes


class ExpertWeights(MatchPass[int]):
    """``Gather(DQ(w [E, K, N], s [E, 1, N]), e)`` becomes ``DQ(w[e] [K, N], s[e] [N], axis 1)``."""

    left = "a Gather still reads a matrix of dequantized experts"

    def match(self, node: Any) -> int | None:
        """Return the expert index of a Gather of stored expert weights; None for any other node."""
        if node.op_type != "Gather" or not is_dequantized(node.inputs[0]):
            return None
        stored = node.inputs[0].producer().inputs
        number = node.inputs[1].const_value
        constant = number is not None and all(value is None or value.const_value is not None for value in stored)
        first_axis = "axis" not in node.attributes or node.attributes["axis"].as_int() == 0
        if not constant or not first_axis or number.numpy().ndim or len(stored[0].shape) != _EXPERTS:
            return None
        return int(number.numpy())

    def apply(self, model: Any, node: Any, matched: int) -> None:
        import onnx_ir

        dequantize = node.inputs[0].producer()
        axis = dequantize.attributes["axis"].as_int() if "axis" in dequantize.attributes else None
        blocks = block_size(dequantize)
        depth = int(dequantize.inputs[0].shape[1])

        def of_expert(array: Any) -> Any:
            """Return the scales of one expert, per channel, per block or scalar."""
            if array.ndim == 0:
                return array
            return array[matched].reshape(-1) if blocks == depth else array[matched]

        def constant(value: Any, change: Any) -> Any:
            array = np.ascontiguousarray(change(value.const_value.numpy()))
            return add_constant(model, f"{value.name}_{matched}", array, value.const_value.dtype)

        codes, scale, *zero = (value for value in dequantize.inputs if value is not None)
        inputs = [constant(codes, lambda array: array[matched]), constant(scale, of_expert)]
        inputs += [constant(value, of_expert) for value in zero]
        attributes = []
        if blocks is not None:
            is_channelwise = blocks == depth
            attributes = [onnx_ir.AttrInt64("axis", 1 if is_channelwise else int(axis or 0) - 1)]
            attributes += [] if is_channelwise else [onnx_ir.AttrInt64("block_size", blocks)]
        experts = node.inputs[0]
        shape = onnx_ir.Shape(experts.shape[1:])
        matrix = insert_before(node, "DequantizeLinear", inputs, like=experts, shape=shape, attributes=attributes)
        matrix.producer().metadata_props.update(dequantize.metadata_props)
        node.outputs[0].replace_all_uses_with(matrix)
        index = node.inputs[1]
        model.graph.remove(node, safe=True)
        drop_unread(model, index)
        if not experts.uses():
            stored = [value for value in dequantize.inputs if value is not None]
            model.graph.remove(dequantize, safe=True)
            for value in stored:
                drop_unread(model, value)


_MATRIX = 2  # axes


@dataclass(frozen=True, slots=True)
class _Spread:
    """Input index of a MatMul behind an Expand, and the DequantizeLinear before it."""

    index: int
    dequantize: Any


class UnspreadWeights(MatchPass[_Spread]):
    """``MatMul(x [B, M, K], Expand(DQ(w [1, K, N])))`` becomes ``MatMul(x, DQ(w [K, N]))``.

    ``torch.bmm(x, w.expand(len(x), -1, -1))`` exports with this Expand. MatMul broadcasts without it, and engines have
    integer kernels only for stored weights.
    """

    left = "a stored weight is still expanded over the batch before its MatMul"

    def match(self, node: Any) -> _Spread | None:
        """Return the expanded input; None for any other node, or if the other input may broadcast."""
        if node.op_type != "MatMul":
            return None
        for index, value in enumerate(node.inputs):
            expand, other = value.producer(), node.inputs[1 - index]
            if expand is None or expand.op_type != "Expand" or value.shape is None or other.shape is None:
                continue
            dequantize = expand.inputs[0].producer()
            if not is_dequantize(dequantize) or not dequantize.inputs[0].is_initializer():
                continue
            shape, spread = list(dequantize.inputs[0].shape), list(value.shape)
            lead = _lead(value)
            ones = len(shape) == len(spread) and all(size == 1 for size in shape[:-_MATRIX])
            # Equal names of dynamic sizes mean equal sizes; a size without a name is unknown.
            known = None not in [getattr(size, "value", size) for size in lead]
            if ones and known and lead and shape[-_MATRIX:] == spread[-_MATRIX:] and _lead(other) == lead:
                return _Spread(index, dequantize)
        return None

    def apply(self, model: Any, node: Any, matched: _Spread) -> None:
        """Let the node read the weight directly, as a matrix if nothing else reads it."""
        dequantize = matched.dequantize
        spread = node.inputs[matched.index]
        node.replace_input_with(matched.index, dequantize.outputs[0])
        if not spread.uses() and not spread.is_graph_output():
            spread.producer().graph.remove(spread.producer(), safe=True)
        _as_matrix(dequantize)


def _lead(value: Any) -> list[Any]:
    """Return the sizes of the axes before the matrix."""
    return list(value.shape)[:-_MATRIX]


def _as_matrix(dequantize: Any) -> None:
    """Store a weight [1, K, N] as [K, N] if a single node reads it, and without blocks."""
    import onnx_ir

    stored, scale = dequantize.inputs[0], dequantize.inputs[1]
    single_readers = len(list(stored.uses())) == 1 and len(list(dequantize.outputs[0].uses())) == 1
    if not single_readers or stored.const_value is None or scale.shape is None or len(scale.shape) > 1:
        return
    shape = list(stored.shape)
    axis = attribute(dequantize, "axis", 1) % len(shape)
    before = len(shape) - _MATRIX
    if len(scale.shape) == 1 and axis < before:
        return
    matrix: Any = onnx_ir.tensor(stored.const_value.numpy().reshape(shape[before:]), name=stored.name)
    stored.const_value, stored.shape = matrix, onnx_ir.Shape(matrix.shape)
    dequantize.outputs[0].shape = onnx_ir.Shape(matrix.shape)
    if len(scale.shape) == 1:
        dequantize.attributes["axis"] = onnx_ir.AttrInt64("axis", axis - before)


class WeightsAsRead:
    """``DQ(w [N, K], axis 0) -> Transpose -> MatMul`` becomes ``DQ(w' [K, N], axis 1) -> MatMul``.

    ``torch.nn.functional.linear`` exports with this Transpose, once per call of a module. Scales [N, K / B] of blocks
    on axis 1 become [K / B, N] on axis 0.
    """

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        changed = 0
        for dequantize, transposes in _transposed_weights(model):
            _transpose_weight(dequantize)
            for transpose in transposes:
                transpose.outputs[0].replace_all_uses_with(dequantize.outputs[0])
                transpose.graph.remove(transpose, safe=True)
                changed += 1
        return changed

    def ensures(self, model: Any) -> str | None:
        unchanged = [transposes[0].name for _, transposes in _transposed_weights(model)]
        return f"a Transpose still follows a stored weight: {unchanged[0]}" if unchanged else None


def _transposed_weights(model: Any) -> list[tuple[Any, list[Any]]]:
    """Return the dequantizers of weights that only Transposes read, each with its Transposes."""
    weights = []
    for node in model.graph:
        if not is_dequantize(node) or node.outputs[0].is_graph_output() or len(node.inputs[0].shape or ()) != 2:
            continue
        readers = node.outputs[0].consumers()
        # Other readers need the original layout.
        if readers and all(map(_is_transpose, readers)) and all(map(_has_one_reader, _matrices(node))):
            weights.append((node, list(readers)))
    return weights


def _is_transpose(node: Any) -> bool:
    return bool(node.op_type == "Transpose" and node.attributes["perm"].as_ints() == (1, 0))


def _matrices(dequantize: Any) -> list[Any]:
    """Return the stored weight, and scale and zero point if they are matrices of blocks."""
    return [value for value in dequantize.inputs if value is not None and len(value.shape) == 2]


def _has_one_reader(value: Any) -> bool:
    """Return whether a value is a constant with a single reader."""
    return value.is_initializer() and value.const_value is not None and len(list(value.uses())) == 1


def _transpose_weight(dequantize: Any) -> None:
    """Transpose a stored weight and its block scales, and swap the axis of the DequantizeLinear."""
    import onnx_ir

    for value in _matrices(dequantize):
        value.const_value = onnx_ir.tensor(np.ascontiguousarray(value.const_value.numpy().T), name=value.name)
        value.shape = onnx_ir.Shape(value.const_value.shape)
    dequantize.outputs[0].shape = onnx_ir.Shape(dequantize.inputs[0].const_value.shape)
    if len(dequantize.inputs[1].shape) > 0:
        axis = dequantize.attributes["axis"].as_int() % 2
        dequantize.attributes["axis"] = onnx_ir.AttrInt64("axis", 1 - axis)


class StoreWeights:
    """``Q(w, s) -> DQ`` and ``Cast(w) -> DQ`` of a constant w become ``DQ`` of stored quantized values.

    A frozen proxy holds INT4 weights in bytes; a proxy in training holds floats behind a Q/DQ pair. ``Add(b, d)`` of
    two constants [C] becomes the constant b + d (``algorithms/bias_correction.py``): the exporter only folds small
    constants.
    """

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        import onnx_ir

        weights = _constant_weights(model)
        for node, kind in weights:
            element = onnx_ir.DataType[kind.onnx_type]
            # Values of at most 8 bits are exact in float32, which numpy converts to every format.
            codes = _quantized_values(node, kind).astype(np.float32).astype(element.numpy())
            name = "_".join([*(value.name for value in node.inputs[:2]), "stored"])
            node.outputs[0].replace_all_uses_with(add_constant(model, name, codes, element))
            _remove(model, node)
        shifted = _shifted_biases(model)
        for node, bias, shift in shifted:
            value = node.inputs[0]
            # Round once, like a sum of two numbers of this type.
            total = (bias.astype(np.float64) + shift).astype(bias.dtype)
            node.outputs[0].replace_all_uses_with(add_constant(model, f"{value.name}_shifted", total, value.dtype))
            _remove(model, node)
        return len(weights) + len(shifted)

    def ensures(self, model: Any) -> str | None:
        unstored = [node.inputs[0].name for node, _ in _constant_weights(model)]
        unshifted = [node.inputs[0].name for node, _, _ in _shifted_biases(model)]
        if unshifted:
            return f"a bias is stored without its shift: {unshifted[0]}"
        return f"a weight is not stored in its format: {unstored[0]}" if unstored else None


def _constant_weights(model: Any) -> list[tuple[Any, QType]]:
    """Return the nodes that quantize a constant, and their formats."""
    formats = {kind.onnx_type: kind for kind in QTYPES.values()}
    weights = []
    for node in model.graph:
        if node.op_type not in ("QuantizeLinear", "Cast") or any(
            v is None or v.const_value is None for v in node.inputs
        ):
            continue
        kind = formats.get(_element_of(node))
        if kind is not None and (node.op_type == "QuantizeLinear" or kind.is_packed):
            weights.append((node, kind))
    return weights


def _shifted_biases(model: Any) -> list[tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Return the nodes that add two constants [C], and these constants."""
    biases = []
    for node in model.graph:
        if node.op_type == "Add" and not node.outputs[0].is_graph_output():
            first, second = map(floats, node.inputs)
            if first is not None and second is not None and first.ndim == 1 and first.shape == second.shape:
                biases.append((node, first, second))
    return biases


def _element_of(node: Any) -> str:
    """Return the name of the output element type of a Q or Cast."""
    import onnx_ir

    if node.op_type == "Cast":
        return onnx_ir.DataType(node.attributes["to"].as_int()).name
    return str(node.inputs[2].const_value.dtype.name)


def _quantized_values(node: Any, kind: QType) -> np.ndarray:
    """Return the quantized values that a Q or a Cast computes from its constant."""
    if node.op_type == "Cast":
        return np.asarray(node.inputs[0].const_value.numpy())
    weight, scale, zero = (torch.from_numpy(v.const_value.numpy().astype(np.float32)) for v in node.inputs)
    axis = node.attributes["axis"].as_int() if scale.dim() and "axis" in node.attributes else None
    zero_point = zero if kind.has_zero_point else None
    codes = ops.quantize(weight, scale, kind.name, axis, block_size(node), zero_point)
    return np.asarray(codes.float().numpy())


def _remove(model: Any, node: Any) -> None:
    """Remove the node and its unread constants."""
    inputs = list(node.inputs)
    model.graph.remove(node, safe=True)
    for value in inputs:
        drop_unread(model, value)
