"""Graph passes that write Einsum and Gemm as MatMul, because engines compute the former in floats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

import numpy as np

from quantizer.export.passes.base import (
    MatchPass,
    add_constant,
    drop_unread,
    insert_before,
    insert_transpose,
    replace_node,
)
from quantizer.export.qdq.graph import attribute, block_size, is_dequantized


@dataclass(frozen=True, slots=True)
class _Product:
    """Inputs of the MatMul, the permutation of each, and the permutation of its output."""

    operands: tuple[tuple[Any, tuple[int, ...]], tuple[Any, tuple[int, ...]]]
    output: tuple[int, ...]


class EinsumToMatMul(MatchPass[_Product]):
    """``Einsum(DQ, DQ)`` becomes a ``MatMul`` with the necessary transpositions.

    With summed label k, label m of the first operand, n of the second, and shared batch labels:
    Einsum(a, b) = Transpose(Transpose(a)[batch, m, k] @ Transpose(b)[batch, k, n]).

    Without batch labels, the first operand may have several labels m. Other equations stay: two sums, outer products,
    sums over one operand, or lengths that the graph does not show to be equal.
    """

    left = "a quantized matrix multiplication is still an Einsum"

    def match(self, node: Any) -> _Product | None:
        """Return the equivalent MatMul of an Einsum; None for any other node."""
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
            # Only the left operand of a MatMul may have several labels; the right label is the last output axis.
            sides, rows, columns = sides[::-1], columns, rows
        (a, left), (b, right) = sides
        batch = [label for label in output if label in left and label in right]
        summed = [label for label in left if label in right and label not in output]
        distinct = len(set(left)) == len(left) and len(set(right)) == len(right) and len(set(output)) == len(output)
        if not distinct or {*left, *right} != {*output, *summed} or not _same_length(a, b, left, right, summed):
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

    def apply(self, model: Any, node: Any, matched: _Product) -> None:
        import onnx_ir

        last = node.outputs[0]
        written: list[Any] = [None] * len(matched.output)
        for position, axis in enumerate(matched.output):
            written[axis] = last.shape[position] if last.shape is not None else None
        operands = [insert_transpose(node, value, perm, like=last) for value, perm in matched.operands]
        result = insert_before(node, "MatMul", operands, like=last, shape=onnx_ir.Shape(written))
        replace_node(model, node, insert_transpose(node, result, matched.output, like=last))


def labels_of(node: Any) -> tuple[list[str], str] | None:
    """Return the labels of both operands and of the output, with a capital letter per axis of an ellipsis."""
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


_MATRIX = 2  # axes


@dataclass(frozen=True, slots=True)
class _WeightProduct:
    """Activation, index of the weight, their labels, and the labels k, m, n and of the output."""

    x: Any
    weight: Any
    of_x: str
    of_weight: str
    summed: str
    rows: str
    columns: str
    output: str

    def sizes(self, labels: str) -> list[int]:
        """Return the sizes of labels of the weight."""
        shape = self.weight.shape
        return [int(shape[self.of_weight.index(label)]) for label in labels]


class EinsumWeights(MatchPass[_WeightProduct]):
    """``Einsum(x, DQ(w))`` with a constant w of three or more axes becomes ``MatMul`` by ``DQ(w' [K, N], axis 1)``.

    Engines reshape such a weight and lose its scales; OpenVINO refuses the file. With summed labels k, labels m of x
    and n of w: Einsum(x, w) = Transpose(Reshape(Reshape(Transpose(x)[m, k]) @ w'[k, n])).

    Other equations stay: a shared label in the output, or a sum over one operand.
    """

    left = "a multiplication by a stored weight is still an Einsum"

    def match(self, node: Any) -> _WeightProduct | None:
        """Return the equivalent matrix multiplication of an Einsum; None for any other node."""
        read = labels_of(node) if node.op_type == "Einsum" else None
        if read is None:
            return None
        names, output = read
        for place in (1, 0):
            weight, x = node.inputs[place], node.inputs[1 - place]
            of_weight, of_x = names[place], names[1 - place]
            if not _is_stored(weight) or len(of_weight) <= _MATRIX:
                continue
            summed = "".join(label for label in of_weight if label in of_x and label not in output)
            rows = "".join(label for label in output if label in of_x)
            columns = "".join(label for label in of_weight if label in output and label not in of_x)
            distinct = all(len(set(labels)) == len(labels) for labels in (of_weight, of_x, output))
            complete = (
                {*of_x} == {*rows, *summed} and {*of_weight} == {*summed, *columns} and {*rows, *columns} == {*output}
            )
            equal_sizes = all(x.shape[of_x.index(label)] == weight.shape[of_weight.index(label)] for label in summed)
            scaled = _scaled_label(weight, of_weight)
            if (
                distinct
                and complete
                and equal_sizes
                and rows
                and summed
                and columns
                and (scaled is None or scaled in columns)
            ):
                return _WeightProduct(x, weight, of_x, of_weight, summed, rows, columns, output)
        return None

    def apply(self, model: Any, node: Any, matched: _WeightProduct) -> None:
        import onnx_ir

        last = node.outputs[0]
        weight = _as_matrix(model, node, matched)
        count = len(matched.rows)

        def transposed(value: Any, labels: str, order: str) -> Any:
            perm = [labels.index(label) for label in order]
            return insert_transpose(node, value, perm, like=last)

        def reshaped(value: Any, sizes: list[int]) -> Any:
            """Return the value with its last axes reshaped to ``sizes``."""
            new_shape = np.array([0] * count + sizes, np.int64)
            to = add_constant(model, f"{last.name}_shape", new_shape, onnx_ir.DataType.INT64)
            shape = onnx_ir.Shape([*(value.shape[axis] for axis in range(count)), *sizes])
            return insert_before(node, "Reshape", [value, to], like=last, shape=shape)

        x = transposed(matched.x, matched.of_x, matched.rows + matched.summed)
        if len(matched.summed) > 1:
            x = reshaped(x, [int(weight.shape[0])])
        shape = onnx_ir.Shape([*(x.shape[axis] for axis in range(count)), weight.shape[1]])
        result = insert_before(node, "MatMul", [x, weight], like=last, shape=shape)
        if len(matched.columns) > 1:
            result = reshaped(result, matched.sizes(matched.columns))
        replace_node(model, node, transposed(result, matched.rows + matched.columns, matched.output))
        _drop(model, matched.weight)


def _is_stored(value: Any) -> bool:
    """Return whether a value is a stored weight behind a DQ with constant scales and without blocks."""
    if not is_dequantized(value):
        return False
    dequantize = value.producer()
    constant = all(value_read is None or value_read.const_value is not None for value_read in dequantize.inputs)
    return constant and block_size(dequantize) is None


def _scaled_label(weight: Any, labels: str) -> str | None:
    """Return the label of the axis with one scale per index; None for one scale per tensor."""
    dequantize = weight.producer()
    if not len(dequantize.inputs[1].shape):
        return None
    return labels[dequantize.attributes["axis"].as_int()]


def _as_matrix(model: Any, node: Any, product: _WeightProduct) -> Any:
    """Return the weight as a matrix [K, N] behind a new DQ."""
    import onnx_ir

    dequantize = product.weight.producer()
    order = [product.of_weight.index(label) for label in product.summed + product.columns]
    sizes = product.sizes(product.columns)
    depth = math.prod(product.sizes(product.summed))
    scaled = _scaled_label(product.weight, product.of_weight)

    def along(array: Any) -> Any:
        """Return a scale or zero point per column [N]; a scalar is returned unchanged."""
        if scaled is None:
            return array
        shape = [len(array) if label == scaled else 1 for label in product.columns]
        return np.broadcast_to(array.reshape(shape), sizes).reshape(-1)

    def constant(value: Any, change: Any) -> Any:
        if value is None:
            return None
        array = np.ascontiguousarray(change(value.const_value.numpy()))
        return add_constant(model, f"{value.name}_matrix", array, value.const_value.dtype)

    stored, scale, *zero = dequantize.inputs
    inputs = [constant(stored, lambda array: array.transpose(order).reshape(depth, -1)), constant(scale, along)]
    inputs += [constant(value, along) for value in zero]
    attributes = [] if scaled is None else [onnx_ir.AttrInt64("axis", 1)]
    shape = onnx_ir.Shape([depth, math.prod(sizes)])
    matrix = insert_before(node, "DequantizeLinear", inputs, like=product.weight, shape=shape, attributes=attributes)
    matrix.producer().metadata_props.update(dequantize.metadata_props)
    return matrix


def _drop(model: Any, weight: Any) -> None:
    """Remove the former weight if nothing else reads it."""
    if weight.uses() or weight.is_graph_output():
        return
    dequantize = weight.producer()
    inputs = [value for value in dequantize.inputs if value is not None]
    model.graph.remove(dequantize, safe=True)
    for value in inputs:
        drop_unread(model, value)


class GemmToMatMul(MatchPass[Any]):
    """``Gemm(DQ, DQ(w [N, K]), b)`` becomes ``MatMul(DQ, Transpose(DQ(w))) -> Add(b)``.

    A linear layer with 2-D inputs exports as Gemm. ONNX Runtime computes a Gemm with a float bias in floats, and no
    engine prefers the Gemm.
    """

    left = "a quantized matrix multiplication is still a Gemm"

    def match(self, node: Any) -> Any | None:
        """Return a Gemm of two DQ without alpha, beta and transA; None for any other node."""
        if node.op_type != "Gemm" or not all(map(is_dequantized, node.inputs[:2])):
            return None
        numbers = [node.attributes[name].as_float() for name in ("alpha", "beta") if name in node.attributes]
        return node if all(number == 1 for number in numbers) and not attribute(node, "transA", 0) else None

    def apply(self, model: Any, node: Any, matched: Any) -> None:
        last = node.outputs[0]
        first, second, *bias = node.inputs
        if attribute(node, "transB", 0):
            second = insert_transpose(node, second, (1, 0), like=last)
        result = insert_before(node, "MatMul", [first, second], like=last, shape=last.shape)
        if bias and bias[0] is not None:
            result = insert_before(node, "Add", [result, bias[0]], like=last, shape=last.shape)
        replace_node(model, node, result)
