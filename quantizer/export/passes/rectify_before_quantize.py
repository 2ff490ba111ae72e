"""Pass that removes a rectifier behind a Q/DQ pair, or moves it before the pair.

Codes without negative values have been rectified: with zero point 0 an unsigned Q clips at 0. Of other codes, rounding
keeps 0 and the order of values, so that a Relu commutes with it. An engine computes a convolution in integers whose
result is quantized directly, or behind a Relu.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass, take_out
from quantizer.numerics.qtype import UINT8
from quantizer.qdq.graph import floats, is_quantize, pair_before, scalar

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
