"""A quantized Gemm is written as a MatMul and an Add.

A linear layer on inputs of two dimensions exports as Gemm, on any others as MatMul and Add. ONNX Runtime computes a
Gemm with a float bias in floats, whatever stands before it; no engine prefers the Gemm.
"""

from __future__ import annotations

from typing import Any

from quantizer.export.passes.base import insert_before
from quantizer.export.passes.base import is_dequantized
from quantizer.export.passes.base import replace_node

__all__ = ["GemmToMatMul"]


class GemmToMatMul:
    """``Gemm(DQ, DQ(w [N, K]), b)`` becomes ``MatMul(DQ, Transpose(DQ(w))) -> Add(b)``."""

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        found = [node for node in model.graph if _is_product(node)]
        for node in found:
            _carry_out(model, node)
        return len(found)

    def ensures(self, model: Any) -> str | None:
        left = [node.name for node in model.graph if _is_product(node)]
        return f"a quantized product is still a Gemm: {left[0]}" if left else None


def _is_product(node: Any) -> bool:
    """A Gemm of what comes from a DQ that multiplies and adds, and nothing else."""
    if node.op_type != "Gemm" or not all(map(is_dequantized, node.inputs[:2])):
        return False
    numbers = [node.attributes[name].as_float() for name in ("alpha", "beta") if name in node.attributes]
    return all(number == 1 for number in numbers) and not _flag(node, "transA")


def _flag(node: Any, name: str) -> bool:
    return name in node.attributes and bool(node.attributes[name].as_int())


def _carry_out(model: Any, node: Any) -> None:
    import onnx_ir

    last = node.outputs[0]
    first, second, *bias = node.inputs
    if _flag(node, "transB"):
        shape = None if second.shape is None else onnx_ir.Shape([second.shape[1], second.shape[0]])
        attributes = [onnx_ir.AttrInt64s("perm", (1, 0))]
        second = insert_before(model, node, "Transpose", [second], like=last, shape=shape, attributes=attributes)
    result = insert_before(model, node, "MatMul", [first, second], like=last, shape=last.shape)
    if bias and bias[0] is not None:
        result = insert_before(model, node, "Add", [result, bias[0]], like=last, shape=last.shape)
    replace_node(model, node, result)
