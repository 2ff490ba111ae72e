"""Execution of a TensorRT engine on a GPU, with PyTorch for the GPU's memory. Untested without one."""

from __future__ import annotations

import statistics
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantizer.engines.base import Array, TensorSpec, checked_inputs, shown
from quantizer.engines.in_kind import in_kind
from quantizer.engines.inspection.from_layers import RUNS, WARMUP
from quantizer.engines.inspection.inspection import Layer
from quantizer.engines.tensorrt.inspect import layers_from_json
from quantizer.engines.tensorrt.refit import refit
from quantizer.errors import EngineError

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

    def __init__(self, name: str, trt: Any, path: Path, content: bytes, note: str) -> None:
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
