"""Pass that writes a quantized einsum as a MatMul, if it is a product of matrices.

Engines compute an Einsum in floats, whatever precedes it, and a MatMul behind two DQs in low precision. Legend, by
labels: k is summed over, m the first operand's own, n the second's, the others are batch labels of both.

    Einsum(a, b) = Transpose(Transpose(a)[batch, m, k] @ Transpose(b)[batch, k, n])

Without batch labels the first operand may have several labels of its own. Any other einsum stays: one with two sums, an
outer product, a sum over one operand, or lengths that the graph does not show to be equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from quantizer.export.passes.base import MatchPass, insert_before, insert_transpose, replace_node
from quantizer.qdq.graph import is_dequantized


@dataclass(frozen=True, slots=True)
class _Product:
    """Inputs of the MatMul with the axes that each is read in, and the axes of its output."""

    operands: tuple[tuple[Any, tuple[int, ...]], tuple[Any, tuple[int, ...]]]
    output: tuple[int, ...]


class EinsumToMatMul(MatchPass[_Product]):
    """``Einsum(DQ, DQ)`` becomes ``MatMul`` between the transpositions that it needs."""

    left = "a quantized product of matrices is still an Einsum"

    def match(self, node: Any) -> _Product | None:
        """Return the MatMul that equals an Einsum; None for any other node."""
        if node.op_type != "Einsum" or len(node.inputs) != 2 or not any(map(is_dequantized, node.inputs)):
            return None
        read = labels_of(node)
        if read is None:
            return None
        (first, second), output = read
        sides = [(node.inputs[0], first), (node.inputs[1], second)]
        rows = [label for label in output if label in first and label not in second]
        columns = [label for label in output if label in second and label not in first]
        if len(columns) != 1 or (len(rows) == 1 and output[-1] in rows):
            # A MatMul allows several labels on the left only; the right operand's label is the last axis of the output.
            sides, rows, columns = sides[::-1], columns, rows
        (a, left), (b, right) = sides
        batch = [label for label in output if label in left and label in right]
        summed = [label for label in left if label in right and label not in output]
        known = len(set(left)) == len(left) and len(set(right)) == len(right) and len(set(output)) == len(output)
        if not known or {*left, *right} != {*output, *summed} or not _same_length(a, b, left, right, summed):
            return None
        if len(summed) != 1 or len(columns) != 1 or not rows or (len(rows) > 1 and batch):
            return None
        written = [*batch, *rows, *columns]
        return _Product(
            operands=(
                (a, tuple(left.index(label) for label in [*batch, *rows, *summed])),
                (b, tuple(right.index(label) for label in [*batch, *summed, *columns])),
            ),
            output=tuple(written.index(label) for label in output),
        )

    def apply(self, model: Any, node: Any, found: _Product) -> None:
        import onnx_ir

        last = node.outputs[0]
        written: list[Any] = [None] * len(found.output)
        for place, axis in enumerate(found.output):
            written[axis] = last.shape[place] if last.shape is not None else None
        operands = [insert_transpose(node, value, perm, like=last) for value, perm in found.operands]
        result = insert_before(node, "MatMul", operands, like=last, shape=onnx_ir.Shape(written))
        replace_node(model, node, insert_transpose(node, result, found.output, like=last))


def labels_of(node: Any) -> tuple[list[str], str] | None:
    """Return the labels of both operands and of the output, with a capital letter for each axis of an ellipsis."""
    equation = node.attributes["equation"].as_string().replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    names = inputs.split(",")
    if not arrow or len(names) != 2 or any(value.shape is None for value in node.inputs):
        return None
    covered = {
        len(value.shape) - len(name.replace("...", ""))
        for name, value in zip(names, node.inputs, strict=True)
        if "..." in name
    }
    free = "".join(letter for letter in ascii_uppercase if letter not in equation)
    if len(covered) > 1:
        return None
    dots = free[: covered.pop()] if covered else ""
    return [name.replace("...", dots) for name in names], output.replace("...", dots)


def _same_length(a: Any, b: Any, left: str, right: str, labels: list[str]) -> bool:
    return all(a.shape[left.index(label)] == b.shape[right.index(label)] for label in labels)
