"""Execution of a TensorRT engine on a GPU, with PyTorch for the GPU's memory. Untested without one.

Engines without weights are smaller files, which take them from the ONNX file when they are loaded. The engine file
holds the name and SHA-256 of that ONNX file: TensorRT checks only names and sizes of weights, and with other values an
engine's results mean nothing. TensorRT-RTX 1.7 strips no weights without a GPU.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantizer.common.inspection import Layer, convolution_work, matmul_work
from quantizer.engines.base import Array, checked_inputs, in_kind, shown
from quantizer.engines.inspection import RUNS, WARMUP
from quantizer.errors import EngineError
from quantizer.qdq.onnx_file import TensorSpec, checked_onnx

# Longest first: "FP8" is no part of another word, "Float" is.
_PRECISIONS = (
    ("bfloat16", "bf16"),
    ("bf16", "bf16"),
    ("e4m3", "fp8"),
    ("fp8", "fp8"),
    ("float8", "fp8"),
    ("fp4", "fp4"),
    ("int4", "int4"),
    ("int8", "int8"),
    ("half", "fp16"),
    ("fp16", "fp16"),
    ("float16", "fp16"),
    ("fp32", "fp32"),
    ("tf32", "fp32"),
    ("float", "fp32"),
    ("int32", "index"),
    ("int64", "index"),
    ("bool", "index"),
)
_PRODUCTS = (
    "gemm",
    "matrixmultiply",
    "matrix_multiply",
    "convolution",
    "correlation",
    "fullyconnected",
    "deconvolution",
)
_ROLES = (
    ("reformat", "reformat"),
    ("cast", "cast"),
    ("quantize", "quantizer"),
    ("softmax", "softmax"),
    ("shuffle", "move"),
    ("normalization", "normalization"),
)
_ONNX_LAYER = re.compile(r"\[ONNX Layer: ([^\]]*)\]")


def layers_from_json(text: str, times_us: Mapping[str, float] | None = None) -> list[Layer]:
    """Return the layers in ``EngineInspector.get_engine_information``'s result for ``LayerInformationFormat.JSON``."""
    try:
        entries = json.loads(text)["Layers"]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"the engine's inspector gave no list of layers: {error!r}") from error
    if not all(isinstance(entry, Mapping) for entry in entries):
        raise EngineError(
            "the engine tells the names of its layers only: build it with detailed profiling verbosity, "
            "as this package does"
        )
    return list(_layers(entries, times_us or {}))


def _layers(entries: Sequence[Mapping[str, Any]], times_us: Mapping[str, float]) -> Iterator[Layer]:
    readers = defaultdict(list)
    for entry in entries:
        for tensor in entry.get("Inputs", []):
            readers[tensor.get("Name")].append(entry["Name"])
    for entry in entries:
        inputs = [_tensor(tensor) for tensor in entry.get("Inputs", [])]
        outputs = [_tensor(tensor) for tensor in entry.get("Outputs", [])]
        role = _role(entry)
        yield Layer(
            name=entry["Name"],
            type=str(entry.get("LayerType", "unknown")),
            role=role,
            precision=inputs[0][0] if inputs else "unknown",
            writes=outputs[0][0] if outputs else "unknown",
            nodes=tuple(dict.fromkeys(_ONNX_LAYER.findall(str(entry.get("Metadata", ""))))),
            readers=tuple(
                dict.fromkeys(name for tensor in entry.get("Outputs", []) for name in readers[tensor.get("Name")])
            ),
            multiply_adds=_work(entry, inputs, outputs) if role == "product" else None,
            time_us=times_us.get(entry["Name"]),
        )


def _role(entry: Mapping[str, Any]) -> str:
    kind, name = str(entry.get("LayerType", "")).lower(), str(entry["Name"]).lower()
    tactic = str(entry.get("TacticName", "")).lower()
    if "mha" in name or "mha" in tactic or kind == "attention":
        return "attention"
    if any(word in kind for word in _PRODUCTS) or "gemm" in tactic:
        return "product"
    if kind == "elementwise" and "add" in name:
        return "addition"
    return next((role for word, role in _ROLES if word in kind), "")


def _tensor(entry: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Return precision and shape; some releases write type and layout in one field, some in two."""
    words = f"{entry.get('Format/Datatype', '')} {entry.get('Datatype', '')} {entry.get('Format', '')}".lower()
    precision = next((precision for word, precision in _PRECISIONS if word in words), "unknown")
    return precision, tuple(int(size) for size in entry.get("Dimensions", []))


def _work(
    entry: Mapping[str, Any],
    inputs: Sequence[tuple[str, tuple[int, ...]]],
    outputs: Sequence[tuple[str, tuple[int, ...]]],
) -> int | None:
    """Return the multiply-adds at the shapes of the execution context; None without one, where sizes are -1."""
    if not inputs or not outputs or min((*inputs[0][1], *outputs[0][1]), default=-1) < 0:
        return None
    count = entry.get("Weights", {}).get("Count") if isinstance(entry.get("Weights"), Mapping) else None
    if count and len(outputs[0][1]) > 2 and "conv" in str(entry.get("LayerType", "")).lower():
        return convolution_work((int(count),), outputs[0][1][1], outputs[0][1])
    return matmul_work(inputs[0][1], outputs[0][1])


def strip_weights(trt: Any, config: Any) -> None:
    """Set a builder's configuration to leave the weights out."""
    config.set_flag(trt.BuilderFlag.STRIP_PLAN)
    # Refitting restores the same weights, so kernels may be chosen for their values, as without stripping.
    config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)


def stripping_hint(reason: str) -> str:
    """Return a remedy if ``reason`` is a builder's refusal to strip weights; empty for any other reason."""
    if "CUDA_SUCCESS" not in reason:
        return ""
    return "; without a GPU it strips no weights: leave out strip_weights, or build where there is an NVIDIA GPU"


def weights_note(onnx_path: Path, engine_path: Path) -> dict[str, Any]:
    """Return an engine file's note on the ONNX file that holds its weights."""
    if onnx_path.resolve().parent != engine_path.resolve().parent:
        raise EngineError(
            f"strip_weights: {engine_path} would look for {onnx_path.name} in its own folder, and it is in "
            f"{onnx_path.parent}; build it beside its ONNX file"
        )
    return {"weights": {"name": onnx_path.name, "sha256": _sha256(onnx_path)}}


def refit(trt: Any, engine: Any, logger: Any, path: Path, note: Mapping[str, Any]) -> None:
    """Give an engine its weights."""
    told = note.get("weights")
    name = told.get("name") if isinstance(told, dict) else None
    if not isinstance(told, dict) or not isinstance(name, str) or not name or Path(name).name != name:
        raise EngineError(
            f"{path} takes its weights from an ONNX file and does not say from which: it is cut short, or was not "
            "built by this package; build it again"
        )
    onnx_path = path.parent / name
    if not onnx_path.is_file():
        raise EngineError(
            f"{path} was built without its weights, and {onnx_path} is not there: keep that file beside it, or build "
            "the engine without strip_weights"
        )
    if _sha256(checked_onnx(onnx_path)) != told.get("sha256"):
        raise EngineError(
            f"{path} was built without its weights, and {onnx_path} is not the file that it was built from (its "
            "SHA-256 differs): put that back, or build the engine again"
        )
    refitter = trt.Refitter(engine, logger)
    parser = trt.OnnxParserRefitter(refitter, logger)
    if not parser.refit_from_file(str(onnx_path)):
        reasons = " ".join(parser.get_error(index).desc() for index in range(parser.num_errors))
        raise EngineError(f"{path} did not take its weights from {onnx_path}: {reasons or 'no reason given'}")
    if not refitter.refit_cuda_engine():
        missing = ", ".join(refitter.get_missing_weights())
        raise EngineError(f"{path} did not take all weights from {onnx_path}; missing: {missing or 'not told'}")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# Logged after every other message if there is no driver, also when all goes well.
_NOISE = "catchCudaError"


class TrtLog:
    """Log of a library of the TensorRT family, errors and warnings apart; nothing is printed."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def reason(self) -> str:
        """Return the errors as one line."""
        told = [message for message in self.errors if _NOISE not in message] or self.errors
        return " ".join(dict.fromkeys(told)) or "no reason given"


def trt_log(trt: Any, log: TrtLog) -> Any:
    """Return ``log`` as an ``ILogger`` of the module ``trt``, whose class only exists after its import."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                log.errors.append(message)
            elif severity == trt.ILogger.WARNING:
                log.warnings.append(message)

    return Logger()


def trt_profiler(trt: Any, times_ms: dict[str, list[float]]) -> Any:
    """Return an ``IProfiler`` of the module ``trt`` that adds the time of each layer to ``times_ms``."""

    class Profiler(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            times_ms[layer_name].append(ms)

    return Profiler()


class TensorRTEngine:
    """Deserialized engine with one execution context on the current GPU. Untested without a GPU.

    Calls from several threads take turns: a further context would need the memory of all activations again, and the GPU
    runs one call after the other anyway.
    """

    device = "cuda"
    __repr__ = shown

    def __init__(self, name: str, trt: Any, path: Path, content: bytes, note: Mapping[str, Any]) -> None:
        import torch

        self.name = name
        self._trt = trt
        if not torch.cuda.is_available():
            raise EngineError(
                f"cannot run {path}: no NVIDIA GPU with a driver here, or a PyTorch without CUDA. "
                "The engine was built ahead of time: run it on a machine with an NVIDIA GPU"
            )
        log = TrtLog()
        self._logger = trt_log(trt, log)
        self._runtime = trt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            raise EngineError(
                f"{name} cannot load {path}: {log.reason()}; "
                "an engine belongs to the release and the GPU generation that it was built for"
            )
        if note or self._engine.refittable:
            refit(trt, self._engine, self._logger, path, note)
        self._context = self._engine.create_execution_context()
        self._turn = threading.Lock()
        # Each thread has a current GPU of its own, which need not be the engine's.
        self._gpu = torch.cuda.current_device()
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        is_input = {tensor: self._engine.get_tensor_mode(tensor) == trt.TensorIOMode.INPUT for tensor in names}
        self._dtypes = {tensor: np.dtype(trt.nptype(self._engine.get_tensor_dtype(tensor))) for tensor in names}
        self.inputs = tuple(self._spec(tensor) for tensor in names if is_input[tensor])
        self.input_names = tuple(spec.name for spec in self.inputs)
        self.output_names = tuple(tensor for tensor in names if not is_input[tensor])

    def _spec(self, name: str) -> TensorSpec:
        shape = tuple(None if size == -1 else int(size) for size in self._engine.get_tensor_shape(name))
        return TensorSpec(name, self._dtypes[name], shape)

    def __call__(self, inputs: Any) -> dict[str, Any]:
        """Copy the inputs to the GPU, run once, and copy the outputs back; they belong to the caller."""
        import torch

        arrays = checked_inputs(self.name, self.inputs, inputs)
        with self._turn, torch.cuda.device(self._gpu):
            results = self._run(arrays)
        return in_kind(inputs, self.output_names, results)

    def _run(self, arrays: Mapping[str, Array]) -> list[Array]:
        import torch

        # The dictionary keeps the tensors alive until the run is over: the context holds bare addresses.
        tensors = {name: torch.from_numpy(array).cuda() for name, array in arrays.items()}
        for name, tensor in tensors.items():
            if not self._context.set_input_shape(name, tuple(tensor.shape)):
                raise EngineError(
                    f"{self.name}: input {name!r} of shape {list(tensor.shape)} is outside the engine's ranges"
                )
        for name in self.output_names:
            shape = tuple(self._context.get_tensor_shape(name))
            tensors[name] = torch.from_numpy(np.empty(shape, self._dtypes[name])).cuda()
        for name, tensor in tensors.items():
            self._context.set_tensor_address(name, tensor.data_ptr())
        stream = torch.cuda.current_stream()
        if not self._context.execute_async_v3(stream.cuda_stream):
            raise EngineError(f"{self.name} could not run the engine")
        stream.synchronize()
        return [tensors[name].cpu().numpy() for name in self.output_names]

    def observed_layers(self, inputs: Mapping[str, Array], runs: int = RUNS) -> list[Layer]:
        """Return the layers that the inspector reports at the shapes of ``inputs``, with the times of a profiler."""
        for _ in range(WARMUP):
            self(inputs)
        times: dict[str, list[float]] = defaultdict(list)
        profiler = trt_profiler(self._trt, times)
        self._context.profiler = profiler
        for _ in range(runs):
            self(inputs)
        inspector = self._engine.create_engine_inspector()
        inspector.execution_context = self._context
        told = inspector.get_engine_information(self._trt.LayerInformationFormat.JSON)
        return layers_from_json(told, {name: 1000 * statistics.median(taken) for name, taken in times.items()})
