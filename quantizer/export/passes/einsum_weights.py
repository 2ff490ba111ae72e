"""Pass that writes an einsum with a stored weight of several axes as a product with a matrix.

Engines make a matrix of such a weight themselves and lose its scales: OpenVINO refuses the file. Legend, by labels:
k are summed over, m the activation's own, n the weight's.

    Einsum(x, w) = Transpose(Reshape(Reshape(Transpose(x)[m, k]) @ w'[k, n]))

Any other einsum with a weight stays: one with a label of both operands in the output, or a sum over one operand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
from quantizer.export.passes.einsum_to_matmul import labels_of
from quantizer.qdq.graph import block_size, is_dequantized

_MATRIX = 2  # axes


@dataclass(frozen=True, slots=True)
class _Product:
    """Activation and index of the weight, the labels of both, and the labels of k, m, n and the output."""

    x: Any
    weight: Any
    of_x: str
    of_weight: str
    summed: str
    rows: str
    columns: str
    output: str

    def sizes(self, labels: str) -> list[int]:
        """Return the lengths of labels of the weight."""
        shape = self.weight.shape
        return [int(shape[self.of_weight.index(label)]) for label in labels]


class EinsumWeights(MatchPass[_Product]):
    """``Einsum(x, DQ(w))`` with a constant w of three or more axes becomes ``MatMul`` by ``DQ(w' [K, N], axis 1)``."""

    left = "a product by a stored weight is still an Einsum"

    def match(self, node: Any) -> _Product | None:
        """Return the matrix product that equals an Einsum; None for any other node."""
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
            once = all(len(set(labels)) == len(labels) for labels in (of_weight, of_x, output))
            whole = (
                {*of_x} == {*rows, *summed} and {*of_weight} == {*summed, *columns} and {*rows, *columns} == {*output}
            )
            alike = all(x.shape[of_x.index(label)] == weight.shape[of_weight.index(label)] for label in summed)
            scaled = _scaled_label(weight, of_weight)
            if once and whole and alike and rows and summed and columns and (scaled is None or scaled in columns):
                return _Product(x, weight, of_x, of_weight, summed, rows, columns, output)
        return None

    def apply(self, model: Any, node: Any, found: _Product) -> None:
        import onnx_ir

        last = node.outputs[0]
        weight = _as_matrix(model, node, found)
        count = len(found.rows)

        def turned(value: Any, given: str, wanted: str) -> Any:
            perm = [given.index(label) for label in wanted]
            return insert_transpose(node, value, perm, like=last)

        def reshaped(value: Any, sizes: list[int]) -> Any:
            """Return the value with its rows kept and its last axes reshaped to ``sizes``."""
            wanted = np.array([0] * count + sizes, np.int64)
            to = add_constant(model, f"{last.name}_shape", wanted, onnx_ir.DataType.INT64)
            shape = onnx_ir.Shape([*(value.shape[axis] for axis in range(count)), *sizes])
            return insert_before(node, "Reshape", [value, to], like=last, shape=shape)

        x = turned(found.x, found.of_x, found.rows + found.summed)
        if len(found.summed) > 1:
            x = reshaped(x, [int(weight.shape[0])])
        shape = onnx_ir.Shape([*(x.shape[axis] for axis in range(count)), weight.shape[1]])
        result = insert_before(node, "MatMul", [x, weight], like=last, shape=shape)
        if len(found.columns) > 1:
            result = reshaped(result, found.sizes(found.columns))
        replace_node(model, node, turned(result, found.rows + found.columns, found.output))
        _drop(model, found.weight)


def _is_stored(value: Any) -> bool:
    """Return whether a value is a weight behind a DQ whose scales are constants and not those of blocks."""
    if not is_dequantized(value):
        return False
    dequantize = value.producer()
    constant = all(given is None or given.const_value is not None for given in dequantize.inputs)
    return constant and block_size(dequantize) is None


def _scaled_label(weight: Any, labels: str) -> str | None:
    """Return the label of the axis with scales of its own; None if one scale serves the tensor."""
    dequantize = weight.producer()
    if not len(dequantize.inputs[1].shape):
        return None
    return labels[dequantize.attributes["axis"].as_int()]


def _as_matrix(model: Any, node: Any, product: _Product) -> Any:
    """Return the weight [K, N] behind a DQ of its own."""
    import onnx_ir

    dequantize = product.weight.producer()
    order = [product.of_weight.index(label) for label in product.summed + product.columns]
    sizes = product.sizes(product.columns)
    depth = math.prod(product.sizes(product.summed))
    scaled = _scaled_label(product.weight, product.of_weight)

    def along(array: Any) -> Any:
        """Return a scale or zero point for each column [N]; one for the whole tensor stays as it is."""
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
    made = insert_before(node, "DequantizeLinear", inputs, like=product.weight, shape=shape, attributes=attributes)
    made.producer().metadata_props.update(dequantize.metadata_props)
    return made


def _drop(model: Any, weight: Any) -> None:
    """Remove the former weight if nothing else reads it."""
    if weight.uses() or weight.is_graph_output():
        return
    dequantize = weight.producer()
    inputs = [value for value in dequantize.inputs if value is not None]
    model.graph.remove(dequantize, safe=True)
    for value in inputs:
        drop_unread(model, value)
