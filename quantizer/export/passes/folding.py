"""Passes that fold factors of channels, batch norms and padding into the layers beside them.

``FoldBatchNorm`` folds a batch normalization into the convolution with a stored weight before it.

Legend: q [C, ..] the codes of the weight, t [C] their scales, b [C] the bias; g [C] = gain / sqrt(variance + epsilon).

    (x * (q t) + b - mean) g + shift = x * (q sign(g)) (t |g|) + (b - mean) g + shift

A scale is positive, so the sign goes into the codes. A channel with g = 0 gets codes of 0 and keeps its scale. The pair
stays if a code has no negative (-128), or if a scale would be subnormal and lose its precision.

A convolution that is called several times, with one normalization or one for each level, then has a dequantizer for
each call: the scales are its own, and calls whose factors have the same signs share the codes.

``FoldChannelFactors`` folds multiplications by one factor a channel, or by one number, into the operators before them.

Legend: f [K] the factors, 1 / s of a migration of outliers (``algorithms/smoothquant.py``), or [] the scale of an
attention; x [.., K] the input of a Q; n the normalized value before its weight w and bias b; q [K', K] the codes of a
linear's weight with scales t [K].

    (n * w + b) * f = n * (w * f) + b * f        (x' (q * t) + b) * f = x' (q * (t * f)) + b * f

So a normalization, or a linear whose weight has one scale for each output channel, does the multiplication at no cost,
also through a Reshape that keeps the last axis and through the elementwise product of a gate. A single number also
passes through every operator that only moves values. The multiplication stays if the value has other readers, or if the
operator before it is of another kind.

``FoldConvolutionFactors`` folds the factors of equalized convolutions into the convolution before.

Legend: f [C] the factors 1 / s (``algorithms/cross_layer_equalization.py``), held as [C, 1, ..]; q [C, ..] the codes
of a convolution's weight with scales t [C], b its bias.

    relu(x (q t) + b) * f = relu(x (q (t f)) + b f)        min(relu(y), c) * f = min(relu(y f), c f)

A ReLU and a padding with zeros let positive factors through, a minimum with a constant takes them in, and a clip
between 0 and c becomes a ReLU and a minimum with a constant for each channel. If all scales t f come out alike but for
rounding, one scale takes their place. The multiplication stays where the value has other readers, or something else
made it.

``FoldPadding`` gives a convolution the zeros around its input as its own padding.

A zero is exact in every format, with a zero point too: ``Conv(DQ(Q(Pad(x))))`` equals ``Conv(DQ(Q(x)))`` with these
pads. Behind a Pad of its own the quantizer cannot be fused into the layer before it, and both run alone, in floats.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass, add_constant, drop_unread, insert_before, smallest_normal, take_out
from quantizer.export.qdq.graph import attribute, floats, is_dequantize, maker, pair_before, scalar
from quantizer.export.qdq.operand import MATMULS, operands

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


_ALIKE = 4.0
"""The relative difference between scales, in epsilons of their type, up to which they are one.

Each is a rounded product of two rounded numbers.
"""


@dataclass(kw_only=True, slots=True)
class _FoldedConvolution:
    """The convolution that takes factors in, its new scales and bias, and the clips on the way with their bounds."""

    convolution: Any
    scales: np.ndarray[Any, Any]
    bias: np.ndarray[Any, Any] | None
    clips: list[tuple[Any, np.ndarray[Any, Any]]] = field(default_factory=list)


class FoldConvolutionFactors(MatchPass[_FoldedConvolution]):
    """``Conv(x, DQ(q, t), b) -> Relu -> Mul(f) -> Q`` becomes ``Conv(x, DQ(q, t * f), b * f) -> Relu -> Q``."""

    left = "factors of an equalized convolution could still be folded"

    def match(self, node: Any) -> _FoldedConvolution | None:
        """Return what takes a multiplication by factors in; None for a node that stays."""
        factors = _convolution_factors(node)
        if factors is None:
            return None
        clips: list[tuple[Any, np.ndarray[Any, Any]]] = []
        value = node.inputs[0]
        while (made := _only_reader(value)) is not None and made.op_type != "Conv":
            bound = _bound(made)
            if bound is not None:
                clips.append((made, bound))
            elif made.op_type != "Relu" and not _pads_zeros(made):
                return None
            value = made.inputs[0]
        return None if made is None else _folded(made, factors, clips)

    def apply(self, model: Any, node: Any, found: _FoldedConvolution) -> None:
        """Give the convolution new constants: the present ones may have other readers."""
        factors = floats(node.inputs[1])
        assert factors is not None
        convolution, dequantize = found.convolution, found.convolution.inputs[1].producer()
        scale = dequantize.inputs[1]
        dequantize.replace_input_with(1, add_constant(model, f"{scale.name}_folded", found.scales, scale.dtype))
        if found.scales.ndim == 0:
            del dequantize.attributes["axis"]
        drop_unread(model, scale)
        if found.bias is not None:
            old = convolution.inputs[2]
            convolution.replace_input_with(2, add_constant(model, f"{old.name}_folded", found.bias, old.dtype))
            drop_unread(model, old)
        for clip, bound in found.clips:
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
    """Return c of a clip between 0 and c, or of a minimum with c, a number or one for each channel; None otherwise."""
    if node.op_type == "Clip" and len(node.inputs) > 2 and scalar(node.inputs[1]) == 0:
        return floats(node.inputs[2])
    if node.op_type != "Min" or len(node.inputs) != 2:
        return None
    bound = floats(node.inputs[1])
    return bound if bound is not None and (bound.ndim == 0 or bound.size == max(bound.shape)) else None


def _only_reader(value: Any) -> Any:
    """Return the node that made a value; None if the value has other readers too."""
    return None if value.is_graph_output() or len(list(value.uses())) != 1 else value.producer()


def _pads_zeros(node: Any) -> bool:
    mode = node.attributes["mode"].as_string() if "mode" in node.attributes else "constant"
    if node.op_type != "Pad" or mode != "constant":
        return False
    return len(node.inputs) <= 2 or node.inputs[2] is None or scalar(node.inputs[2]) == 0


def _folded(
    convolution: Any, factors: np.ndarray[Any, Any], clips: list[tuple[Any, np.ndarray[Any, Any]]]
) -> _FoldedConvolution | None:
    """Return a convolution with the factors in its scales and its bias; None if it has no such constants."""
    node = convolution.inputs[1].producer()
    if not is_dequantize(node) or len(list(convolution.inputs[1].uses())) != 1 or "block_size" in node.attributes:
        return None
    codes, scales = node.inputs[0].const_value, floats(node.inputs[1])
    given = convolution.inputs[2] if len(convolution.inputs) > 2 else None
    bias = None if given is None else floats(given)
    if codes is None or scales is None or scales.shape != (factors.size,) or (given is not None and bias is None):
        return None
    if node.attributes["axis"].as_int() % len(codes.shape) != 0:
        return None
    row = factors.reshape(-1).astype(np.float64)
    wanted = scales.astype(np.float64) * row
    if (wanted < smallest_normal(scales.dtype)).any():
        return None
    if np.ptp(wanted) <= _ALIKE * np.finfo(scales.dtype).eps * wanted.max():
        wanted = np.asarray(np.median(wanted))
    held = None if bias is None else (bias.astype(np.float64) * row).astype(bias.dtype)
    return _FoldedConvolution(convolution=convolution, scales=wanted.astype(scales.dtype), bias=held, clips=clips)


@dataclass(frozen=True, slots=True)
class _Padded:
    """The reader of a Pad, the value before it, and the pads of the convolution when it is gone."""

    reader: Any
    before: Any
    pads: list[int]


class FoldPadding(MatchPass[_Padded]):
    """``Conv(DQ(Q(Pad(x))), w)`` becomes ``Conv(DQ(Q(x)), w)``, and ``Conv(Pad(x), w)`` becomes ``Conv(x, w)``."""

    left = "a padding could still be folded"

    def match(self, node: Any) -> _Padded | None:
        """Return the padding before a convolution; None for a node that stays as it is."""
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

    def apply(self, model: Any, node: Any, found: _Padded) -> None:
        """Read what the Pad reads; a Pad that nothing reads any more is dropped by a later pass."""
        import onnx_ir

        found.reader.replace_input_with(0, found.before)
        node.attributes["pads"] = onnx_ir.AttrInt64s("pads", found.pads)
        for entry in pair_before(node.inputs[0]) or ():
            entry.outputs[0].shape = found.before.shape


def _text(node: Any, name: str, default: str) -> str:
    return str(node.attributes[name].as_string()) if name in node.attributes else default


def _zeros_around(pad: Any) -> list[int] | None:
    """Return the spatial pads of a Pad with zeros, as ``Conv.pads`` has them; None for any other Pad."""
    if _text(pad, "mode", "constant") != "constant":
        return None
    given = [*pad.inputs, None, None, None][:4]
    if given[1] is None or given[1].const_value is None or given[3] is not None:
        return None
    if given[2] is not None and ((value := floats(given[2])) is None or value.any()):
        return None
    pads = [int(size) for size in given[1].const_value.numpy()]
    rank = len(pads) // 2
    begin, end = pads[:rank], pads[rank:]
    if rank < 3 or any([*begin[:2], *end[:2]]) or min(pads) < 0:
        return None
    return [*begin[2:], *end[2:]]
