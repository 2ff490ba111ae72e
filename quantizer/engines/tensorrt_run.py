"""Running a TensorRT engine on a GPU, with PyTorch for the GPU's memory. Untested without one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantizer.engines.base import Array
from quantizer.engines.base import TensorSpec
from quantizer.engines.base import checked_inputs
from quantizer.errors import EngineError

__all__ = ["TensorRTEngine", "TrtLog", "trt_log"]

# Said after every other message where there is no driver, also when all goes well.
_NOISE = "catchCudaError"


class TrtLog:
    """What a library of the TensorRT family logged, errors and warnings apart; nothing is printed."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def reason(self) -> str:
        """The errors as one line."""
        told = [message for message in self.errors if _NOISE not in message] or self.errors
        return " ".join(dict.fromkeys(told)) or "no reason given"


def trt_log(trt: Any, log: TrtLog) -> Any:
    """``log`` as the ``ILogger`` of the module ``trt``, whose class only exists once that is imported."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                log.errors.append(message)
            elif severity == trt.ILogger.WARNING:
                log.warnings.append(message)

    return Logger()


class TensorRTEngine:
    """A deserialized engine with one execution context on the current GPU. Untested without a GPU.

    Args:
        name: the backend's name.
        trt: its module.
        path: the engine file.

    Raises:
        EngineError: there is no GPU with a driver, or the engine does not fit it.
    """

    device = "cuda"

    def __init__(self, name: str, trt: Any, path: Path) -> None:
        import torch

        self.name = name
        if not torch.cuda.is_available():
            raise EngineError(
                f"cannot run {path}: no NVIDIA GPU with a driver here, or a PyTorch without CUDA. "
                "The engine was built ahead of time: run it on a machine with an NVIDIA GPU"
            )
        log = TrtLog()
        self._logger = trt_log(trt, log)
        self._runtime = trt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise EngineError(
                f"{name} cannot load {path}: {log.reason()}; "
                "an engine belongs to the release and the GPU generation that it was built for"
            )
        self._context = self._engine.create_execution_context()
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        is_input = {tensor: self._engine.get_tensor_mode(tensor) == trt.TensorIOMode.INPUT for tensor in names}
        self._dtypes = {tensor: np.dtype(trt.nptype(self._engine.get_tensor_dtype(tensor))) for tensor in names}
        self.inputs = tuple(self._spec(tensor) for tensor in names if is_input[tensor])
        self.input_names = tuple(spec.name for spec in self.inputs)
        self.output_names = tuple(tensor for tensor in names if not is_input[tensor])

    def _spec(self, name: str) -> TensorSpec:
        shape = tuple(None if size == -1 else int(size) for size in self._engine.get_tensor_shape(name))
        return TensorSpec(name, self._dtypes[name], shape)

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Copy the inputs to the GPU, run once, and copy the outputs back."""
        import torch

        arrays = checked_inputs(self.name, self.inputs, inputs)
        # Kept in a dictionary until the run is over: the context holds bare addresses.
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
        return {name: tensors[name].cpu().numpy() for name in self.output_names}
