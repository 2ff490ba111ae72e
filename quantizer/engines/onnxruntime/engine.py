"""Fusion of biases into products, in a file that ONNX Runtime has optimized.

Its ``MatMulIntegerToFloat`` and ``DynamicQuantizeMatMul`` take a bias, which ONNX Runtime fuses in the operator format
and not for Q/DQ. An Add reads and writes again all that the product has written: MiniLM at 8 x 128 takes 12% longer
with them.

ONNX Runtime on the CPU.

An engine file is an ONNX file that already has the optimizations that hold on every machine; ONNX Runtime adds those of
the present machine when it loads the file. Some of its fusions are left out, because they make a model slower, and one
is added (``biases.py``).
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from quantizer.engines.backends import backends
from quantizer.engines.base import BuildOptions, BuildResult, TensorSpec, checked_inputs, shown
from quantizer.engines.candidates import saturation_warnings
from quantizer.engines.cpu import cpu_instructions
from quantizer.engines.dimensions import shape_words
from quantizer.engines.engine_file import check_signature, checked_onnx, checked_output, sign_onnx, whole_file
from quantizer.engines.error_hints import explain_error
from quantizer.engines.in_kind import in_kind
from quantizer.engines.inspection.from_layers import RUNS, inspection_from_layers, run_note
from quantizer.engines.inspection.inspection import Inspection
from quantizer.engines.measure.benchmark import working_inputs
from quantizer.engines.onnxruntime.inspect import SLOW_FUSIONS, observed_layers
from quantizer.engines.optional_import import import_library
from quantizer.errors import EngineError

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
# First bytes of a tensor's entry that names another file: its key and the tag of its value in protobuf's encoding.
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

    def __call__(self, inputs: Any) -> dict[str, Any]:
        """Run it once; what it returns belongs to the caller."""
        arrays = checked_inputs(self.name, self.inputs, inputs)
        try:
            results = self._session.run(list(self.output_names), arrays)
        except Exception as error:
            # The library's exceptions have no common base of their own.
            raise EngineError(f"ONNX Runtime could not run the engine: {error}") from error
        return in_kind(inputs, self.output_names, results)


class ONNXRuntimeBackend:
    """Backend of ONNX Runtime for the CPU."""

    device = "cpu"

    def __init__(self, name: str = "onnxruntime") -> None:
        self.name = name

    def check(self, options: BuildOptions) -> None:
        """Raise for options that are for a GPU, or if the library is missing."""
        self._check_options(options)
        import_library("onnxruntime", "onnxruntime")

    def build(self, onnx_path: Path, engine_path: Path, options: BuildOptions) -> BuildResult:
        """Optimize the ONNX file and write the result."""
        self._check_options(options)
        started = time.perf_counter()
        checked_onnx(onnx_path)
        checked_output(engine_path, onnx_path)
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
                # With a full disk the library only reports that serialization failed.
                if part.exists() and shutil.disk_usage(part.parent).free < onnx_path.stat().st_size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
                raise
            if _EXTERNAL_WEIGHTS in part.read_bytes():
                raise EngineError(
                    f"{onnx_path} keeps weights in another file, and an ONNX Runtime engine would go on needing it: "
                    "save the model as one file, or load the ONNX file itself"
                )
            # It only makes the engine faster, so the engine is built without the package too.
            if find_spec("onnx") is not None:
                fuse_biases(part)
            sign_onnx(part, cpu_instructions())
        if options.progress:
            options.progress(1.0, "optimize")
        return BuildResult(
            engine_path,
            engine_path.stat().st_size,
            time.perf_counter() - started,
            saturation_warnings(self.name, onnx_path),
        )

    def load(self, path: Path, *, threads: int = 1, verify: bool = True, trust: bool = False) -> ONNXRuntimeEngine:
        """Load an engine file or any other ONNX file; ``verify`` compares it with its checksum, if it has one."""
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
        batch: int = 8,
        sequence: int = 128,
        sizes: Mapping[str, int] = MappingProxyType({}),
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
            return partial(engine, working_inputs(engine, batch, sequence, sizes))

        layers = observed_layers(partial(_session, ort, path), _settings(ort, threads), prepared, runs)
        note = run_note(shape_words(shapes, batch, sequence, sizes), threads, runs)
        return inspection_from_layers(self.name, layers, verified=True, note=note)

    def _check_options(self, options: BuildOptions) -> None:
        if options.compute_capability is not None:
            raise EngineError(
                f"backend {self.name} builds for the CPU: leave out compute_capability {options.compute_capability!r}"
            )
        options.check_for(self.name)


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
        # The library's exceptions have no common base of their own.
        raise EngineError(f"ONNX Runtime refused {path}: {explain_error(path, str(error))}") from error


def _spec(node: Any) -> TensorSpec:
    if node.type not in _DTYPES:
        raise EngineError(f"input {node.name!r} has type {node.type}; this engine takes {', '.join(_DTYPES)}")
    shape = tuple(size if isinstance(size, int) else None for size in node.shape)
    names = tuple(size if isinstance(size, str) else "" for size in node.shape)
    return TensorSpec(node.name, np.dtype(_DTYPES[node.type]), shape, names)


for _name in ("onnxruntime", "onnxruntime-avx2"):
    backends.add(_name)(ONNXRuntimeBackend(_name))
