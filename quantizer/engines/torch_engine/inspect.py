"""Layers of a lowered torch graph, with shapes from the graph and times from a run."""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from quantizer.engines.base import InputSizes
from quantizer.engines.inspection import WARMUP, inspection_from_layers, run_note, undisturbed_time
from quantizer.engines.measure import working_inputs
from quantizer.engines.torch_engine.compiled import CompiledGraph, computing_threads, kernel_calls, prepare_eager
from quantizer.engines.torch_engine.engine import loaded
from quantizer.engines.torch_engine.graph_file import GraphFile
from quantizer.engines.torch_engine.lowering import (
    CONVOLUTION,
    CONVOLUTION_PREPACK,
    LINEAR,
    LINEAR_ADD,
    LINEAR_PREPACK,
    aten,
    decomposed,
    is_call,
    node_values,
)
from quantizer.export.onnx_import.graph_builder import OperatorGraph
from quantizer.utils.records import Inspection, Layer, attention_work, convolution_work, matmul_work

_INTEGER = (LINEAR, LINEAR_ADD, CONVOLUTION)
_PACKS = (LINEAR_PREPACK, CONVOLUTION_PREPACK)
_ROLES: dict[Any, str] = {
    **dict.fromkeys((*_INTEGER, aten.matmul.default, aten.convolution.default, aten.einsum.default), "product"),
    aten.scaled_dot_product_attention.default: "attention",
    aten.softmax.int: "softmax",
    aten.add.Tensor: "addition",
    aten.to.dtype: "cast",
    **dict.fromkeys((aten.layer_norm.default, aten.rms_norm.default, aten.batch_norm.default), "normalization"),
    aten.contiguous.default: "move",
    **dict.fromkeys((aten.reshape.default, aten.permute.default, aten.transpose.int, aten.slice.Tensor), "move"),
    **dict.fromkeys((aten.unsqueeze.default, aten.squeeze.dims, aten.expand.default, aten.select.int), "move"),
    **dict.fromkeys((aten.cat.default, aten.flatten.using_ints, aten.split_with_sizes.default), "move"),
    **dict.fromkeys(
        (
            decomposed.quantize_per_tensor.default,
            decomposed.dequantize_per_tensor.default,
            decomposed.quantize_per_channel.default,
            decomposed.dequantize_per_channel.default,
        ),
        "quantizer",
    ),
}
_PRECISIONS = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.int8: "int8",
    torch.uint8: "int8",
    torch.float8_e4m3fn: "fp8",
}
_GPU_LINEAR, _GPU_ATTENTION = "quantizer.linear_8bit", "quantizer.padded_attention"
_GPU_ROLES = {
    _GPU_LINEAR: "product",
    _GPU_ATTENTION: "attention",
    "quantizer.norm_8bit": "normalization",
    "quantizer.embedding_norm_8bit": "normalization",
    "quantizer.quantize_8bit": "quantizer",
}
"""Roles of the operators of ``gpu_operators.py``, which engines of a CPU do not import."""


def inspect_graph(name: str, file: GraphFile, sizes: InputSizes, threads: int, runs: int) -> Inspection:
    """Return the inspection of a graph that runs on generated inputs."""
    inputs = working_inputs(loaded(file, threads), sizes)
    tensors = [torch.from_numpy(inputs[spec.name]) for spec in file.inputs]
    values = node_values(file.module, file.inputs, sizes)
    shape = sizes.words([spec.shape for spec in file.inputs])
    with torch.inference_mode(), computing_threads(threads):
        if file.compiled is None:
            layers = graph_layers(file.module, values, _times(file.module, tensors, runs))
            return inspection_from_layers(name, layers, verified=True, note=run_note(shape, threads, runs))
        CompiledGraph(file.compiled)(*tensors)
    expected = sum(is_call(node, *_INTEGER) for node in file.module.graph.nodes)
    called = kernel_calls(file.compiled, "qlinear_pointwise", "qconv_pointwise", "qconv2d_pointwise")
    note = (
        f"compiled, and run at {shape}: its library calls {called} of {expected} integer kernels; the operators "
        "between them are fused, so layers have no times"
    )
    return inspection_from_layers(name, graph_layers(file.module, values), verified=called == expected, note=note)


def graph_layers(
    module: OperatorGraph, values: dict[fx.Node, torch.Tensor], times: Mapping[str, float] = MappingProxyType({})
) -> list[Layer]:
    """Return the layers of a lowered graph, whose nodes have these values, with times in microseconds by node name."""
    # A norm on a GPU has several results.
    several = {node.args[0]: values[node] for node in reversed(module.graph.nodes) if _is_result(node)}
    values = {**values, **several}
    nodes = [node for node in module.graph.nodes if _is_layer(node, values) and not _is_result(node)]
    names = _names(nodes)
    return [
        Layer(
            name=names[node],
            type=str(node.target).removesuffix(".default"),
            role=_ROLES.get(node.target, _GPU_ROLES.get(_operator(node), "")),
            precision=_precision(node, values),
            writes=_word(values[node].dtype),
            nodes=tuple(part for part in node.meta.get("onnx", "").split(", ") if part),
            readers=tuple(dict.fromkeys(names[reader] for reader in _readers(node) if reader in names)),
            multiply_adds=_work(node, values),
            time_us=times.get(node.name),
        )
        for node in nodes
    ]


def _operator(node: Any) -> str:
    """Return the name of an operator without its overload; empty for other values."""
    return str(node.target).rpartition(".")[0] if isinstance(node, fx.Node) else ""


def _is_result(node: Any) -> bool:
    """Return whether a node is one of several results of an operator for a GPU."""
    return is_call(node, operator.getitem) and _operator(node.args[0]) in _GPU_ROLES


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        yield from _readers(user) if _is_result(user) else (user,)


def _is_layer(node: fx.Node, values: dict[fx.Node, torch.Tensor]) -> bool:
    """Return whether a node computes at run time, unlike constants and their prepacking."""
    return node.op == "call_function" and node in values and not is_call(node, *_PACKS)


def _names(nodes: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """Return a unique name for each node: the name of its ONNX node, or its own."""
    counts = Counter(node.meta.get("onnx") for node in nodes)
    return {
        node: str(node.meta["onnx"]) if node.meta.get("onnx") and counts[node.meta["onnx"]] == 1 else node.name
        for node in nodes
    }


def _word(dtype: torch.dtype) -> str:
    return _PRECISIONS.get(dtype, "index")


def _precision(node: fx.Node, values: dict[fx.Node, torch.Tensor]) -> str:
    if is_call(node, *_INTEGER):
        return "int8"
    if _operator(node) == _GPU_LINEAR:
        return _word(values[node.all_input_nodes[1]].dtype)
    dtypes = [values[source].dtype for source in node.all_input_nodes if source in values]
    return _word(next((dtype for dtype in dtypes if dtype.is_floating_point), values[node].dtype))


def _work(node: fx.Node, values: dict[fx.Node, torch.Tensor]) -> int | None:
    # Use argument positions, because an operation may read one tensor twice.
    shapes = [_shape(read, values) for read in node.args[:3] if isinstance(read, fx.Node) and read in values]
    output = values[node].shape
    if is_call(node, LINEAR, LINEAR_ADD) or _operator(node) == _GPU_LINEAR:
        return output.numel() * shapes[0][-1]
    if is_call(node, aten.matmul.default):
        return matmul_work(shapes[0], output)
    if is_call(node, CONVOLUTION):
        return convolution_work(_shape(node.args[3], values), output[1], output)
    if is_call(node, aten.convolution.default):
        transposed = bool(node.args[6])
        return convolution_work(
            shapes[1], shapes[0][1] if transposed else output[1], shapes[0] if transposed else output
        )
    if is_call(node, aten.scaled_dot_product_attention.default) or _operator(node) == _GPU_ATTENTION:
        query, key, value = shapes
        return attention_work(query, key, value, output)
    return None


def _shape(value: Any, values: dict[fx.Node, torch.Tensor]) -> torch.Size:
    return values[value].shape


class _Timer(fx.Interpreter):
    """Interpreter that times each node.

    Attributes:
        seconds: times of all runs, by node name.
    """

    def __init__(self, module: OperatorGraph) -> None:
        super().__init__(module)
        self.seconds: dict[str, list[float]] = {}

    def run_node(self, n: fx.Node) -> Any:
        started = time.perf_counter()
        result = super().run_node(n)
        self.seconds.setdefault(n.name, []).append(time.perf_counter() - started)
        return result


def _times(module: OperatorGraph, inputs: Sequence[torch.Tensor], runs: int) -> dict[str, float]:
    """Return the time of each node in microseconds; see ``undisturbed_time``."""
    timer = _Timer(prepare_eager(deepcopy(module)))
    for _ in range(WARMUP + runs):
        timer.run(*inputs)
    return {name: undisturbed_time(seconds[WARMUP:]) * 1e6 for name, seconds in timer.seconds.items()}
