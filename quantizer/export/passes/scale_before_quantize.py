"""Pass that moves the scale of attention scores to the query, before its quantizer.

Legend: x the query, s its scale, y the key, c the factor, such as 1 / sqrt(d).

    (DQ(Q(x, s), s) @ y) c = DQ(Q(x c, s c), s c) @ y

The codes are the same: x c / (s c) = x / s. A query [.., L, d] is smaller than the scores [.., L, L], its factor can
become part of the projection that makes it (``FoldChannelFactors``), and an engine that fuses attention finds only the
mask and the softmax between the two products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass, add_constant, drop_unread, insert_before, smallest_normal, take_out
from quantizer.qdq.graph import floats, is_dynamic_quantize, pair_before, scalar


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
