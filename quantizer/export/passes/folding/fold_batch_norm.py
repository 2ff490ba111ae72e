"""Pass that folds a batch normalization into the convolution with a stored weight before it.

Legend: q [C, ..] the codes of the weight, t [C] their scales, b [C] the bias; g [C] = gain / sqrt(variance + epsilon).

    (x * (q t) + b - mean) g + shift = x * (q sign(g)) (t |g|) + (b - mean) g + shift

A scale is positive, so the sign goes into the codes. A channel with g = 0 gets codes of 0 and keeps its scale. The pair
stays if a code has no negative (-128), or if a scale would be subnormal and lose its precision.

A convolution that is called several times, with one normalization or one for each level, then has a dequantizer for
each call: the scales are its own, and calls whose factors have the same signs share the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass, add_constant, drop_unread, insert_before, smallest_normal, take_out
from quantizer.qdq.graph import attribute, floats, is_dequantize

_CHANNELS = {"Conv": 0, "ConvTranspose": 1}
"""The axis of the output channels in a weight, by operator."""


@dataclass(frozen=True, slots=True)
class _Folded:
    """Folded convolution: its codes, their scales [C] along ``axis``, and its bias [C]."""

    convolution: Any
    axis: int
    codes: np.ndarray[Any, Any]
    scales: np.ndarray[Any, Any]
    bias: np.ndarray[Any, Any]


class FoldBatchNorm(MatchPass[_Folded]):
    """``Conv(x, DQ(q, t), b) -> BatchNormalization`` becomes ``Conv(x, DQ(q', t'), b')``."""

    left = "a batch normalization could still be folded"

    def match(self, node: Any) -> _Folded | None:
        """Return the convolution before a batch normalization, folded; None for a node that stays as it is."""
        if node.op_type != "BatchNormalization" or node.outputs[0].is_graph_output():
            return None
        convolution = node.inputs[0].producer()
        if convolution is None or convolution.op_type not in _CHANNELS or len(list(node.inputs[0].uses())) != 1:
            return None
        if node.inputs[0].is_graph_output():
            return None
        axis = _CHANNELS[convolution.op_type]
        if axis == 1 and attribute(convolution, "group", 1) != 1:
            return None
        weight = _stored(convolution.inputs[1], axis)
        statistics = [floats(value) for value in node.inputs[1:]]
        given = convolution.inputs[2] if len(convolution.inputs) > 2 else None
        before = np.zeros(()) if given is None else floats(given)
        if weight is None or before is None or any(value is None for value in statistics):
            return None
        gain, shift, mean, variance = (value.astype(np.float64) for value in statistics if value is not None)
        epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
        factors = gain / np.sqrt(variance + epsilon)
        turned = _turned(*weight, axis, factors)
        if turned is None:
            return None
        bias = (before.astype(np.float64) - mean) * factors + shift
        return _Folded(convolution, axis, *turned, bias.astype(weight[1].dtype))

    def apply(self, model: Any, node: Any, found: _Folded) -> None:
        """Give the convolution new constants: the present ones may have other readers."""
        import onnx_ir

        convolution, dequantize = found.convolution, _own_dequantizer(model, found.convolution)
        step, scale = dequantize.inputs[:2]
        dequantize.replace_input_with(0, _shared_constant(model, f"{step.name}_folded", found.codes, step.dtype))
        dequantize.replace_input_with(1, add_constant(model, f"{scale.name}_folded", found.scales, scale.dtype))
        dequantize.attributes["axis"] = onnx_ir.AttrInt64("axis", found.axis)
        old = convolution.inputs[2] if len(convolution.inputs) > 2 else None
        convolution.resize_inputs(3)
        convolution.replace_input_with(2, add_constant(model, f"{scale.name}_bias", found.bias, scale.dtype))
        for value in (step, scale, old):
            if value is not None:
                drop_unread(model, value)
        take_out(model, node, convolution.outputs[0])


def _own_dequantizer(model: Any, convolution: Any) -> Any:
    """Return the dequantizer of a weight, with no other reader: a new one if the present one has some."""
    weight = convolution.inputs[1]
    dequantize = weight.producer()
    if len(list(weight.uses())) == 1:
        return dequantize
    attributes = list(dequantize.attributes.values())
    made = insert_before(
        convolution,
        "DequantizeLinear",
        dequantize.inputs,
        like=weight,
        shape=weight.shape,
        attributes=attributes,
    )
    made.producer().metadata_props.update(dequantize.metadata_props)
    convolution.replace_input_with(1, made)
    return made.producer()


def _shared_constant(model: Any, name: str, array: np.ndarray[Any, Any], element: Any) -> Any:
    """Return a constant of this name with these values: the one that is there, or a new one."""
    known = model.graph.initializers.get(name)
    if known is not None and np.array_equal(known.const_value.numpy(), array):
        return known
    return add_constant(model, name, array, element)


def _stored(value: Any, axis: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """Return codes and scales of a weight with one scale, or one for each output channel."""
    node = value.producer()
    if not is_dequantize(node):
        return None
    codes, scales = node.inputs[0].const_value, floats(node.inputs[1])
    if codes is None or scales is None or scales.ndim > 1 or (len(node.inputs) > 2 and node.inputs[2] is not None):
        return None
    if scales.ndim == 1 and node.attributes["axis"].as_int() % len(codes.shape) != axis:
        return None
    return codes.numpy(), scales


def _turned(
    codes: np.ndarray[Any, Any], scales: np.ndarray[Any, Any], axis: int, factors: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """Return codes and scales times the factors; None if they are not exact."""
    channels = np.moveaxis(codes, axis, 0).astype(np.float32)
    signs = np.sign(factors).astype(np.float32)
    made = channels * signs.reshape(-1, *[1] * (codes.ndim - 1))
    stored = made.astype(codes.dtype)
    wanted = np.where(factors == 0, 1.0, np.abs(factors)) * scales.astype(np.float64)
    multiplied = wanted.astype(scales.dtype)
    if not np.array_equal(stored.astype(np.float32), made) or (wanted < smallest_normal(scales.dtype)).any():
        return None
    return np.ascontiguousarray(np.moveaxis(stored, 0, axis)), multiplied
