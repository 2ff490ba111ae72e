"""The time of each layer that an engine would make of an ONNX file, by a roofline model of its GPU.

A kernel takes as long as its products or its memory traffic, whichever is more (S. Williams, A. Waterman, D. Patterson,
"Roofline", Communications of the ACM 52(4), 2009), and what a kernel takes that does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from quantizer.engines.dimensions import input_dimensions, shape_words
from quantizer.engines.estimate.gpu import Gpu
from quantizer.engines.estimate.kernels import Kernel, kernels, size
from quantizer.engines.inspection.from_layers import inspection_from_layers
from quantizer.engines.inspection.inspection import Inspection, Layer
from quantizer.engines.inspection.onnx_graph import SizedGraph, read_graph
from quantizer.qdq.operand import PRODUCTS


def estimated_inspection(
    path: Path, gpu: Gpu, *, batch: int = 8, sequence: int = 128, sizes: Mapping[str, int] = MappingProxyType({})
) -> Inspection:
    """Return the layers of an ONNX file with estimated times.

    Floats count as 16-bit ones, whatever their type in the file.

    Args:
        path: the file.
        gpu: where the engine would run.
        batch: size of the first dimension of an input, where it is dynamic.
        sequence: size of its other dynamic dimensions.
        sizes: sizes of dynamic dimensions by name, where they are known; they come before the two.

    Raises:
        EngineError: the file is missing, broken, or no ONNX file.
        MissingDependencyError: onnx is not installed.
    """
    graph = SizedGraph(read_graph(path), {"batch": batch, "sequence": sequence, **sizes})
    layers = [layer for kernel in kernels(graph) for layer in _layers(graph, kernel, gpu)]
    shape = shape_words(input_dimensions(path).values(), batch, sequence, sizes)
    note = f"estimated for a {gpu.name} at {shape}; no engine ran"
    return inspection_from_layers("onnx", layers, verified=False, note=note)


def _layers(graph: SizedGraph, kernel: Kernel, gpu: Gpu) -> Iterator[Layer]:
    """Yield the parts of a kernel: its products by their work, else itself; and what it writes for other products.

    What products alone read is written in their precision, and so its time is theirs, in a layer of its own.
    """
    math = {node.name: gpu.math_us(graph.work(node) or 0, graph.precision(node)) for node in kernel.products}
    memory = gpu.memory_us(sum(size(graph, name) for name in (*kernel.read, *kernel.written)))
    rest = gpu.kernel_us + max(sum(math.values()), memory)
    if memory > sum(math.values()):
        for name, readers in kernel.written.items():
            if all(reader is not None and reader.op_type in PRODUCTS for reader in readers):
                taken = gpu.memory_us(size(graph, name))
                rest -= taken
                # Named by the reader, as its place is.
                yield Layer(name=f"{readers[0].name} of {name}", type="write", time_us=taken)
    for node in kernel.products or kernel.nodes[:1]:
        share = math[node.name] / sum(math.values()) if sum(math.values()) else 1 / max(len(math), 1)
        yield Layer(
            name=node.name,
            type=node.op_type,
            role="product" if math else "",
            precision=graph.precision(node) if math else graph.type_of(node.output[0]),
            nodes=(node.name,),
            multiply_adds=graph.work(node) if math else None,
            time_us=share * rest,
        )
