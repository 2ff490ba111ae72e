"""A quantized Gemm is written as a MatMul and an Add.

A linear layer on inputs of two dimensions exports as Gemm, on any others as MatMul and Add. ONNX Runtime computes a
Gemm with a float bias in floats, whatever stands before it; no engine prefers the Gemm.
"""

from __future__ import annotations

from typing import Any

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
    if node.op_type != "Gemm" or any(value.producer() is None for value in node.inputs[:2]):
        return False
    numbers = [node.attributes[name].as_float() for name in ("alpha", "beta") if name in node.attributes]
    plain = all(number == 1 for number in numbers) and not _flag(node, "transA")
    return plain and all(value.producer().op_type == "DequantizeLinear" for value in node.inputs[:2])


def _flag(node: Any, name: str) -> bool:
    return name in node.attributes and bool(node.attributes[name].as_int())


def _carry_out(model: Any, node: Any) -> None:
    import onnx_ir

    last = node.outputs[0]

    def inserted(operator: str, inputs: list[Any], shape: Any, attributes: Any = ()) -> Any:
        made = onnx_ir.Node("", operator, inputs, attributes)
        made.metadata_props.update(node.metadata_props)
        made.outputs[0].shape, made.outputs[0].type = shape, last.type
        model.graph.insert_before(node, made)
        return made.outputs[0]

    first, second, *bias = node.inputs
    if _flag(node, "transB"):
        shape = None if second.shape is None else onnx_ir.Shape([second.shape[1], second.shape[0]])
        second = inserted("Transpose", [second], shape, [onnx_ir.AttrInt64s("perm", (1, 0))])
    result = inserted("MatMul", [first, second], last.shape)
    if bias and bias[0] is not None:
        result = inserted("Add", [result, bias[0]], last.shape)
    result.name = last.name
    last.replace_all_uses_with(result, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)
