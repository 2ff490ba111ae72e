"""Fusion of biases into products, in a file that ONNX Runtime has optimized.

Its ``MatMulIntegerToFloat`` and ``DynamicQuantizeMatMul`` take a bias, which ONNX Runtime fuses in the operator format
and not for Q/DQ. An Add reads and writes again all that the product has written: MiniLM at 8 x 128 takes 12% longer
with them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

_BIAS = {"MatMulIntegerToFloat": 6, "DynamicQuantizeMatMul": 4}
"""The products, and which of the inputs of each is the bias."""
_WEIGHT = "KN"
"""The axes of a weight that a bias [N] fits."""


def fuse_biases(path: Path) -> int:
    """Fuse biases into the products of an ONNX file, in place, and return their number.

    A bias is a constant of one axis, added by the only node that reads the product.
    """
    import onnx

    model = onnx.load(path)
    graph = model.graph
    reads = Counter(name for node in graph.node for name in node.input)
    reads.update(output.name for output in graph.output)
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    products = {node.output[0]: node for node in graph.node if node.op_type in _BIAS and reads[node.output[0]] == 1}
    fused = []
    for node in graph.node:
        product, bias = _parts(node, products, shapes)
        if product is None:
            continue
        place = _BIAS[product.op_type]
        inputs = [*product.input[:place], *[""] * (place - len(product.input)), bias]
        del product.input[:]
        product.input.extend(inputs)
        product.output[0] = node.output[0]
        fused.append(node)
    for node in fused:
        graph.node.remove(node)
    if fused:
        onnx.save(model, path)
    return len(fused)


def _parts(node: Any, products: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> tuple[Any, str]:
    """Return the product and the bias that a node adds; None if it does anything else."""
    if node.op_type != "Add":
        return None, ""
    for value, other in (node.input, reversed(node.input)):
        product = products.get(value)
        # An input that is left out may be there without a name.
        if product is None or any(product.input[_BIAS[product.op_type] :]):
            continue
        # The shape of a product of two activations is unknown here; each weight of a stack has its own columns.
        weight = shapes.get(product.input[1], ())
        if len(weight) == len(_WEIGHT) and shapes.get(other) == weight[-1:]:
            return product, other
    return None, ""
