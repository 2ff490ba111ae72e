"""Graph passes that spare ONNX Runtime conversions between integers and floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass, add_constant, drop_unread, insert_before, take_out
from quantizer.export.passes.quantizers import is_within, starts_at_zero
from quantizer.export.qdq.graph import is_dequantized, is_quantize, scalar
from quantizer.numerics.formats import UINT8

_LINEAR_FROM = -float(np.log(np.finfo(np.float32).eps))
"""Above this, log(1 + e^x) equals x in float32."""


class PlainSoftplus(MatchPass[Any]):
    """``Where(x > 20, x, Softplus(x))`` becomes ``Softplus(x)``.

    torch returns large values unchanged. Softplus(x) equals x there in float32, and ONNX Runtime's does not overflow.
    Three readers of a quantized x need three DequantizeLinear nodes, and a Where takes as long as a Softplus.
    """

    left = "a Where still chooses between a Softplus and its input"

    def match(self, node: Any) -> Any | None:
        """Return the output of the Softplus behind such a Where; None for any other node."""
        if node.op_type != "Where" or node.outputs[0].is_graph_output():
            return None
        condition, value, soft = node.inputs
        greater, softplus = condition.producer(), soft.producer()
        if greater is None or greater.op_type != "Greater" or softplus is None or softplus.op_type != "Softplus":
            return None
        threshold = scalar(greater.inputs[1])
        same = greater.inputs[0] is value and softplus.inputs[0] is value
        return soft if same and threshold is not None and threshold >= _LINEAR_FROM else None

    def apply(self, model: Any, node: Any, matched: Any) -> None:
        compared = node.inputs[0].producer()
        take_out(model, node, matched)
        if not compared.outputs[0].uses() and not compared.outputs[0].is_graph_output():
            limit = compared.inputs[1]
            model.graph.remove(compared, safe=True)
            drop_unread(model, limit)


class UnfusedRectifiers(MatchPass[Any]):
    """``MatMul -> Relu -> Q`` becomes ``MatMul -> Max(0) -> Q``; a Clip gets a Max before it.

    ONNX Runtime 1.31 looks through Relu and Clip behind a MatMul of two DQ for the Q of a QLinearMatMul. If that Q does
    not clip as much, as with zero point 128, it computes in floats. It does not look through Max.
    """

    left = "a Relu or Clip still separates a MatMul from a Q that does not replace it"

    def match(self, node: Any) -> Any | None:
        """Return the result of the MatMul before such a Relu or Clip; None for any other node."""
        if node.op_type not in ("Relu", "Clip") or node.outputs[0].is_graph_output():
            return None
        product = node.inputs[0].producer()
        if product is None or product.op_type != "MatMul" or not all(map(is_dequantized, product.inputs)):
            return None
        quantizers = [reader for reader in node.outputs[0].consumers() if is_quantize(reader)]
        single_reader = len(node.inputs[0].uses()) == 1 and not node.inputs[0].is_graph_output()
        return (
            node.inputs[0]
            if single_reader and quantizers and not any(_replaces(quantizer, node) for quantizer in quantizers)
            else None
        )

    def apply(self, model: Any, node: Any, matched: Any) -> None:
        low = 0.0 if node.op_type == "Relu" else _lower(node)
        other = matched
        if low is not None:
            array = np.array(low, matched.dtype.numpy())
            other = add_constant(model, f"{matched.name}.low", array, matched.dtype)
        limited = insert_before(node, "Max", [matched, other], like=matched, shape=matched.shape)
        if node.op_type == "Relu":
            take_out(model, node, limited)
        else:
            node.replace_input_with(0, limited)


def _lower(clip: Any) -> float | None:
    value = clip.inputs[1] if len(clip.inputs) > 1 else None
    return None if value is None else scalar(value)


def _replaces(quantize: Any, rectifier: Any) -> bool:
    """Return whether a Q clips at least as much as the Relu or Clip before it."""
    scale = scalar(quantize.inputs[1])
    if scale is None or not starts_at_zero(quantize):
        return False
    return rectifier.op_type == "Relu" or is_within(rectifier, scale * UINT8.qmax)
