"""Passes that leave ONNX Runtime fewer conversions between codes and floats.

``UnfusedRectifiers`` keeps a rectifier apart from the product before it, for a target that would compute that in
floats.

Measured with ONNX Runtime 1.31: it looks through a Relu or a Clip behind a MatMul of two DQ for the Q of a
QLinearMatMul. Where that Q does not clip all that the rectifier does, as with zero point 128, it makes neither a
QLinearMatMul nor a MatMulIntegerToFloat. It does not look through a Max.

``PlainSoftplus`` leaves large values to a Softplus itself, for a target that dequantizes a value for each of its
readers.

torch returns large values as they are: ``Where(x > 20, x, Softplus(x))``. Its Softplus differs from x there by less
than float32 can tell, and ONNX Runtime's Softplus does not overflow. Three readers of a quantized x are three
DequantizeLinear there, and a Where takes as long as a Softplus.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass, add_constant, drop_unread, insert_before, take_out
from quantizer.export.passes.quantizers import is_within, starts_at_zero
from quantizer.export.qdq.graph import is_dequantized, is_quantize, scalar
from quantizer.numerics.formats import UINT8

_ALIKE = -float(np.log(np.finfo(np.float32).eps))
"""From here on log(1 + e^x) is x in float32."""


class PlainSoftplus(MatchPass[Any]):
    """``Where(x > 20, x, Softplus(x))`` becomes ``Softplus(x)``."""

    left = "a Softplus still has large values chosen beside it"

    def match(self, node: Any) -> Any | None:
        """Return the result of the Softplus of such a Where; None for any other node."""
        if node.op_type != "Where" or node.outputs[0].is_graph_output():
            return None
        condition, value, soft = node.inputs
        greater, softplus = condition.producer(), soft.producer()
        if greater is None or greater.op_type != "Greater" or softplus is None or softplus.op_type != "Softplus":
            return None
        threshold = scalar(greater.inputs[1])
        same = greater.inputs[0] is value and softplus.inputs[0] is value
        return soft if same and threshold is not None and threshold >= _ALIKE else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        compared = node.inputs[0].producer()
        take_out(model, node, found)
        if not compared.outputs[0].uses() and not compared.outputs[0].is_graph_output():
            limit = compared.inputs[1]
            model.graph.remove(compared, safe=True)
            drop_unread(model, limit)


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
