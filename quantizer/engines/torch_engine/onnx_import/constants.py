"""Nodes of an ONNX graph that compute from constants alone: their values, once and for all."""

from __future__ import annotations

import numpy as np
import torch
from torch import fx

from quantizer.engines.torch_engine.lowered_graph import LoweredGraph
from quantizer.engines.torch_engine.onnx_import.graph_builder import (
    Constant,
    GraphBuilder,
    OnnxNode,
    Sizes,
    Value,
    translated,
)

_LEFT = frozenset({"QuantizeLinear", "DequantizeLinear"})
"""A lowering finds these in the graph."""


def folded(node: OnnxNode) -> tuple[Value, ...] | None:
    """Return the outputs of a node, made of constants; None where it reads what is computed."""
    read = [value for value in node.inputs if value is not None]
    if not read or node.operator in _LEFT or not all(isinstance(value, Constant) for value in read):
        return None
    build = GraphBuilder(origin=node.name)
    outputs = translated(build, node)
    build.graph.output(tuple(value for value in outputs if isinstance(value, fx.Node)))
    with torch.no_grad():
        computed = iter(fx.Interpreter(LoweredGraph(build.graph, build.constants)).run())
    return tuple(
        Constant(name, next(computed).numpy()) if isinstance(value, fx.Node) else value
        for name, value in zip(node.outputs, outputs, strict=False)
    )


def as_constant(name: str, value: Value) -> Value:
    """Return sizes that are all known as the constant that they are, and any other value as it is."""
    if not isinstance(value, Sizes) or not all(isinstance(item, int) for item in value.items):
        return value
    return Constant(name, np.array(value.items[0] if value.alone else value.items))
