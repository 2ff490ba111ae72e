"""The fusions of ONNX Runtime that make a model slower, and how a server does without them.

Release 1.31, MiniLM at 8 x 128, one thread: a SkipLayerNormalization takes 2.9 ms where two Adds and a
LayerNormalization take 1.2; without BiasGelu the model takes 4% less time. A product of matrices becomes a Gemm with
its bias, which is computed with floats.

Layers of an ONNX Runtime session: its optimized graph, with types, shapes and times from its own profile.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from quantizer.engines.inspection.from_layers import RUNS, WARMUP
from quantizer.engines.inspection.inspection import Layer, convolution_work, matmul_work
from quantizer.engines.inspection.onnx_graph import read_graph
from quantizer.errors import EngineError
from quantizer.files import scratch
from quantizer.qdq.operand import MOVES

SLOW_FUSIONS = ("SkipLayerNormFusion", "BiasGeluFusion", "MatMulAddFusion")

_CONVOLUTIONS = ("Conv", "ConvInteger", "FusedConv", "QLinearConv")


def needs_basic_level(path: Path) -> bool:
    """Return whether an engine file runs as it does here at the level of basic optimizations.

    A server has no list of fusions to leave out, but may have the level. At the basic one those of ``SLOW_FUSIONS`` for
    transformers are left out, and so is the layout of convolutions, which is worth more where there are many of them:
    a ResNet-18 in float takes a quarter longer without, MiniLM in INT8 a fifth longer with all optimizations.
    """
    import onnx

    count = Counter(node.op_type for node in onnx.load(str(path), load_external_data=False).graph.node)
    return sum(count[name] for name in _CONVOLUTIONS) <= count["LayerNormalization"]


_CONVOLUTION_NODES = frozenset({"Conv", "FusedConv", "QLinearConv", "ConvInteger", "NhwcFusedConv", "ConvTranspose"})
_MATMULS = frozenset(
    {
        "DynamicQuantizeMatMul",
        "FusedGemm",
        "FusedMatMul",
        "Gemm",
        "MatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "MatMulNBits",
        "QGemm",
        "QLinearMatMul",
    }
)
_OTHER_PRODUCTS = frozenset({"DynamicQuantizeLSTM", "Einsum", "GRU", "LSTM", "RNN"})
_ATTENTION = frozenset({"Attention", "GroupQueryAttention", "MultiHeadAttention", "PackedAttention", "QAttention"})
_ROLES = {
    **dict.fromkeys(_CONVOLUTION_NODES | _MATMULS | _OTHER_PRODUCTS, "product"),
    **dict.fromkeys(_ATTENTION, "attention"),
    **dict.fromkeys(("Softmax", "QLinearSoftmax"), "softmax"),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"), "quantizer"),
    **dict.fromkeys(("ReorderInput", "ReorderOutput"), "reformat"),
    **dict.fromkeys(MOVES, "move"),
    # A residual add that was fused with its successor still counts as one.
    **dict.fromkeys(("Add", "QLinearAdd", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), "addition"),
    **dict.fromkeys(("LayerNormalization", "SimplifiedLayerNormalization"), "normalization"),
    "Cast": "cast",
}
# What its optimizer adds to the name of a node that it fuses with another or gives another layout.
_DECORATED = re.compile(r"^fused |_nchwc$|_token_\d+$")
# These quantize their first input themselves, or hold no operand of it in floats.
_INTEGER = ("DynamicQuantize", "QLinear", "QGemm", "QAttention")
_PRECISIONS = {
    "float": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "double": "fp64",
    "int8": "int8",
    "uint8": "int8",
    "float8e4m3fn": "fp8",
}


def observed_layers(
    session_from: Callable[[Any], Any],
    settings: Any,
    prepared: Callable[[Any], Callable[[], object]],
    runs: int = RUNS,
) -> list[Layer]:
    """Return the nodes of the optimized graph, with the facts from profiled runs."""
    with scratch() as folder:
        optimized = folder / "optimized.onnx"
        settings.optimized_model_filepath = str(optimized)
        # In a file beside it: the graph stays below protobuf's limit of 2 GB and is quick to read.
        settings.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights.bin")
        settings.enable_profiling = True
        settings.profile_file_prefix = str(folder / "profile")
        session = session_from(settings)
        run = prepared(session)
        for _ in range(WARMUP + runs):
            run()
        # Names of a file need not be Unicode, and the library writes them as they are.
        told = Path(session.end_profiling()).read_text(encoding="utf-8", errors="replace")
        try:
            events = json.loads(told)
        except ValueError as error:
            raise EngineError(f"the profile of ONNX Runtime cannot be read: {error}; build the engine again") from error
        return list(_layers(read_graph(optimized), _by_node(events), runs))


def _by_node(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group the events by node; a node has one for each run."""
    found = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            found[event["name"].removesuffix("_kernel_time")].append(event)
    return found


def _layers(model: Any, profile: Mapping[str, list[dict[str, Any]]], runs: int) -> Iterator[Layer]:
    readers = defaultdict(list)
    for node in model.graph.node:
        for name in node.input:
            readers[name].append(node.name)
    weights = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    for node in model.graph.node:
        events = profile.get(node.name, [])
        types = events[-1]["args"] if events else {}
        inputs, outputs = _tensors(types, "input_type_shape"), _tensors(types, "output_type_shape")
        times = [event["dur"] for event in events[-runs:]]
        yield Layer(
            name=node.name,
            type=node.op_type,
            role=_ROLES.get(node.op_type, ""),
            precision=_precision(node.op_type, inputs, outputs),
            writes=outputs[0][0] if outputs else "unknown",
            nodes=(_DECORATED.sub("", node.name),),
            readers=tuple(dict.fromkeys(reader for name in node.output for reader in readers[name])),
            multiply_adds=_work(node, inputs, outputs, weights),
            time_us=float(statistics.median(times)) if times else None,
        )


def _tensors(args: Mapping[str, Any], key: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return precision and shape of each tensor in the profile's notation: ``[{"float": [8, 128]}]``."""
    return [
        (_PRECISIONS.get(kind, "index"), tuple(shape)) for entry in args.get(key, []) for kind, shape in entry.items()
    ]


def _precision(
    operator: str, inputs: list[tuple[str, tuple[int, ...]]], outputs: list[tuple[str, tuple[int, ...]]]
) -> str:
    if operator.startswith(_INTEGER) or "Integer" in operator:
        return "int8"
    told = [precision for precision, _ in (*inputs[:1], *outputs[:1])]
    return next((precision for precision in told if precision != "index"), told[0] if told else "unknown")


def _work(
    node: Any,
    inputs: list[tuple[str, tuple[int, ...]]],
    outputs: list[tuple[str, tuple[int, ...]]],
    weights: Mapping[str, tuple[int, ...]],
) -> int | None:
    if not inputs or not outputs:
        return None
    if node.op_type in _MATMULS:
        return matmul_work(inputs[0][1], outputs[0][1])
    if node.op_type not in _CONVOLUTION_NODES:
        return None
    weight = next((weights[name] for name in node.input if len(weights.get(name, ())) > 2), None)
    if weight is None:
        return None
    across = inputs[0][1] if node.op_type == "ConvTranspose" else outputs[0][1]
    return convolution_work(weight, weight[0], across)
