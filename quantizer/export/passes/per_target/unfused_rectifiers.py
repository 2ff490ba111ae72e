"""Pass that keeps a rectifier apart from the product before it, for a target that would compute that in floats.

Measured with ONNX Runtime 1.31: it looks through a Relu or a Clip behind a MatMul of two DQ for the Q of a
QLinearMatMul. Where that Q does not clip all that the rectifier does, as with zero point 128, it makes neither a
QLinearMatMul nor a MatMulIntegerToFloat. It does not look through a Max.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass, add_constant, insert_before, take_out
from quantizer.export.passes.rectify_before_quantize import is_within, starts_at_zero
from quantizer.numerics.qtype import UINT8
from quantizer.qdq.graph import is_dequantized, is_quantize, scalar


class UnfusedRectifiers(MatchPass[Any]):
    """``MatMul -> Relu -> Q`` becomes ``MatMul -> Max(0) -> Q``, with the same values; a Clip has a Max before it."""

    left = "a rectifier still stands between a product and a Q that does not replace it"

    def match(self, node: Any) -> Any | None:
        """Return the result of the product before such a rectifier; None for any other node."""
        if node.op_type not in ("Relu", "Clip") or node.outputs[0].is_graph_output():
            return None
        product = node.inputs[0].producer()
        if product is None or product.op_type != "MatMul" or not all(map(is_dequantized, product.inputs)):
            return None
        quantizers = [reader for reader in node.outputs[0].consumers() if is_quantize(reader)]
        alone = len(node.inputs[0].uses()) == 1 and not node.inputs[0].is_graph_output()
        return node.inputs[0] if alone and quantizers and not any(_replaces(one, node) for one in quantizers) else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        low = 0.0 if node.op_type == "Relu" else _lower(node)
        other = found
        if low is not None:
            array = np.array(low, found.dtype.numpy())
            other = add_constant(model, f"{found.name}.low", array, found.dtype)
        held = insert_before(node, "Max", [found, other], like=found, shape=found.shape)
        if node.op_type == "Relu":
            take_out(model, node, held)
        else:
            node.replace_input_with(0, held)


def _lower(clip: Any) -> float | None:
    value = clip.inputs[1] if len(clip.inputs) > 1 else None
    return None if value is None else scalar(value)


def _replaces(quantize: Any, rectifier: Any) -> bool:
    """Return whether a Q clips all that a rectifier before it does."""
    scale = scalar(quantize.inputs[1])
    if scale is None or not starts_at_zero(quantize):
        return False
    return rectifier.op_type == "Relu" or is_within(rectifier, scale * UINT8.qmax)
