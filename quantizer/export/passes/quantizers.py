"""Graph passes that move, merge and remove QuantizeLinear and DequantizeLinear nodes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass, add_constant, drop_unread, insert_before, smallest_normal, take_out
from quantizer.export.qdq.graph import floats, is_dynamic_quantize, is_quantize, pair_before, scalar
from quantizer.numerics.formats import UINT8


class QuantizeOnce(MatchPass[Any]):
    """``Q(s) -> DQ(s) -> Q(s)`` becomes ``Q(s)``, because quantizing twice changes nothing."""

    left = "a tensor is still quantized twice in a row"

    def match(self, node: Any) -> Any:
        """Return the first of two equal Q in a row; None for any other node."""
        if not is_quantize(node) or node.outputs[0].is_graph_output():
            return None
        pair = pair_before(node.inputs[0])
        if pair is None or not is_quantize(pair[0]) or node.attributes != pair[0].attributes:
            return None
        # The DQ belongs to this Q, so both have equal parameters; the DQ may omit a zero point of 0.
        own, earlier = ([content(value) for value in quantizer.inputs[1:]] for quantizer in (node, pair[0]))
        return pair[0] if own == earlier and content(pair[1].inputs[1]) == own[0] else None

    def apply(self, model: Any, node: Any, matched: Any) -> None:
        take_out(model, node, matched.outputs[0])


_KINDS = ("QuantizeLinear", "DynamicQuantizeLinear", "DequantizeLinear")


class ShareQuantizers:
    """``Q(x, s) .. Q(x, s)`` becomes a single ``Q(x, s)``, and its equal DQs are merged.

    Query, key and value read one tensor with one range, so it is quantized once.
    """

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        changed = 0
        for kind in _KINDS:
            for first, second in _duplicates(model, kind):
                # Scale and zero point of a DynamicQuantizeLinear, then its integers.
                for shared, other in zip(first.outputs[1:], second.outputs[1:], strict=True):
                    other.replace_all_uses_with(shared)
                take_out(model, second, first.outputs[0])
                changed += 1
        return changed

    def ensures(self, model: Any) -> str | None:
        duplicates = [second.name for kind in _KINDS for _, second in _duplicates(model, kind)]
        return f"a tensor is still quantized twice in the same way: {duplicates[0]}" if duplicates else None


def _duplicates(model: Any, kind: str) -> list[tuple[Any, Any]]:
    """Return pairs of equal nodes of one operator type, the earlier node first."""
    first: dict[Hashable, Any] = {}
    pairs = []
    for node in model.graph:
        if node.op_type != kind or node.outputs[0].is_graph_output():
            continue
        attributes = tuple(sorted((name, str(value.value)) for name, value in node.attributes.items()))
        key = (id(node.inputs[0]), *map(content, node.inputs[1:]), attributes)
        if key in first:
            pairs.append((first[key], node))
        else:
            first[key] = node
    return pairs


def content(value: Any) -> Hashable:
    """Return the comparison key of a scale or zero point: its constant, else the identity of the value."""
    constant = None if value is None else value.const_value
    if constant is None:
        return id(value)
    return constant.dtype, tuple(constant.shape), constant.tobytes()


@dataclass(frozen=True, slots=True)
class _Moved:
    """Factor behind a MatMul, its scores, and the Q/DQ pair that the factor can precede."""

    scores: Any
    quantize: Any
    dequantize: Any
    factor: float


class ScaleBeforeQuantize(MatchPass[_Moved]):
    """``MatMul(DQ(Q(x, s)), DQ(Q(y))) -> Mul(c)`` becomes ``MatMul(DQ(Q(x * c, s * c)), DQ(Q(y)))``.

    x is the query, y the key and c a factor such as 1 / sqrt(d). The quantized values are equal: x c / (s c) = x / s.
    The query is smaller than the scores, ``FoldChannelFactors`` can fold its factor into the projection, and engines
    that fuse attention expect only mask and softmax between both MatMuls.
    """

    left = "attention scores are still scaled behind their MatMul"

    def run(self, model: Any) -> int:
        # The operand may be the result of a MatMul, behind which the factor can move on.
        changed = 0
        while count := super().run(model):
            changed += count
        return changed

    def match(self, node: Any) -> _Moved | None:
        """Return the factor to move and its Q/DQ pair; None for any other node."""
        index = _scaled_input(node)
        if index is None or node.outputs[0].is_graph_output():
            return None
        scores = node.inputs[index]
        product = scores.producer()
        if product is None or product.op_type != "MatMul" or len(list(scores.uses())) != 1 or scores.is_graph_output():
            return None
        constant = scalar(node.inputs[1 - index])
        if not _keeps_rank(scores, node.inputs[1 - index]):
            return None
        pairs = [pair_before(value) for value in product.inputs]
        if not constant or constant < 0 or any(pair is None for pair in pairs):
            return None
        factor = constant if node.op_type == "Mul" else 1 / constant
        for pair in pairs:
            if pair is not None and _can_absorb(*pair, factor):
                return _Moved(scores, *pair, factor)
        return None

    def apply(self, model: Any, node: Any, matched: _Moved) -> None:
        """Multiply the input and the scale of the Q by the factor."""
        quantize, (source, step) = matched.quantize, matched.quantize.inputs[:2]
        scale = floats(step)
        assert scale is not None
        name = f"{step.name}_factor"
        factor = add_constant(model, name, np.array(matched.factor, scale.dtype), step.dtype)
        multiplied = np.array(float(scale) * matched.factor, scale.dtype)
        scaled_scale = add_constant(model, f"{step.name}_scaled", multiplied, step.dtype)
        applied = insert_before(quantize, "Mul", [source, factor], like=source, shape=source.shape)
        applied.name = f"{name}_applied"
        quantize.replace_input_with(0, applied)
        for reader in (quantize, matched.dequantize):
            reader.replace_input_with(1, scaled_scale)
        drop_unread(model, step)
        take_out(model, node, matched.scores)


def _scaled_input(node: Any) -> int | None:
    """Return the index of the scaled input of a Mul or Div by a constant; None for any other node."""
    candidates = (0, 1) if node.op_type == "Mul" else (0,) if node.op_type == "Div" else ()
    return next((index for index in candidates if scalar(node.inputs[1 - index]) is not None), None)


def _keeps_rank(value: Any, factor: Any) -> bool:
    """Return whether multiplication by a constant keeps the rank of a value; [1, 1] adds axes to a scalar."""
    array = floats(factor)
    return array is not None and (array.ndim == 0 or (value.shape is not None and array.ndim <= len(value.shape)))


def _can_absorb(quantize: Any, dequantize: Any, factor: float) -> bool:
    """Return whether the pair has no other reader, and one scale that keeps its precision after multiplication."""
    if is_dynamic_quantize(quantize) or any(len(list(node.outputs[0].uses())) != 1 for node in (quantize, dequantize)):
        return False
    scale = floats(quantize.inputs[1])
    return scale is not None and scale.ndim == 0 and float(scale) * factor >= smallest_normal(scale.dtype)


_CLIP_TOLERANCE = 1e-5
"""Relative tolerance of the limit of a Clip, for the rounding of the scale."""


class RectifyBeforeQuantize(MatchPass[tuple[Any, Any]]):
    """``Q -> DQ -> Relu`` becomes ``Q -> DQ`` if the integers start at 0, else ``Relu -> Q -> DQ``.

    An unsigned Q with zero point 0 clips negative values like a Relu. Otherwise, rounding keeps 0 and the order of
    values, so a Relu commutes with it. Engines compute a convolution in integers if a Q follows it directly or behind a
    Relu.
    """

    left = "a Relu or Clip still follows a DQ"

    def match(self, node: Any) -> tuple[Any, Any] | None:
        """Return the Q and the DQ before a redundant or movable Relu or Clip; None for any other node."""
        if node.op_type not in ("Relu", "Clip") or node.outputs[0].is_graph_output():
            return None
        pair = pair_before(node.inputs[0])
        if pair is None or not is_quantize(pair[0]) or node.inputs[0].is_graph_output():
            return None
        scale = floats(pair[0].inputs[1])
        if scale is None or scale.ndim != 0:
            return None
        if starts_at_zero(pair[0]):
            return pair if node.op_type == "Relu" or is_within(node, float(scale) * UINT8.qmax) else None
        single_readers = all(len(list(entry.outputs[0].uses())) == 1 for entry in pair)
        return pair if node.op_type == "Relu" and single_readers else None

    def apply(self, model: Any, node: Any, matched: tuple[Any, Any]) -> None:
        quantize, dequantize = matched
        result = dequantize.outputs[0]
        if starts_at_zero(quantize):
            take_out(model, node, result)
            return
        moved = node.outputs[0]
        moved.replace_all_uses_with(result)
        node.replace_input_with(0, quantize.inputs[0])
        quantize.replace_input_with(0, moved)

    def run(self, model: Any) -> int:
        changed = super().run(model)
        if changed:
            model.graph.sort()
        return changed


def starts_at_zero(quantize: Any) -> bool:
    """Return whether a Q has unsigned integers with zero point 0."""
    zero = quantize.inputs[2].const_value if len(quantize.inputs) > 2 and quantize.inputs[2] is not None else None
    array = None if zero is None else zero.numpy()
    return array is not None and array.dtype == np.uint8 and array.size == 1 and int(array.reshape(())) == 0


def is_within(clip: Any, largest: float) -> bool:
    """Return whether a Clip changes no value from 0 to ``largest``."""
    low, high = (clip.inputs[place] if len(clip.inputs) > place else None for place in (1, 2))
    lower, upper = (None if limit is None else scalar(limit) for limit in (low, high))
    if (low is not None and lower is None) or (high is not None and upper is None):
        return False
    return (lower is None or lower <= 0) and (upper is None or upper * (1 + _CLIP_TOLERANCE) >= largest)


_LAYOUT = frozenset({"Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


class LayoutBeforeQuantize(MatchPass[tuple[Any, Any]]):
    """``Q(x, s) -> DQ(s) -> Transpose`` becomes ``Transpose(x) -> Q(s) -> DQ(s)``; a Cast converts s.

    A Q with one scale quantizes each value alone, so it commutes with layout operators and float casts. Engines compute
    in low precision only directly behind a DQ.
    """

    left = "a layout operator or Cast still follows a DQ"

    def run(self, model: Any) -> int:
        # The successor of a moved node reads the DQ and is moved next, so the graph is sorted again.
        changed = super().run(model)
        if changed:
            model.graph.sort()
        return changed

    def match(self, node: Any) -> tuple[Any, Any] | None:
        """Return the Q and the DQ that a layout operator can precede; None for any other node."""
        if node.op_type not in _LAYOUT and not _is_float_cast(node):
            return None
        pair = pair_before(node.inputs[0])
        if pair is None or node.outputs[0].is_graph_output():
            return None
        if any(len(list(entry.outputs[0].uses())) != 1 for entry in pair):
            return None
        if is_dynamic_quantize(pair[0]):
            # A dynamic scale does not depend on the order of values, and is always float32.
            return pair if node.op_type in _LAYOUT else None
        scale = floats(pair[0].inputs[1])
        return pair if scale is not None and scale.ndim == 0 else None

    def apply(self, model: Any, node: Any, matched: tuple[Any, Any]) -> None:
        import onnx_ir

        quantize, dequantize = matched
        moved, result = node.outputs[0], dequantize.outputs[0]
        moved.replace_all_uses_with(result)
        node.replace_input_with(0, quantize.inputs[0])
        quantize.replace_input_with(0, moved)
        quantize.outputs[0].shape = result.shape = moved.shape
        if node.op_type != "Cast":
            return
        kind = onnx_ir.DataType(node.attributes["to"].as_int())
        step, scale = quantize.inputs[1], floats(quantize.inputs[1])
        assert scale is not None
        converted = add_constant(model, f"{step.name}_cast", np.asarray(scale, kind.numpy()), kind)
        for entry in matched:
            entry.replace_input_with(1, converted)
        result.type = onnx_ir.TensorType(kind)
        drop_unread(model, step)


def _is_float_cast(node: Any) -> bool:
    import onnx_ir

    kinds = (onnx_ir.DataType.FLOAT, onnx_ir.DataType.FLOAT16, onnx_ir.DataType.BFLOAT16)
    return node.op_type == "Cast" and node.attributes["to"].as_int() in kinds
