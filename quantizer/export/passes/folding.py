"""Graph passes that fold per-channel factors, batch normalizations and padding into adjacent layers.

Symbols: q quantized weight, t [C] its scales, b [C] the bias, f the factors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass, add_constant, drop_unread, insert_before, smallest_normal, take_out
from quantizer.export.qdq.graph import attribute, floats, is_dequantize, maker, pair_before, scalar
from quantizer.export.qdq.operand import MATMULS, operands

_CHANNELS = {"Conv": 0, "ConvTranspose": 1}
"""Axis of the output channels in a weight, by operator."""


@dataclass(frozen=True, slots=True)
class _Folded:
    """Folded convolution: quantized weight, its scales [C] along ``axis``, and its bias [C]."""

    convolution: Any
    axis: int
    codes: np.ndarray[Any, Any]
    scales: np.ndarray[Any, Any]
    bias: np.ndarray[Any, Any]


class FoldBatchNorm(MatchPass[_Folded]):
    """``Conv(x, DQ(q, t), b) -> BatchNormalization`` becomes ``Conv(x, DQ(q', t'), b')``.

    With g [C] = gain / sqrt(variance + epsilon):
    (x * (q t) + b - mean) g + shift = x * (q sign(g)) (t |g|) + (b - mean) g + shift.

    Scales are positive, so q takes the sign. A channel with g = 0 gets zeros and keeps its scale. The pair stays if a
    value has no negative (-128), or if a scale would become subnormal. A shared convolution gets one dequantizer per
    call; calls whose factors have equal signs share q.
    """

    left = "a batch normalization can still be folded"

    def match(self, node: Any) -> _Folded | None:
        """Return the folded convolution before a batch normalization; None for any other node."""
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
        bias_input = convolution.inputs[2] if len(convolution.inputs) > 2 else None
        old_bias = np.zeros(()) if bias_input is None else floats(bias_input)
        if weight is None or old_bias is None or any(value is None for value in statistics):
            return None
        gain, shift, mean, variance = (value.astype(np.float64) for value in statistics if value is not None)
        epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
        factors = gain / np.sqrt(variance + epsilon)
        multiplied = _multiplied(*weight, axis, factors)
        if multiplied is None:
            return None
        bias = (old_bias.astype(np.float64) - mean) * factors + shift
        return _Folded(convolution, axis, *multiplied, bias.astype(weight[1].dtype))

    def apply(self, model: Any, node: Any, matched: _Folded) -> None:
        """Give the convolution new constants, because the old ones may have other readers."""
        import onnx_ir

        convolution, dequantize = matched.convolution, _own_dequantizer(model, matched.convolution)
        step, scale = dequantize.inputs[:2]
        dequantize.replace_input_with(0, _shared_constant(model, f"{step.name}_folded", matched.codes, step.dtype))
        dequantize.replace_input_with(1, add_constant(model, f"{scale.name}_folded", matched.scales, scale.dtype))
        dequantize.attributes["axis"] = onnx_ir.AttrInt64("axis", matched.axis)
        old = convolution.inputs[2] if len(convolution.inputs) > 2 else None
        convolution.resize_inputs(3)
        convolution.replace_input_with(2, add_constant(model, f"{scale.name}_bias", matched.bias, scale.dtype))
        for value in (step, scale, old):
            if value is not None:
                drop_unread(model, value)
        take_out(model, node, convolution.outputs[0])


def _own_dequantizer(model: Any, convolution: Any) -> Any:
    """Return a dequantizer that only this convolution reads; copy a shared one."""
    weight = convolution.inputs[1]
    dequantize = weight.producer()
    if len(list(weight.uses())) == 1:
        return dequantize
    attributes = list(dequantize.attributes.values())
    copy = insert_before(
        convolution,
        "DequantizeLinear",
        dequantize.inputs,
        like=weight,
        shape=weight.shape,
        attributes=attributes,
    )
    copy.producer().metadata_props.update(dequantize.metadata_props)
    convolution.replace_input_with(1, copy)
    return copy.producer()


def _shared_constant(model: Any, name: str, array: np.ndarray[Any, Any], element: Any) -> Any:
    """Return the constant with this name and these values; add it if it does not exist."""
    existing = model.graph.initializers.get(name)
    if existing is not None and np.array_equal(existing.const_value.numpy(), array):
        return existing
    return add_constant(model, name, array, element)


def _stored(value: Any, axis: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """Return quantized values and scales of a weight with one scale, or one per output channel; None otherwise."""
    node = value.producer()
    if not is_dequantize(node):
        return None
    codes, scales = node.inputs[0].const_value, floats(node.inputs[1])
    if codes is None or scales is None or scales.ndim > 1 or (len(node.inputs) > 2 and node.inputs[2] is not None):
        return None
    if scales.ndim == 1 and node.attributes["axis"].as_int() % len(codes.shape) != axis:
        return None
    return codes.numpy(), scales


def _multiplied(
    codes: np.ndarray[Any, Any], scales: np.ndarray[Any, Any], axis: int, factors: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """Return weight and scales multiplied by the factors; None if the result is not exact."""
    channels = np.moveaxis(codes, axis, 0).astype(np.float32)
    signs = np.sign(factors).astype(np.float32)
    signed = channels * signs.reshape(-1, *[1] * (codes.ndim - 1))
    converted = signed.astype(codes.dtype)
    exact = np.where(factors == 0, 1.0, np.abs(factors)) * scales.astype(np.float64)
    multiplied = exact.astype(scales.dtype)
    if not np.array_equal(converted.astype(np.float32), signed) or (exact < smallest_normal(scales.dtype)).any():
        return None
    return np.ascontiguousarray(np.moveaxis(converted, 0, axis)), multiplied


_NORMALIZATIONS = {"LayerNormalization": (1, 2), "RMSNormalization": (1,)}
"""Indices of the inputs [K] that scale and shift the result, by operator."""

_LAYOUT = frozenset({"Expand", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


@dataclass(frozen=True, slots=True)
class _Edit:
    """Constant input of a node that absorbs the factors, with its new value."""

    node: Any
    index: int
    array: np.ndarray[Any, Any]


class FoldChannelFactors(MatchPass[list[_Edit]]):
    """``LayerNorm(x, w, b) -> Mul(f) -> Q`` becomes ``LayerNorm(x, w * f, b * f) -> Q``, and so on.

    f [K] is 1 / s of SmoothQuant (``algorithms/smoothquant.py``), or f [] the scale of an attention:
    (n * w + b) * f = n * (w * f) + b * f and (x' (q * t) + b) * f = x' (q * (t * f)) + b * f.

    A normalization, or a linear layer with one scale per output channel, absorbs the factors at no cost, also through a
    Reshape that keeps the last axis and through the Mul of a gate. A single number passes through all layout operators.
    The Mul stays if its input has other readers, or comes from another operator.
    """

    left = "a multiplication can still be folded"
    # Of two multiplications in a row, the second must be removed first.
    backwards = True

    def match(self, node: Any) -> list[_Edit] | None:
        """Return the edits that replace a multiplication by factors; None for any other node."""
        factors = _factors(node)
        return None if factors is None else _edits(node.inputs[0], factors)

    def apply(self, model: Any, node: Any, matched: list[_Edit]) -> None:
        for edit in matched:
            # The old constant may have other readers.
            old = edit.node.inputs[edit.index]
            edit.node.replace_input_with(edit.index, add_constant(model, f"{old.name}_folded", edit.array, old.dtype))
            _drop(model, old)
        node.outputs[0].replace_all_uses_with(node.inputs[0])
        factors = node.inputs[1]
        model.graph.remove(node, safe=True)
        _drop(model, factors)


def _factors(node: Any) -> np.ndarray[Any, Any] | None:
    """Return f [K] or [] of a Mul (x, f) if only quantizers or MatMuls with stored weights read it; None otherwise."""
    if node.op_type != "Mul" or node.inputs[1] is None:
        return None
    readers = list(node.outputs[0].uses())
    array = floats(node.inputs[1])
    if array is None or array.ndim > 1 or not readers or not all(_rounds(reader, index) for reader, index in readers):
        return None
    return None if node.outputs[0].is_graph_output() else array


def _rounds(reader: Any, index: int) -> bool:
    """Return whether a reader quantizes its input, or multiplies it by a stored quantized weight."""
    if reader.op_type in MATMULS and index == 0:
        weight = operands(reader)[1]
        return weight.quantized and weight.is_weight
    return bool(reader.op_type in ("QuantizeLinear", "DynamicQuantizeLinear"))


def _edits(value: Any, factors: np.ndarray[Any, Any]) -> list[_Edit] | None:
    """Return the edits that multiply ``value`` [.., K] by the factors at its origin; None if impossible."""
    node = value.producer()
    if node is None or value.is_graph_output() or len(list(value.uses())) != 1:
        return None
    if node.op_type in _NORMALIZATIONS:
        return _scaled(node, [i for i in _NORMALIZATIONS[node.op_type] if i < len(node.inputs)], factors)
    if factors.ndim == 0 and node.op_type in _LAYOUT:
        return _edits(node.inputs[0], factors)
    if node.op_type == "Reshape":
        shapes = value.shape, node.inputs[0].shape
        keeps_channels = all(shape is not None and len(shape) > 0 and shape[-1] == len(factors) for shape in shapes)
        return _edits(node.inputs[0], factors) if keeps_channels else None
    if node.op_type == "Mul":
        constant = next((i for i in (0, 1) if floats(node.inputs[i]) is not None), None)
        if constant is not None:
            return _scaled(node, [constant], factors)
        first = _edits(node.inputs[0], factors)
        return _edits(node.inputs[1], factors) if first is None else first
    if node.op_type in ("Add", "Gemm", "MatMul"):
        return _sum_edits(node, factors)
    return None


def _sum_edits(node: Any, factors: np.ndarray[Any, Any]) -> list[_Edit] | None:
    """Return the edits for a MatMul with a stored weight, or for an Add of a constant."""
    if node.op_type == "MatMul":
        return _stored_weight(node.inputs[1], factors)
    if node.op_type == "Gemm":
        is_transposed = bool(attribute(node, "transB", 0))
        product = _stored_weight(node.inputs[1], factors, from_end=2 if is_transposed else 1)
        bias = [2] if len(node.inputs) > 2 else []
    else:
        bias = [i for i in (0, 1) if floats(node.inputs[i]) is not None][:1]
        product = _edits(node.inputs[1 - bias[0]], factors) if bias else None
    added = _scaled(node, bias, factors)
    return None if product is None or added is None else product + added


def _stored_weight(value: Any, factors: np.ndarray[Any, Any], from_end: int = 1) -> list[_Edit] | None:
    """Return the edit of the scales of a weight; its channels are the last axis (``from_end=2``: the second last).

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
            # With blocks of input channels, the scales of an output channel are a row or column of a matrix.
            along, factors = channels, factors.reshape([-1] + [1] * (from_end - 1))
        if along != channels:
            return None
    edits = _scaled(node, [1], factors)
    tiny = edits is None or any((edit.array < smallest_normal(edit.array.dtype)).any() for edit in edits)
    return None if tiny else edits


def _scaled(node: Any, inputs: list[int], factors: np.ndarray[Any, Any]) -> list[_Edit] | None:
    """Return the edits of constant inputs; None if an input is not constant or lacks an axis of the factors."""
    arrays = [floats(node.inputs[index]) for index in inputs]
    edits = []
    for index, array in zip(inputs, arrays, strict=True):
        if array is None or not _fits(array.shape, factors.shape):
            return None
        edits.append(_Edit(node, index, (array.astype(np.float64) * factors).astype(array.dtype)))
    return edits


def _fits(shape: tuple[int, ...], factors: tuple[int, ...]) -> bool:
    """Return whether multiplication by the factors keeps the shape of a tensor."""
    axes = len(factors)
    return len(shape) >= axes and all(
        factor in (1, size) for factor, size in zip(factors, shape[len(shape) - axes :], strict=True)
    )


def _drop(model: Any, value: Any) -> None:
    """Remove an unread constant, or an unread value with its producer."""
    drop_unread(model, value)
    if value.producer() is not None and not value.uses():
        model.graph.remove(value.producer(), safe=True)


_SCALE_TOLERANCE = 4.0
"""Relative difference in epsilons up to which scales count as equal; each is a rounded product of rounded numbers."""


@dataclass(kw_only=True, slots=True)
class _FoldedConvolution:
    """Convolution that absorbs factors: its new scales and bias, and the clips behind it with their bounds."""

    convolution: Any
    scales: np.ndarray[Any, Any]
    bias: np.ndarray[Any, Any] | None
    clips: list[tuple[Any, np.ndarray[Any, Any]]] = field(default_factory=list)


class FoldConvolutionFactors(MatchPass[_FoldedConvolution]):
    """``Conv(x, DQ(q, t), b) -> Relu -> Mul(f) -> Q`` becomes ``Conv(x, DQ(q, t * f), b * f) -> Relu -> Q``.

    f [C, 1, ..] is 1 / s of an equalized convolution (``algorithms/cross_layer_equalization.py``):
    relu(x (q t) + b) * f = relu(x (q (t f)) + b f) and min(relu(y), c) * f = min(relu(y f), c f).

    A Relu and a Pad with zeros let positive factors pass. A Min with a constant absorbs them. A Clip between 0 and c
    becomes a Relu and a Min with one constant per channel. If all scales t f are equal except for rounding, one scale
    replaces them. The Mul stays if its input has other readers, or comes from another operator.
    """

    left = "factors of an equalized convolution can still be folded"

    def match(self, node: Any) -> _FoldedConvolution | None:
        """Return the convolution that absorbs a multiplication by factors; None for any other node."""
        factors = _convolution_factors(node)
        if factors is None:
            return None
        clips: list[tuple[Any, np.ndarray[Any, Any]]] = []
        value = node.inputs[0]
        while (producer := _exclusive_producer(value)) is not None and producer.op_type != "Conv":
            bound = _bound(producer)
            if bound is not None:
                clips.append((producer, bound))
            elif producer.op_type != "Relu" and not _pads_zeros(producer):
                return None
            value = producer.inputs[0]
        return None if producer is None else _folded(producer, factors, clips)

    def apply(self, model: Any, node: Any, matched: _FoldedConvolution) -> None:
        """Give the convolution new constants, because the old ones may have other readers."""
        factors = floats(node.inputs[1])
        assert factors is not None
        convolution, dequantize = matched.convolution, matched.convolution.inputs[1].producer()
        scale = dequantize.inputs[1]
        dequantize.replace_input_with(1, add_constant(model, f"{scale.name}_folded", matched.scales, scale.dtype))
        if matched.scales.ndim == 0:
            del dequantize.attributes["axis"]
        drop_unread(model, scale)
        if matched.bias is not None:
            old = convolution.inputs[2]
            convolution.replace_input_with(2, add_constant(model, f"{old.name}_folded", matched.bias, old.dtype))
            drop_unread(model, old)
        for clip, bound in matched.clips:
            source, result = clip.inputs[0], clip.outputs[0]
            bounds = add_constant(model, f"{result.name}_bounds", (factors * bound).astype(factors.dtype), source.dtype)
            if clip.op_type == "Clip":
                source = insert_before(clip, "Relu", [source], like=result, shape=result.shape)
            take_out(model, clip, insert_before(clip, "Min", [source, bounds], like=result, shape=result.shape))
        take_out(model, node, node.inputs[0])


def _convolution_factors(node: Any) -> np.ndarray[Any, Any] | None:
    """Return f [C, 1, ..] of a Mul (x, f) that only quantizers read; None otherwise."""
    if node.op_type != "Mul" or node.inputs[1] is None or node.outputs[0].is_graph_output():
        return None
    array = floats(node.inputs[1])
    readers = list(node.outputs[0].uses())
    if array is None or not readers or any(reader.op_type != "QuantizeLinear" for reader, _ in readers):
        return None
    one_axis = array.ndim > 1 and array.size == array.shape[0]
    return array if one_axis and bool((array > 0).all()) else None


def _bound(node: Any) -> np.ndarray[Any, Any] | None:
    """Return c of a Clip between 0 and c or a Min with c, where c is a number or one per channel; None otherwise."""
    if node.op_type == "Clip" and len(node.inputs) > 2 and scalar(node.inputs[1]) == 0:
        return floats(node.inputs[2])
    if node.op_type != "Min" or len(node.inputs) != 2:
        return None
    bound = floats(node.inputs[1])
    return bound if bound is not None and (bound.ndim == 0 or bound.size == max(bound.shape)) else None


def _exclusive_producer(value: Any) -> Any:
    """Return the producer of a value; None if the value has other readers."""
    return None if value.is_graph_output() or len(list(value.uses())) != 1 else value.producer()


def _pads_zeros(node: Any) -> bool:
    mode = node.attributes["mode"].as_string() if "mode" in node.attributes else "constant"
    if node.op_type != "Pad" or mode != "constant":
        return False
    return len(node.inputs) <= 2 or node.inputs[2] is None or scalar(node.inputs[2]) == 0


def _folded(
    convolution: Any, factors: np.ndarray[Any, Any], clips: list[tuple[Any, np.ndarray[Any, Any]]]
) -> _FoldedConvolution | None:
    """Return the convolution with factors folded into its scales and bias; None if they are not constants."""
    node = convolution.inputs[1].producer()
    if not is_dequantize(node) or len(list(convolution.inputs[1].uses())) != 1 or "block_size" in node.attributes:
        return None
    codes, scales = node.inputs[0].const_value, floats(node.inputs[1])
    bias_input = convolution.inputs[2] if len(convolution.inputs) > 2 else None
    bias = None if bias_input is None else floats(bias_input)
    if codes is None or scales is None or scales.shape != (factors.size,) or (bias_input is not None and bias is None):
        return None
    if node.attributes["axis"].as_int() % len(codes.shape) != 0:
        return None
    row = factors.reshape(-1).astype(np.float64)
    exact = scales.astype(np.float64) * row
    if (exact < smallest_normal(scales.dtype)).any():
        return None
    if np.ptp(exact) <= _SCALE_TOLERANCE * np.finfo(scales.dtype).eps * exact.max():
        exact = np.asarray(np.median(exact))
    new_bias = None if bias is None else (bias.astype(np.float64) * row).astype(bias.dtype)
    return _FoldedConvolution(convolution=convolution, scales=exact.astype(scales.dtype), bias=new_bias, clips=clips)


@dataclass(frozen=True, slots=True)
class _Padded:
    """Reader of a Pad, the input of the Pad, and the pads of the convolution without it."""

    reader: Any
    before: Any
    pads: list[int]


class FoldPadding(MatchPass[_Padded]):
    """``Conv(DQ(Q(Pad(x))), w)`` becomes ``Conv(DQ(Q(x)), w)``, and ``Conv(Pad(x), w)`` becomes ``Conv(x, w)``.

    The convolution takes the pads: zeros are exact in every format. A Pad would keep the quantizer from being fused
    into the layer before it.
    """

    left = "a padding can still be folded"

    def match(self, node: Any) -> _Padded | None:
        """Return the padding before a convolution; None for any other node."""
        if node.op_type != "Conv" or _text(node, "auto_pad", "NOTSET") != "NOTSET":
            return None
        pair = pair_before(node.inputs[0])
        # Other readers of a quantizer would lose the zeros.
        if pair is not None and any(len(list(entry.outputs[0].uses())) != 1 for entry in pair):
            return None
        reader = node if pair is None else pair[0]
        pad = maker(reader.inputs[0])
        added = None if pad is None or pad.op_type != "Pad" else _zeros_around(pad)
        if added is None:
            return None
        present = node.attributes["pads"].as_ints() if "pads" in node.attributes else [0] * len(added)
        return _Padded(reader, pad.inputs[0], [old + new for old, new in zip(present, added, strict=True)])

    def apply(self, model: Any, node: Any, matched: _Padded) -> None:
        """Bypass the Pad; ``DropUnreadNodes`` removes it."""
        import onnx_ir

        matched.reader.replace_input_with(0, matched.before)
        node.attributes["pads"] = onnx_ir.AttrInt64s("pads", matched.pads)
        for entry in pair_before(node.inputs[0]) or ():
            entry.outputs[0].shape = matched.before.shape


def _text(node: Any, name: str, default: str) -> str:
    return str(node.attributes[name].as_string()) if name in node.attributes else default


def _zeros_around(pad: Any) -> list[int] | None:
    """Return the spatial pads of a Pad with zeros in the order of ``Conv.pads``; None for any other Pad."""
    if _text(pad, "mode", "constant") != "constant":
        return None
    inputs = [*pad.inputs, None, None, None][:4]
    if inputs[1] is None or inputs[1].const_value is None or inputs[3] is not None:
        return None
    if inputs[2] is not None and ((value := floats(inputs[2])) is None or value.any()):
        return None
    pads = [int(size) for size in inputs[1].const_value.numpy()]
    rank = len(pads) // 2
    begin, end = pads[:rank], pads[rank:]
    if rank < 3 or any([*begin[:2], *end[:2]]) or min(pads) < 0:
        return None
    return [*begin[2:], *end[2:]]
