"""Pass that folds multiplications by one factor a channel, or by one number, into the operators before them.

Legend: f [K] the factors, 1 / s of a migration of outliers (``calibration/smoothquant.py``), or [] the scale of an
attention; x [.., K] the input of a Q; n the normalized value before its weight w and bias b; q [K', K] the codes of a
linear's weight with scales t [K].

    (n * w + b) * f = n * (w * f) + b * f        (x' (q * t) + b) * f = x' (q * (t * f)) + b * f

So a normalization, or a linear whose weight has one scale for each output channel, does the multiplication at no cost,
also through a Reshape that keeps the last axis and through the elementwise product of a gate. A single number also
passes through every operator that only moves values. The multiplication stays if the value has other readers, or if the
operator before it is of another kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass, add_constant, drop_unread, smallest_normal
from quantizer.qdq.graph import attribute, floats, is_dequantize
from quantizer.qdq.operand import MATMULS, operands

_NORMALIZATIONS = {"LayerNormalization": (1, 2), "RMSNormalization": (1,)}
"""Inputs that scale and shift the result, by operator; all of them are [K]."""

_LAYOUT = frozenset({"Expand", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


@dataclass(frozen=True, slots=True)
class _Edit:
    """Constant input of a node that takes the factors in, with its new value."""

    node: Any
    index: int
    array: np.ndarray[Any, Any]


class FoldChannelFactors(MatchPass[list[_Edit]]):
    """``LayerNorm(x, w, b) -> Mul(f) -> Q`` becomes ``LayerNorm(x, w * f, b * f) -> Q``, and so on."""

    left = "a multiplication could still be folded"
    # Of two in a row, only quantizers read the first once the second is removed.
    backwards = True

    def match(self, node: Any) -> list[_Edit] | None:
        """Return the edits that replace a multiplication by factors; None for a node that stays."""
        factors = _factors(node)
        return None if factors is None else _edits(node.inputs[0], factors)

    def apply(self, model: Any, node: Any, found: list[_Edit]) -> None:
        for edit in found:
            # A new constant: the present one may have other readers.
            old = edit.node.inputs[edit.index]
            edit.node.replace_input_with(edit.index, add_constant(model, f"{old.name}_folded", edit.array, old.dtype))
            _drop(model, old)
        node.outputs[0].replace_all_uses_with(node.inputs[0])
        factors = node.inputs[1]
        model.graph.remove(node, safe=True)
        _drop(model, factors)


def _factors(node: Any) -> np.ndarray[Any, Any] | None:
    """Return f [K] or [] of a Mul (x, f) that only quantizers or products with stored weights read; None otherwise."""
    if node.op_type != "Mul" or node.inputs[1] is None:
        return None
    readers = list(node.outputs[0].uses())
    array = floats(node.inputs[1])
    if array is None or array.ndim > 1 or not readers or not all(_rounds(reader, index) for reader, index in readers):
        return None
    return None if node.outputs[0].is_graph_output() else array


def _rounds(reader: Any, index: int) -> bool:
    """Return whether a reader rounds its input, or multiplies it by a weight that is stored in codes."""
    if reader.op_type in MATMULS and index == 0:
        weight = operands(reader)[1]
        return weight.quantized and weight.is_weight
    return bool(reader.op_type in ("QuantizeLinear", "DynamicQuantizeLinear"))


def _edits(value: Any, factors: np.ndarray[Any, Any]) -> list[_Edit] | None:
    """Return the edits that multiply ``value`` [.., K] by the factors where it is computed; None if there are none."""
    node = value.producer()
    if node is None or value.is_graph_output() or len(list(value.uses())) != 1:
        return None
    if node.op_type in _NORMALIZATIONS:
        return _scaled(node, [i for i in _NORMALIZATIONS[node.op_type] if i < len(node.inputs)], factors)
    if factors.ndim == 0 and node.op_type in _LAYOUT:
        return _edits(node.inputs[0], factors)
    if node.op_type == "Reshape":
        shapes = value.shape, node.inputs[0].shape
        kept = all(shape is not None and len(shape) > 0 and shape[-1] == len(factors) for shape in shapes)
        return _edits(node.inputs[0], factors) if kept else None
    if node.op_type == "Mul":
        constant = next((i for i in (0, 1) if floats(node.inputs[i]) is not None), None)
        if constant is not None:
            return _scaled(node, [constant], factors)
        first = _edits(node.inputs[0], factors)
        return _edits(node.inputs[1], factors) if first is None else first
    if node.op_type in ("Add", "Gemm", "MatMul"):
        return _of_sum(node, factors)
    return None


def _of_sum(node: Any, factors: np.ndarray[Any, Any]) -> list[_Edit] | None:
    """Return these edits for a product with a stored weight, or for a sum with a constant."""
    if node.op_type == "MatMul":
        return _stored_weight(node.inputs[1], factors)
    if node.op_type == "Gemm":
        turned = bool(attribute(node, "transB", 0))
        product = _stored_weight(node.inputs[1], factors, from_end=2 if turned else 1)
        bias = [2] if len(node.inputs) > 2 else []
    else:
        bias = [i for i in (0, 1) if floats(node.inputs[i]) is not None][:1]
        product = _edits(node.inputs[1 - bias[0]], factors) if bias else None
    added = _scaled(node, bias, factors)
    return None if product is None or added is None else product + added


def _stored_weight(value: Any, factors: np.ndarray[Any, Any], from_end: int = 1) -> list[_Edit] | None:
    """Return the edit of the scales of a weight whose channels are the last axis (2: the last but one).

    None if a scale becomes subnormal, which would lose its precision.
    """
    node = value.producer()
    if not is_dequantize(node) or len(list(value.uses())) != 1:
        return None
    stored, axis = node.inputs[0].const_value, node.attributes.get("axis")
    if stored is None:
        return None
    if factors.ndim:
        along, channels = None if axis is None else axis.as_int() % len(stored.shape), len(stored.shape) - from_end
        if attribute(node, "block_size", 0):
            # Blocks of input channels: the scales of an output channel are a row or a column of a matrix.
            along, factors = channels, factors.reshape([-1] + [1] * (from_end - 1))
        if along != channels:
            return None
    edits = _scaled(node, [1], factors)
    tiny = edits is None or any((edit.array < smallest_normal(edit.array.dtype)).any() for edit in edits)
    return None if tiny else edits


def _scaled(node: Any, inputs: list[int], factors: np.ndarray[Any, Any]) -> list[_Edit] | None:
    """Return the edits of some inputs of a node; None if one is not a constant, or has not all the factors' axes."""
    arrays = [floats(node.inputs[index]) for index in inputs]
    edits = []
    for index, array in zip(inputs, arrays, strict=True):
        if array is None or not _fits(array.shape, factors.shape):
            return None
        edits.append(_Edit(node, index, (array.astype(np.float64) * factors).astype(array.dtype)))
    return edits


def _fits(shape: tuple[int, ...], factors: tuple[int, ...]) -> bool:
    """Return whether a tensor times factors is of its own shape, with a factor of its own for each index of an axis."""
    axes = len(factors)
    return len(shape) >= axes and all(
        factor in (1, size) for factor, size in zip(factors, shape[len(shape) - axes :], strict=True)
    )


def _drop(model: Any, value: Any) -> None:
    """Remove a constant that nothing reads."""
    drop_unread(model, value)
    if value.producer() is not None and not value.uses():
        model.graph.remove(value.producer(), safe=True)
