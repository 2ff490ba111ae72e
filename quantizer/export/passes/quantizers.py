"""Passes that move and share QuantizeLinear and DequantizeLinear nodes.

``QuantizeOnce`` quantizes once what is quantized twice in the same way, one time behind the other.

The result of a convolution and the operand of the next one share their range where they are one tensor.

``ShareQuantizers`` merges the quantizers of one tensor with one scale.

Query, key and value read the same hidden states, and so may a residual add: their operands share a range, and the
tensor is rounded once.

``ScaleBeforeQuantize`` moves the scale of attention scores to the query, before its quantizer.

Legend: x the query, s its scale, y the key, c the factor, such as 1 / sqrt(d).

    (DQ(Q(x, s), s) @ y) c = DQ(Q(x c, s c), s c) @ y

The codes are the same: x c / (s c) = x / s. A query [.., L, d] is smaller than the scores [.., L, L], its factor can
become part of the projection that makes it (``FoldChannelFactors``), and an engine that fuses attention finds only the
mask and the softmax between the two products.

``RectifyBeforeQuantize`` removes a rectifier behind a Q/DQ pair, or moves it before the pair.

Codes without negative values have been rectified: with zero point 0 an unsigned Q clips at 0. Of other codes, rounding
keeps 0 and the order of values, so that a Relu commutes with it. An engine computes a convolution in integers whose
result is quantized directly, or behind a Relu.

``LayoutBeforeQuantize`` moves layout operators and float casts before the Q, so that a product reads its DQ directly.

A transposition, a reshaping, or a conversion to another float type keeps each value, and a Q with one scale rounds each
value by itself, so their order is free. An engine computes in low precision what directly follows a DQ.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass, add_constant, drop_unread, insert_before, smallest_normal, take_out
from quantizer.export.qdq.graph import floats, is_dynamic_quantize, is_quantize, pair_before, scalar
from quantizer.numerics.formats import UINT8


class QuantizeOnce(MatchPass[Any]):
    """``Q(s) -> DQ(s) -> Q(s)`` becomes ``Q(s)``: rounding what was rounded changes nothing."""

    left = "codes are still made of their own values"

    def match(self, node: Any) -> Any:
        """Return the Q before whose codes a Q makes again; None for any other node."""
        if not is_quantize(node) or node.outputs[0].is_graph_output():
            return None
        pair = pair_before(node.inputs[0])
        if pair is None or not is_quantize(pair[0]) or node.attributes != pair[0].attributes:
            return None
        # The DQ is that of this Q, so that it has its scale and zero point; a zero point of 0 it may leave out.
        mine, theirs = ([content(value) for value in one.inputs[1:]] for one in (node, pair[0]))
        return pair[0] if mine == theirs and content(pair[1].inputs[1]) == mine[0] else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        take_out(model, node, found.outputs[0])


_KINDS = ("QuantizeLinear", "DynamicQuantizeLinear", "DequantizeLinear")


class ShareQuantizers:
    """``Q(x, s) .. Q(x, s)`` becomes ``Q(x, s)``, and DQs that read it likewise."""

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        changed = 0
        for kind in _KINDS:
            for first, second in _alike(model, kind):
                # The scale and the zero point of a dynamic Q, and then its codes.
                for held, other in zip(first.outputs[1:], second.outputs[1:], strict=True):
                    other.replace_all_uses_with(held)
                take_out(model, second, first.outputs[0])
                changed += 1
        return changed

    def ensures(self, model: Any) -> str | None:
        left = [second.name for kind in _KINDS for _, second in _alike(model, kind)]
        return f"a tensor is quantized twice in the same way: {left[0]}" if left else None


def _alike(model: Any, kind: str) -> list[tuple[Any, Any]]:
    """Return pairs of nodes of one kind that compute the same, the earlier in the graph first."""
    first: dict[Hashable, Any] = {}
    found = []
    for node in model.graph:
        if node.op_type != kind or node.outputs[0].is_graph_output():
            continue
        attributes = tuple(sorted((name, str(value.value)) for name, value in node.attributes.items()))
        key = (id(node.inputs[0]), *map(content, node.inputs[1:]), attributes)
        if key in first:
            found.append((first[key], node))
        else:
            first[key] = node
    return found


def content(value: Any) -> Hashable:
    """Return the key by which two scales or zero points are equal: their constant, else the value itself."""
    constant = None if value is None else value.const_value
    if constant is None:
        return id(value)
    return constant.dtype, tuple(constant.shape), constant.tobytes()


@dataclass(frozen=True, slots=True)
class _Moved:
    """Factor behind a product, the product's output, and the Q/DQ pair before which the factor may move."""

    scores: Any
    quantize: Any
    dequantize: Any
    factor: float


class ScaleBeforeQuantize(MatchPass[_Moved]):
    """``MatMul(DQ(Q(x, s)), DQ(Q(y))) -> Mul(c)`` becomes ``MatMul(DQ(Q(x * c, s * c)), DQ(Q(y)))``."""

    left = "scores are still scaled behind their product"

    def run(self, model: Any) -> int:
        # The operand may come from a product itself: the factor then stands behind that one, and moves on.
        changed = 0
        while now := super().run(model):
            changed += now
        return changed

    def match(self, node: Any) -> _Moved | None:
        """Return what to move; None for a node that is no scale of a quantized product, or that must stay."""
        place = _product(node)
        if place is None or node.outputs[0].is_graph_output():
            return None
        scores = node.inputs[place]
        product = scores.producer()
        if product is None or product.op_type != "MatMul" or len(list(scores.uses())) != 1 or scores.is_graph_output():
            return None
        constant = scalar(node.inputs[1 - place])
        if not _keeps_rank(scores, node.inputs[1 - place]):
            return None
        pairs = [pair_before(value) for value in product.inputs]
        if not constant or constant < 0 or any(pair is None for pair in pairs):
            return None
        factor = constant if node.op_type == "Mul" else 1 / constant
        for pair in pairs:
            if pair is not None and _may_take(*pair, factor):
                return _Moved(scores, *pair, factor)
        return None

    def apply(self, model: Any, node: Any, found: _Moved) -> None:
        """Multiply the input of the Q, and its scale."""
        quantize, (source, step) = found.quantize, found.quantize.inputs[:2]
        scale = floats(step)
        assert scale is not None
        name = f"{step.name}_factor"
        factor = add_constant(model, name, np.array(found.factor, scale.dtype), step.dtype)
        multiplied = np.array(float(scale) * found.factor, scale.dtype)
        made = add_constant(model, f"{step.name}_scaled", multiplied, step.dtype)
        applied = insert_before(quantize, "Mul", [source, factor], like=source, shape=source.shape)
        applied.name = f"{name}_applied"
        quantize.replace_input_with(0, applied)
        for reader in (quantize, found.dequantize):
            reader.replace_input_with(1, made)
        drop_unread(model, step)
        take_out(model, node, found.scores)


def _product(node: Any) -> int | None:
    """Return the index of the input of a Mul or Div that the other input, a constant, scales."""
    places = (0, 1) if node.op_type == "Mul" else (0,) if node.op_type == "Div" else ()
    return next((place for place in places if scalar(node.inputs[1 - place]) is not None), None)


def _keeps_rank(value: Any, factor: Any) -> bool:
    """Return whether a value times a constant keeps the value's rank: a factor [1, 1] gives a scalar two axes."""
    held = floats(factor)
    return held is not None and (held.ndim == 0 or (value.shape is not None and held.ndim <= len(value.shape)))


def _may_take(quantize: Any, dequantize: Any, factor: float) -> bool:
    """Return whether the pair has no other reader, and one scale that keeps its precision."""
    if is_dynamic_quantize(quantize) or any(len(list(node.outputs[0].uses())) != 1 for node in (quantize, dequantize)):
        return False
    scale = floats(quantize.inputs[1])
    return scale is not None and scale.ndim == 0 and float(scale) * factor >= smallest_normal(scale.dtype)


_CLOSE = 1e-5
"""How far, relatively, the largest code may be beyond the limit of a Clip: rounding of the scale."""


class RectifyBeforeQuantize(MatchPass[tuple[Any, Any]]):
    """``Q -> DQ -> Relu`` becomes ``Q -> DQ`` where the codes start at 0, else ``Relu -> Q -> DQ``."""

    left = "a rectifier still stands behind a DQ"

    def match(self, node: Any) -> tuple[Any, Any] | None:
        """Return the Q and the DQ before a rectifier that is not needed there; None for any other node."""
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
        alone = all(len(list(entry.outputs[0].uses())) == 1 for entry in pair)
        return pair if node.op_type == "Relu" and alone else None

    def apply(self, model: Any, node: Any, found: tuple[Any, Any]) -> None:
        quantize, dequantize = found
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
    """Return whether the codes of a Q are unsigned, with zero point 0."""
    zero = quantize.inputs[2].const_value if len(quantize.inputs) > 2 and quantize.inputs[2] is not None else None
    array = None if zero is None else zero.numpy()
    return array is not None and array.dtype == np.uint8 and array.size == 1 and int(array.reshape(())) == 0


def is_within(clip: Any, largest: float) -> bool:
    """Return whether all values from 0 to ``largest`` are within the limits of a Clip."""
    low, high = (clip.inputs[place] if len(clip.inputs) > place else None for place in (1, 2))
    lower, upper = (None if limit is None else scalar(limit) for limit in (low, high))
    if (low is not None and lower is None) or (high is not None and upper is None):
        return False
    return (lower is None or lower <= 0) and (upper is None or upper * (1 + _CLOSE) >= largest)


_LAYOUT = frozenset({"Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


class LayoutBeforeQuantize(MatchPass[tuple[Any, Any]]):
    """``Q(x, s) -> DQ(s) -> Transpose`` becomes ``Transpose(x) -> Q(s) -> DQ(s)``; a Cast takes the scale along."""

    left = "a DQ is still not read directly"

    def run(self, model: Any) -> int:
        # In the order of the graph: the successor of a moved node then reads the DQ, and is moved in its turn.
        changed = super().run(model)
        if changed:
            model.graph.sort()
        return changed

    def match(self, node: Any) -> tuple[Any, Any] | None:
        """Return the Q and the DQ before which a layout operator can be moved; None for any other node."""
        if node.op_type not in _LAYOUT and not _is_float_cast(node):
            return None
        pair = pair_before(node.inputs[0])
        if pair is None or node.outputs[0].is_graph_output():
            return None
        if any(len(list(entry.outputs[0].uses())) != 1 for entry in pair):
            return None
        if is_dynamic_quantize(pair[0]):
            # Its scale is that of all values, in any order, and always of one type.
            return pair if node.op_type in _LAYOUT else None
        scale = floats(pair[0].inputs[1])
        return pair if scale is not None and scale.ndim == 0 else None

    def apply(self, model: Any, node: Any, found: tuple[Any, Any]) -> None:
        import onnx_ir

        quantize, dequantize = found
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
        made = add_constant(model, f"{step.name}_cast", np.asarray(scale, kind.numpy()), kind)
        for entry in found:
            entry.replace_input_with(1, made)
        result.type = onnx_ir.TensorType(kind)
        drop_unread(model, step)


def _is_float_cast(node: Any) -> bool:
    import onnx_ir

    kinds = (onnx_ir.DataType.FLOAT, onnx_ir.DataType.FLOAT16, onnx_ir.DataType.BFLOAT16)
    return node.op_type == "Cast" and node.attributes["to"].as_int() in kinds
