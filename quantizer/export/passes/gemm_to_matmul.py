"""Pass that writes a quantized Gemm as a MatMul and an Add.

A linear layer on inputs of two dimensions exports as Gemm, on any others as MatMul and Add. ONNX Runtime computes a
Gemm with a float bias in floats, whatever precedes it; no engine prefers the Gemm.
"""

from __future__ import annotations

from typing import Any

from quantizer.export.passes.base import MatchPass, insert_before, insert_transpose, replace_node
from quantizer.qdq.graph import attribute, is_dequantized


class GemmToMatMul(MatchPass[Any]):
    """``Gemm(DQ, DQ(w [N, K]), b)`` becomes ``MatMul(DQ, Transpose(DQ(w))) -> Add(b)``."""

    left = "a quantized product is still a Gemm"

    def match(self, node: Any) -> Any | None:
        """Return the node if it is a Gemm of DQ outputs that only multiplies and adds."""
        if node.op_type != "Gemm" or not all(map(is_dequantized, node.inputs[:2])):
            return None
        numbers = [node.attributes[name].as_float() for name in ("alpha", "beta") if name in node.attributes]
        return node if all(number == 1 for number in numbers) and not attribute(node, "transA", 0) else None

    def apply(self, model: Any, node: Any, found: Any) -> None:
        last = node.outputs[0]
        first, second, *bias = node.inputs
        if attribute(node, "transB", 0):
            second = insert_transpose(node, second, (1, 0), like=last)
        result = insert_before(node, "MatMul", [first, second], like=last, shape=last.shape)
        if bias and bias[0] is not None:
            result = insert_before(node, "Add", [result, bias[0]], like=last, shape=last.shape)
        replace_node(model, node, result)
