"""The product behind each name in an ONNX file: engines call a fused layer after its last node, or its output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantizer.engines.inspection.onnx_graph import read_graph
from quantizer.qdq.operand import PRODUCTS

_FUSED = frozenset(
    {
        "Add",
        "BatchNormalization",
        "Clip",
        "Elu",
        "Erf",
        "Gelu",
        "HardSigmoid",
        "HardSwish",
        "LeakyRelu",
        "Mul",
        "Relu",
        "Sigmoid",
        "Tanh",
    }
)
"""Operators that engines compute in the layer of the product that they read."""


def product_names(path: Path) -> dict[str, str]:
    """Return the name of the product that a node or tensor is computed of alone, by its name.

    That is the product itself, and what follows it through activations and constants: ``block/Clip`` for the
    convolution ``block.conv/Conv``. What has no such product is left out.
    """
    graph = read_graph(path).graph
    behind: dict[str, str] = {}
    found: dict[str, str] = {}
    constants = {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        product = node.name if node.op_type in PRODUCTS else _read(node, behind, constants)
        if product is not None:
            behind.update(dict.fromkeys(node.output, product))
            found[node.name] = product
        elif all(name in constants for name in node.input):
            constants.update(node.output)
    return {**behind, **found}


def _read(node: Any, behind: dict[str, str], constants: set[str]) -> str | None:
    """Return the product that a node reads through its only operand that is no constant."""
    computed = [name for name in node.input if name and name not in constants]
    return behind.get(computed[0]) if node.op_type in _FUSED and len(computed) == 1 else None
