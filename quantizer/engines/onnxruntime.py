"""Engines of ONNX Runtime on the CPU.

An engine file is an ONNX file with the optimizations that hold on every machine; ONNX Runtime adds others at load time.
Fusions that slow models down are disabled. Biases are fused into ``MatMulIntegerToFloat`` and
``DynamicQuantizeMatMul``, which ONNX Runtime only does in the operator format; separate Adds slow MiniLM down by 12% at
8 x 128.

Layers come from the session's optimized graph, with types, shapes and times from its profile.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from quantizer.engines.backends import backends
from quantizer.engines.base import USUAL_SIZES, BuildOptions, InputCheck, InputSizes, in_kind, shown
from quantizer.engines.engine_file import check_signature, sign_onnx, whole_file
from quantizer.engines.for_this_cpu import saturation_warnings
from quantizer.engines.inspection import RUNS, WARMUP, inspection_from_layers, run_note, undisturbed_time
from quantizer.engines.measure import working_inputs
from quantizer.engines.onnx_graph import explain_error
from quantizer.errors import EngineError
from quantizer.export.qdq.onnx_file import TensorSpec, checked_onnx, read_graph
from quantizer.export.qdq.operand import MOVES
from quantizer.utils.cpu import cpu_instructions
from quantizer.utils.files import scratch
from quantizer.utils.lazy import import_library
from quantizer.utils.records import Inspection, Layer, convolution_work, matmul_work

SLOW_FUSIONS = ("SkipLayerNormFusion", "BiasGeluFusion", "MatMulAddFusion")

_CONVOLUTIONS = ("Conv", "ConvInteger", "FusedConv", "QLinearConv")


def needs_basic_level(path: Path) -> bool:
    """Return whether an engine file runs best with basic optimizations on a server.

    A server cannot disable single fusions. The basic level leaves out ``SLOW_FUSIONS`` and the layout of convolutions.
    Without that layout, ResNet-18 in float is a quarter slower; with all optimizations, MiniLM in INT8 is a fifth
    slower.
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
    # A residual Add counts even if it is fused with its successor.
    **dict.fromkeys(("Add", "QLinearAdd", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), "addition"),
    **dict.fromkeys(("LayerNormalization", "SimplifiedLayerNormalization"), "normalization"),
    "Cast": "cast",
}
# Decorations of the optimizer for names of fused nodes and nodes with another layout.
_DECORATED = re.compile(r"^fused |_nchwc$|_token_\d+$")
# Operators that quantize their first input, or have no float operands.
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
    """Return the nodes of the optimized graph, with types, shapes and times of profiled runs."""
    with scratch() as folder:
        optimized = folder / "optimized.onnx"
        settings.optimized_model_filepath = str(optimized)
        # External weights keep the graph below protobuf's limit of 2 GB, and fast to read.
        settings.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights.bin")
        settings.enable_profiling = True
        settings.profile_file_prefix = str(folder / "profile")
        session = session_from(settings)
        run = prepared(session)
        for _ in range(WARMUP + runs):
            run()
        # Names in a file may not be valid UTF-8, and the library copies them.
        profile_text = Path(session.end_profiling()).read_text(encoding="utf-8", errors="replace")
        try:
            events = json.loads(profile_text)
        except ValueError as error:
            raise EngineError(f"the profile of ONNX Runtime cannot be read: {error}; build the engine again") from error
        return list(_layers(read_graph(optimized), _by_node(events), runs))


def _by_node(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the profiled events by node, one per run."""
    by_node = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            by_node[event["name"].removesuffix("_kernel_time")].append(event)
    return by_node


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
            time_us=float(undisturbed_time(times)) if times else None,
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
    candidates = [precision for precision, _ in (*inputs[:1], *outputs[:1])]
    return next(
        (precision for precision in candidates if precision != "index"), candidates[0] if candidates else "unknown"
    )


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


_BIAS = {"MatMulIntegerToFloat": 6, "DynamicQuantizeMatMul": 4}
"""Index of the bias input, by operator."""
_WEIGHT = "KN"
"""Axes of a weight with a bias [N]."""


def fuse_biases(path: Path) -> int:
    """Fuse biases into the matrix multiplications of an ONNX file, in place, and return their number.

    A bias is a constant with one axis, added by the only reader of the result.
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
        index = _BIAS[product.op_type]
        inputs = [*product.input[:index], *[""] * (index - len(product.input)), bias]
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
    """Return the matrix multiplication and the bias that a node adds; None for any other node."""
    if node.op_type != "Add":
        return None, ""
    for value, other in (node.input, reversed(node.input)):
        product = products.get(value)
        # Omitted inputs may be present without a name.
        if product is None or any(product.input[_BIAS[product.op_type] :]):
            continue
        # The shape of a MatMul of two activations is unknown here; stacked weights have separate columns.
        weight = shapes.get(product.input[1], ())
        if len(weight) == len(_WEIGHT) and shapes.get(other) == weight[-1:]:
            return product, other
    return None, ""


_DTYPES = {
    "tensor(bool)": "bool",
    "tensor(double)": "float64",
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(int8)": "int8",
    "tensor(uint8)": "uint8",
}
_ONLY_ERRORS = 3
# First bytes of an external data entry of a tensor in protobuf's encoding.
_EXTERNAL_WEIGHTS = b"\n\x08location\x12"


class ONNXRuntimeEngine:
    """ONNX Runtime session on the CPU."""

    name = "onnxruntime"
    device = "cpu"
    __repr__ = shown

    def __init__(self, session: Any) -> None:
        self.inputs = tuple(_spec(node) for node in session.get_inputs())
        self.input_names = tuple(spec.name for spec in self.inputs)
        self.output_names = tuple(node.name for node in session.get_outputs())
        self._session = session
        self._checked = InputCheck(self.name, self.inputs)

    def __call__(self, inputs: Any) -> dict[str, Any]:
        """Run the session, and return outputs that belong to the caller."""
        arrays = self._checked(inputs)
        try:
            results = self._session.run(list(self.output_names), arrays)
        except Exception as error:
            # The library's exceptions have no common base class.
            raise EngineError(f"ONNX Runtime could not run the engine: {error}") from error
        return in_kind(inputs, self.output_names, results)


class ONNXRuntimeBackend:
    """Backend of ONNX Runtime for the CPU."""

    device = "cpu"

    def __init__(self, name: str = "onnxruntime") -> None:
        self.name = name

    def check(self, options: BuildOptions) -> None:
        """Raise for GPU options or a missing library."""
        options.check_for(self)
        import_library("onnxruntime", "onnxruntime")

    def build(self, onnx_path: Path, engine_path: Path, options: BuildOptions) -> Sequence[str]:
        """Optimize the ONNX file and write the result."""
        ort = import_library("onnxruntime", "onnxruntime")
        if options.progress:
            options.progress(0.0, "optimize")
        with whole_file(engine_path) as part:
            settings = _settings(ort, threads=1)
            settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
            settings.optimized_model_filepath = str(part)
            try:
                _session(ort, onnx_path, settings)
            except EngineError as error:
                # On a full disk, the library only reports that serialization failed.
                if part.exists() and shutil.disk_usage(part.parent).free < onnx_path.stat().st_size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
                raise
            if _EXTERNAL_WEIGHTS in part.read_bytes():
                raise EngineError(
                    f"{onnx_path} stores weights in another file, which an ONNX Runtime engine would still need: "
                    "save the model as one file, or load the ONNX file directly"
                )
            # Fusion only makes the engine faster, so the package onnx is optional.
            if find_spec("onnx") is not None:
                fuse_biases(part)
            sign_onnx(part, cpu_instructions())
        if options.progress:
            options.progress(1.0, "optimize")
        return saturation_warnings(self.name, onnx_path)

    def load(self, path: Path, *, threads: int = 1, verify: bool = True, trust: bool = False) -> ONNXRuntimeEngine:
        """Load an engine file or any other ONNX file; ``verify`` compares its checksum, if present."""
        checked_onnx(path)
        if verify:
            check_signature(path)
        ort = import_library("onnxruntime", "onnxruntime")
        return ONNXRuntimeEngine(_session(ort, path, _settings(ort, threads)))

    def inspect(
        self,
        path: Path,
        *,
        threads: int = 1,
        sizes: InputSizes = USUAL_SIZES,
        runs: int = RUNS,
        trust: bool = False,
    ) -> Inspection:
        """Run an engine file or any other ONNX file under the profiler."""
        checked_onnx(path)
        check_signature(path)
        ort = import_library("onnxruntime", "onnxruntime")

        shapes: list[tuple[int | None, ...]] = []

        def prepared(session: Any) -> Callable[[], object]:
            engine = ONNXRuntimeEngine(session)
            shapes[:] = [spec.shape for spec in engine.inputs]
            return partial(engine, working_inputs(engine, sizes))

        layers = observed_layers(partial(_session, ort, path), _settings(ort, threads), prepared, runs)
        note = run_note(sizes.words(shapes), threads, runs)
        return inspection_from_layers(self.name, layers, verified=True, note=note)


def _settings(ort: Any, threads: int) -> Any:
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1
    settings.log_severity_level = _ONLY_ERRORS
    return settings


def _session(ort: Any, path: Path, settings: Any) -> Any:
    try:
        return ort.InferenceSession(
            str(path), settings, providers=["CPUExecutionProvider"], disabled_optimizers=list(SLOW_FUSIONS)
        )
    except Exception as error:
        # The library's exceptions have no common base class.
        raise EngineError(f"ONNX Runtime refused {path}: {explain_error(path, str(error))}") from error


def _spec(node: Any) -> TensorSpec:
    if node.type not in _DTYPES:
        raise EngineError(f"input {node.name!r} has type {node.type}; expected one of {', '.join(_DTYPES)}")
    shape = tuple(size if isinstance(size, int) else None for size in node.shape)
    names = tuple(size if isinstance(size, str) else "" for size in node.shape)
    return TensorSpec(node.name, np.dtype(_DTYPES[node.type]), shape, names)


for _name in ("onnxruntime", "onnxruntime-avx2"):
    backends.add(_name)(ONNXRuntimeBackend(_name))
