"""The operands of a product: what stands between it and the DequantizeLinear that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantizer.qdq.graph import format_name
from quantizer.qdq.graph import is_constant
from quantizer.qdq.graph import is_dequantize
from quantizer.qdq.graph import is_quantize
from quantizer.qdq.graph import maker

__all__ = ["MATMULS", "MOVES", "PRODUCTS", "Operand", "operands"]

MATMULS = ("MatMul", "Gemm")
PRODUCTS = (*MATMULS, "Conv", "ConvTranspose")

MOVES = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Identity", "Slice", "Split")
"""Operators that compute nothing: their output is their first input's values."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One of the two things that a product multiplies.

    Attributes:
        product: the node.
        index: which of its inputs.
        between: the nodes between the product and the DQ, the nearest to the product first.
        dequantize: the DQ; None where the operand is float.
        is_weight: the operand does not depend on the model's inputs.
    """

    product: Any
    index: int
    between: tuple[Any, ...]
    dequantize: Any
    is_weight: bool

    @property
    def quantized(self) -> bool:
        """It comes from a DequantizeLinear."""
        return self.dequantize is not None

    @property
    def quantize(self) -> Any:
        """The QuantizeLinear before the DQ; None where the operand is float or stored in steps."""
        before = maker(self.dequantize.inputs[0]) if self.quantized else None
        return before if is_quantize(before) else None

    @property
    def format(self) -> str:
        """The name of its format; empty where it is float."""
        return format_name(self.dequantize) if self.quantized else ""


def operands(product: Any) -> tuple[Operand, Operand]:
    """The two operands of a product; a bias is none."""
    return _operand(product, 0), _operand(product, 1)


def _operand(product: Any, index: int) -> Operand:
    value = product.inputs[index]
    is_weight = is_constant(value)
    between = []
    node = maker(value)
    while node is not None and not is_dequantize(node):
        before = _passed(node)
        if before is None:
            return Operand(product, index, (), None, is_weight)
        between.append(node)
        node = maker(before)
    return Operand(product, index, tuple(between) if node is not None else (), node, is_weight)


def _passed(node: Any) -> Any:
    """What a node hands on: moved, cast, or times a constant; None for any other node."""
    if node.op_type in (*MOVES, "Cast"):
        return node.inputs[0]
    if node.op_type in ("Mul", "Div"):
        constants = [is_constant(value) for value in node.inputs]
        if constants == [False, True]:
            return node.inputs[0]
        if constants == [True, False] and node.op_type == "Mul":
            return node.inputs[1]
    return None
