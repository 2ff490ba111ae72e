"""Operands of a product: the nodes between it and the DequantizeLinear that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantizer.qdq.graph import format_name, is_constant, is_dequantize, is_quantize, maker

MATMULS = ("MatMul", "Gemm")
PRODUCTS = (*MATMULS, "Conv", "ConvTranspose")

MOVES = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Identity", "Slice", "Split")
"""Operators that compute nothing: their output is their first input's values."""


@dataclass(frozen=True, slots=True)
class Operand:
    """Operand of a product.

    Attributes:
        product: the node.
        index: the index of its input.
        between: the nodes between the product and the DQ, the nearest to the product first.
        dequantize: the DQ; None if the operand is float.
        is_weight: whether the operand is independent of the model's inputs.
    """

    product: Any
    index: int
    between: tuple[Any, ...]
    dequantize: Any
    is_weight: bool

    @property
    def quantized(self) -> bool:
        """Flag of an operand that comes from a DequantizeLinear."""
        return self.dequantize is not None

    @property
    def quantize(self) -> Any:
        """QuantizeLinear before the DQ; None if the operand is float or stored in codes."""
        before = maker(self.dequantize.inputs[0]) if self.quantized else None
        return before if is_quantize(before) else None

    @property
    def format(self) -> str:
        """Name of its format; empty if it is float."""
        return format_name(self.dequantize) if self.quantized else ""


def operands(product: Any) -> tuple[Operand, Operand]:
    """Return the two operands of a product, without the bias."""
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
    """Return the value that a node moves, casts, or multiplies by a constant; None for any other node."""
    if node.op_type in (*MOVES, "Cast"):
        return node.inputs[0]
    if node.op_type in ("Mul", "Div"):
        constants = [is_constant(value) for value in node.inputs]
        if constants == [False, True]:
            return node.inputs[0]
        if constants == [True, False] and node.op_type == "Mul":
            return node.inputs[1]
    return None
