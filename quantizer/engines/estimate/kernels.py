"""The kernels that an engine makes of a graph, after the rules of fusion that TensorRT documents.

A product takes in what follows it element by element: bias, activation, residual add, and the quantizer of its output.
Attention is one kernel: both products and the softmax between them. Dequantizers and moves are read through.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

from quantizer.engines.inspection.onnx_graph import SizedGraph
from quantizer.qdq.operand import MOVES, PRODUCTS

_BARRIERS = frozenset(
    {
        "ArgMax",
        "AveragePool",
        "Concat",
        "Gather",
        "GlobalAveragePool",
        "GroupNormalization",
        "InstanceNormalization",
        "LayerNormalization",
        "MaxPool",
        "Pad",
        "RMSNormalization",
        "ReduceMax",
        "ReduceMean",
        "ReduceSum",
        "Resize",
        "TopK",
    }
)
"""Operators with a kernel of their own; what follows them element by element is in it, too."""

_READ_THROUGH = frozenset({"DequantizeLinear", *MOVES})

_BYTES = {"int4": 0.5, "fp4": 0.5, "int8": 1.0, "fp8": 1.0, "index": 4.0}
"""The bytes of a number; those of any float are 2, as engines store what is not quantized."""


@dataclass(kw_only=True)
class Kernel:
    """Nodes that are computed at once.

    Attributes:
        nodes: its nodes, in the file's order.
        read: the tensors that it reads from memory.
        written: the tensors that it writes there, each with the nodes of other kernels that read it; None
            among these: it is an output of the graph.
    """

    nodes: list[Any] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    written: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))

    @property
    def products(self) -> list[Any]:
        """Products of matrices and convolutions."""
        return [node for node in self.nodes if node.op_type in PRODUCTS]


class _Fusion:
    """Kernels of a graph while they are found."""

    def __init__(self, graph: SizedGraph) -> None:
        self.graph = graph
        self.kernels: list[Kernel] = []
        self._constants = set(graph.constants)
        self._alias: dict[str, str] = {}
        self._kernel_of: dict[str, int] = {}
        self._attends: set[int] = set()

    def add(self, node: Any) -> None:
        """Put a node into the kernel that it is fused into, or into one of its own."""
        sources = [self.root(name) for name in node.input if name]
        if node.op_type in _READ_THROUGH:
            self._alias.update(dict.fromkeys(node.output, sources[0]))
            return
        computed = [name for name in sources if name not in self._constants]
        if not computed:
            # Folded when the engine is built.
            self._constants.update(node.output)
            return
        made = [self._kernel_of[name] for name in computed if name in self._kernel_of]
        alone = not made or node.op_type in _BARRIERS
        if node.op_type in PRODUCTS:
            alone = not made or self._kernel_of.get(computed[0], -1) not in self._attends
        if alone:
            self.kernels.append(Kernel())
            index = len(self.kernels) - 1
        else:
            index = self._kernel_of[computed[0]] if node.op_type in PRODUCTS else max(made)
        if node.op_type == "Softmax" and self.kernels[index].products:
            self._attends.add(index)
        elif node.op_type in PRODUCTS:
            self._attends.discard(index)
        self.kernels[index].nodes.append(node)
        self._kernel_of.update(dict.fromkeys(node.output, index))
        # Of a table only the rows that are taken are read.
        for name in sources[1:] if node.op_type == "Gather" else sources:
            if self._kernel_of.get(name) != index:
                self._cross(name, index, node)

    def root(self, name: str) -> str:
        """Return the tensor that lies in memory for a name: what a dequantizer or a move reads."""
        return self._alias.get(name, name)

    def give(self, name: str) -> None:
        """Count an output of the graph as written."""
        if (maker := self._kernel_of.get(self.root(name))) is not None:
            self.kernels[maker].written[self.root(name)].append(None)

    def _cross(self, name: str, index: int, reader: Any) -> None:
        self.kernels[index].read.add(name)
        if (maker := self._kernel_of.get(name)) is not None:
            self.kernels[maker].written[name].append(reader)


def kernels(graph: SizedGraph) -> Iterator[Kernel]:
    """Yield the kernels of a graph, in the order in which they run."""
    fusion = _Fusion(graph)
    for node in graph.nodes:
        fusion.add(node)
    for name in graph.outputs:
        fusion.give(name)
    for kernel in fusion.kernels:
        # Shapes and positions are computed on the host.
        if any(graph.type_of(name) != "index" for node in kernel.nodes for name in node.output):
            yield kernel


def size(graph: SizedGraph, name: str) -> float:
    """Return the bytes of a tensor; 0 where its shape is not known."""
    return prod(graph.shapes[name]) * _BYTES.get(graph.type_of(name), 2.0) if name in graph.shapes else 0.0
