"""Layers of an OpenVINO model: the runtime model after a run, with types, shapes and times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from quantizer.engines.base import Array
from quantizer.engines.inspection import RUNS, WARMUP, undisturbed_time
from quantizer.utils.records import LOW_PRECISIONS, Layer, attention_work, convolution_work, matmul_work

_ROLES = {
    **dict.fromkeys(("FullyConnected", "MatMul", "Convolution", "Deconvolution"), "product"),
    **dict.fromkeys(("RNNSeq", "RNNCell", "GatherMatmul", "LLMMLP", "QKVProjection"), "product"),
    **dict.fromkeys(("ScaledDotProductAttention", "PagedAttention", "MHA"), "attention"),
    **dict.fromkeys(("Reshape", "Transpose", "StridedSlice", "Split", "Broadcast"), "move"),
    "Convert": "cast",
    "FakeQuantize": "quantizer",
    "MVN": "normalization",
    "Reorder": "reformat",
    "RMSNorm": "normalization",
    "Softmax": "softmax",
}
_NO_LAYERS = ("Const", "Input", "Output")
_PRECISIONS = {"f32": "fp32", "f16": "fp16", "bf16": "bf16", "i8": "int8", "u8": "int8", "i4": "int4", "u4": "int4"}
_UNIT = 1e6


def observed_layers(compiled: Any, inputs: Mapping[str, Array], runs: int = RUNS) -> list[Layer]:
    """Return the layers of a compiled model, with the times of ``undisturbed_time`` over its runs."""
    request = compiled.create_infer_request()
    times = defaultdict(list)
    for run in range(WARMUP + runs):
        request.infer(dict(enumerate(inputs.values())))
        if run >= WARMUP:
            for counter in request.get_profiling_info():
                times[counter.node_name].append(counter.real_time.total_seconds() * _UNIT)
    # Shapes are known only after a run.
    operations = [_Operation(node) for node in compiled.get_runtime_model().get_ordered_ops()]
    constant = _constant(operations)
    for operation in operations:
        operation.find_weights(constant)
    return list(_layers(operations, {name: undisturbed_time(seconds) for name, seconds in times.items()}))


class _Operation:
    """Operation of a runtime model.

    Attributes:
        name: name, taken from one of its ONNX nodes.
        type: OpenVINO's layer type.
        nodes: names of the operations that it contains.
        inputs: type and shape of each input.
        outputs: type and shape of each output.
        sources: names of the operations that write its inputs.
        order: position in the execution order.
        computes: type in which it computes; for several linear layers in one kernel the type of their weights.
        weights: shapes of the weights in a kernel of several linear layers.
    """

    def __init__(self, node: Any) -> None:
        info = node.get_rt_info()
        self.name: str = node.get_friendly_name()
        self.type: str = info["layerType"].astype(str)
        self.nodes = tuple(filter(None, info["originalLayersNames"].astype(str).split(",")))
        self.inputs = [_tensor(port) for port in node.inputs()]
        self.outputs = [_tensor(port) for port in node.outputs()]
        self.sources = [port.get_source_output().get_node().get_friendly_name() for port in node.inputs()]
        self.order = int(info["execOrder"].astype(str))
        self.computes = _PRECISIONS.get(info["runtimePrecision"].astype(str), "index")
        self.weights: list[tuple[int, ...]] = []

    def find_weights(self, constant: Collection[str]) -> None:
        """Set the weights of a kernel with several linear layers, which OpenVINO creates for small networks."""
        if self.type != "Subgraph" or not self.outputs:
            return
        # A loaded engine only has the name of the last operation, so shapes identify the kernel.
        constants = [entry for entry, source in zip(self.inputs, self.sources, strict=True) if source in constant]
        weights = [(_PRECISIONS.get(kind, "index"), sizes) for kind, sizes in constants if len(sizes) == 2]
        weights = [(kind, sizes) for kind, sizes in weights if min(sizes) > 1]
        in_low_precision = bool(weights) and all(kind in LOW_PRECISIONS for kind, _ in weights)
        if not in_low_precision and len(weights) < 2:
            return
        width = self.inputs[0][1][-1] if self.inputs[0][1] else None
        for _, sizes in weights:
            if width not in sizes:
                return
            width = sizes[0] if sizes[1] == width else sizes[1]
        if self.outputs[0][1][-1:] == (width,):
            self.weights = [sizes for _, sizes in weights]
            self.computes = "int8" if in_low_precision else self.computes

    @property
    def role(self) -> str:
        """Role of the operation, a value of ``Layer.role``."""
        if self.weights:
            return "product"
        if self.type == "Subgraph" and any(_operator(node) == "MatMul" for node in self.nodes):
            return "attention"
        if self.type == "Eltwise":
            return "addition" if any(_operator(node) == "Add" for node in self.nodes) else ""
        return _ROLES.get(self.type, "")

    def work(self) -> int | None:
        """Return the multiply-adds of the last run."""
        shapes = [shape for _, shape in self.inputs]
        if self.weights:
            return prod(shapes[0][:-1]) * sum(map(prod, self.weights))
        if self.role == "attention":
            # Query, key, an optional mask and scale, and the value, which comes last in a Subgraph.
            value = shapes[-1 if self.type == "Subgraph" else 2] if len(shapes) > 2 else ()
            return attention_work(shapes[0], shapes[1], value, self.outputs[0][1]) if value else None
        if self.type in ("FullyConnected", "MatMul"):
            return matmul_work(shapes[0], self.outputs[0][1])
        if self.type == "Convolution":
            return convolution_work(shapes[1], self.outputs[0][1][1], self.outputs[0][1])
        return convolution_work(shapes[1], shapes[0][1], shapes[0]) if self.type == "Deconvolution" else None


def _tensor(port: Any) -> tuple[str, tuple[int, ...]]:
    shape = port.get_partial_shape()
    sizes = () if shape.is_dynamic else tuple(int(size.get_length()) for size in shape)
    return port.get_element_type().get_type_name(), sizes


def _operator(node: str) -> str:
    """Return the operator of a name that ends like ``module/MatMul`` or ``module/MatMul_3``."""
    return node.rpartition("/")[2].partition("_")[0]


def _layers(operations: Sequence[_Operation], times: Mapping[str, float]) -> Iterator[Layer]:
    by_name = {operation.name: operation for operation in operations}
    readers = defaultdict(list)
    for operation in operations:
        for source in operation.sources:
            readers[source].append(operation.name)
    constant = _constant(operations)
    quantized = _quantized(operations)
    for operation in sorted(by_name.values(), key=lambda operation: operation.order):
        if operation.type in _NO_LAYERS or operation.name in constant:
            continue
        precision, writes = operation.computes, _PRECISIONS.get(operation.outputs[0][0], "index")
        if operation.name not in quantized:
            # Bytes without a quantizer are booleans.
            precision, writes = ("index" if kind == "int8" else kind for kind in (precision, writes))
        yield Layer(
            name=operation.name,
            type=operation.type,
            role=operation.role,
            precision=precision,
            writes=writes,
            nodes=operation.nodes,
            readers=tuple(dict.fromkeys(readers[operation.name])),
            multiply_adds=operation.work(),
            time_us=times.get(operation.name),
        )


def _constant(operations: Sequence[_Operation]) -> set[str]:
    """Return the names of operations on constants, which run once during compilation."""
    names: set[str] = set()
    for operation in operations:
        if operation.type == "Const" or (operation.sources and names.issuperset(operation.sources)):
            names.add(operation.name)
    return names


def _quantized(operations: Sequence[_Operation]) -> set[str]:
    """Return the names of operations whose bytes are quantized values, not booleans."""
    names: set[str] = set()
    quantized_sources: set[str] = set()
    for operation in operations:
        writes = operation.outputs[0][0] if operation.outputs else ""
        computes_integers = operation.role in ("quantizer", "product", "attention")
        stored = operation.type == "Const" and writes in ("i8", "i4", "u4")
        if (
            computes_integers
            or stored
            or (operation.computes == "int8" and quantized_sources.intersection(operation.sources))
        ):
            names.add(operation.name)
            if _PRECISIONS.get(writes) in LOW_PRECISIONS:
                quantized_sources.add(operation.name)
    return names
