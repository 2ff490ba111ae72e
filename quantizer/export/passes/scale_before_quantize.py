"""The scale of attention scores on the query, before it is quantized, and not on the scores.

Legend: x the query, s its scale, y the key, c the factor, such as 1 / sqrt(d).

    (DQ(Q(x, s), s) @ y) c = DQ(Q(x c, s c), s c) @ y

The steps are the same: x c / (s c) = x / s. A query [.., L, d] is smaller than the scores [.., L, L], its factor can
become part of the projection that makes it (``FoldChannelFactors``), and an engine that fuses attention finds nothing
between the two products but the mask and the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quantizer.export.passes.base import add_constant
from quantizer.export.passes.base import drop_unread
from quantizer.export.passes.base import floats
from quantizer.export.passes.base import insert_before
from quantizer.export.passes.base import keeps_rank
from quantizer.export.passes.base import quantize_of
from quantizer.export.passes.base import scalar
from quantizer.export.passes.base import smallest_normal

__all__ = ["ScaleBeforeQuantize"]


@dataclass(frozen=True, slots=True)
class _Moved:
    """A factor that stands behind a product, and the Q/DQ pair before which it may stand."""

    quantize: Any
    dequantize: Any
    factor: float


class ScaleBeforeQuantize:
    """``MatMul(DQ(Q(x, s)), DQ(Q(y))) -> Mul(c)`` becomes ``MatMul(DQ(Q(x * c, s * c)), DQ(Q(y)))``."""

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        changed = 0
        for node in list(model.graph):
            moved = _moved(node)
            if moved is None:
                continue
            _carry_out(model, moved)
            product = node.inputs[_product(node)]
            node.outputs[0].replace_all_uses_with(product)
            constants = [value for value in node.inputs if value is not product]
            model.graph.remove(node, safe=True)
            for value in constants:
                drop_unread(model, value)
            changed += 1
        return changed

    def ensures(self, model: Any) -> str | None:
        left = [node.name for node in model.graph if _moved(node) is not None]
        return f"scores are still scaled behind their product: {left[0]}" if left else None


def _product(node: Any) -> int | None:
    """Which input of a Mul or Div is multiplied by the constant that is the other."""
    places = (0, 1) if node.op_type == "Mul" else (0,) if node.op_type == "Div" else ()
    return next((place for place in places if scalar(node.inputs[1 - place]) is not None), None)


def _moved(node: Any) -> _Moved | None:
    """What to move; None for a node that is no scale of a quantized product, or that must stay."""
    place = _product(node)
    if place is None or node.outputs[0].is_graph_output():
        return None
    scores = node.inputs[place]
    product = scores.producer()
    if product is None or product.op_type != "MatMul" or len(list(scores.uses())) != 1 or scores.is_graph_output():
        return None
    constant = scalar(node.inputs[1 - place])
    if not keeps_rank(scores, node.inputs[1 - place]):
        return None
    pairs = [quantize_of(value) for value in product.inputs]
    if not constant or constant < 0 or any(pair is None for pair in pairs):
        return None
    factor = constant if node.op_type == "Mul" else 1 / constant
    for pair in pairs:
        if pair is not None and _may_take(*pair, factor):
            return _Moved(*pair, factor)
    return None


def _may_take(quantize: Any, dequantize: Any, factor: float) -> bool:
    """Nobody else reads the pair, it has one scale, and that keeps its precision."""
    if any(len(list(node.outputs[0].uses())) != 1 for node in (quantize, dequantize)):
        return False
    scale = floats(quantize.inputs[1])
    return scale is not None and scale.ndim == 0 and float(scale) * factor >= smallest_normal(scale.dtype)


def _carry_out(model: Any, moved: _Moved) -> None:
    """Multiply what the Q reads, and its scale."""
    quantize, source, step = moved.quantize, moved.quantize.inputs[0], moved.quantize.inputs[1]
    scale = floats(step)
    assert scale is not None
    name = f"{step.name}_factor"
    factor = add_constant(model, name, np.array(moved.factor, scale.dtype), step.dtype)
    multiplied = np.array(float(scale) * moved.factor, scale.dtype)
    made = add_constant(model, f"{step.name}_scaled", multiplied, step.dtype)
    applied = insert_before(model, quantize, "Mul", [source, factor], like=source, shape=source.shape)
    applied.name = f"{name}_applied"
    quantize.replace_input_with(0, applied)
    for node in (quantize, moved.dequantize):
        node.replace_input_with(1, made)
    drop_unread(model, step)
