"""Engines of lowered torch graphs: build eager or compiled, load, and run on arrays."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from quantizer.engines.base import (
    Array,
    InputCheck,
    InputSizes,
    Progress,
    in_kind,
    shown,
)
from quantizer.engines.engine_file import read_engine
from quantizer.engines.measure import interleaved_latency, working_inputs
from quantizer.engines.torch_engine.compiled import (
    CompiledGraph,
    compile_graph,
    computing_threads,
    missing_compiler,
    prepare_eager,
)
from quantizer.engines.torch_engine.graph_file import GraphFile, program, unpack
from quantizer.engines.torch_engine.lowering import lower
from quantizer.errors import EngineError
from quantizer.export.onnx_import.importer import Imported, import_onnx
from quantizer.export.qdq.onnx_file import TensorSpec
from quantizer.utils.cpu import check_trust
from quantizer.utils.paths import existing_file

_ROUNDS = 7
_PREPARING = threading.Lock()
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of torch for invalid operators and arguments."""


class TorchEngine:
    """Lowered graph on the CPU."""

    name = "torch"
    device = "cpu"
    __repr__ = shown

    def __init__(
        self,
        run: Callable[..., Sequence[torch.Tensor]],
        inputs: Sequence[TensorSpec],
        outputs: Sequence[str],
        threads: int,
        constants: Sequence[torch.Tensor] = (),
    ) -> None:
        self.inputs = tuple(inputs)
        self.input_names = tuple(spec.name for spec in inputs)
        self.output_names = tuple(outputs)
        self._run = run
        self._threads = threads
        self._checked = InputCheck(self.name, self.inputs)
        self._constants = {tensor.untyped_storage().data_ptr() for tensor in constants}

    def __call__(self, inputs: Any) -> dict[str, Any]:
        """Run the graph, and return outputs that belong to the caller."""
        arrays = self._checked(inputs)
        tensors = [torch.from_numpy(array if array.flags.writeable else array.copy()) for array in arrays.values()]
        try:
            with torch.inference_mode(), computing_threads(self._threads):
                outputs = self._run(*tensors)
            results = self._arrays(outputs, tensors)
        except _REFUSALS as error:
            raise EngineError(f"torch could not run the engine: {error}") from error
        return in_kind(inputs, self.output_names, results)

    def _arrays(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Array]:
        """Return outputs as arrays that share no memory with inputs, constants or each other."""
        if len(outputs) != len(self.output_names) or not all(isinstance(tensor, torch.Tensor) for tensor in outputs):
            raise EngineError(f"the engine did not return {len(self.output_names)} tensors: build it again")
        used_memory = self._constants | {tensor.untyped_storage().data_ptr() for tensor in inputs}
        results = []
        for tensor in outputs:
            address = tensor.untyped_storage().data_ptr()
            results.append(tensor.clone().numpy() if address in used_memory else tensor.numpy())
            used_memory.add(address)
        return results


def checked_library(backend: str, compiled: bool | None) -> None:
    """Raise if torch lacks oneDNN, or if compilation is requested but impossible."""
    if not torch._C._has_mkldnn:
        raise EngineError(
            f"torch {torch.__version__} was built without oneDNN, whose integer kernels backend {backend} needs: "
            "install an official PyTorch package, or use another backend"
        )
    if compiled and (reason := missing_compiler()) is not None:
        raise EngineError(f"compiled: {reason}; install a compiler, or leave out compiled for an eager engine")


def built_file(
    path: Path, compiled: bool | None, report: Progress, usual: Mapping[str, int] = MappingProxyType({})
) -> tuple[GraphFile, tuple[str, ...]]:
    """Return the contents of an engine file for an ONNX file, and warnings."""
    report(0.0, "lower")
    imported = import_onnx(path)
    sizes = _lowered(imported, path, usual)
    eager = GraphFile(imported.module, imported.inputs, imported.outputs, None, str(torch.__version__))
    report(0.2, "compile")
    return _faster(eager, sizes, compiled)


def _lowered(imported: Imported, path: Path, usual: Mapping[str, int] = MappingProxyType({})) -> InputSizes:
    try:
        return lower(imported, usual)
    except EngineError as error:
        raise EngineError(f"backend torch cannot run {path}: {error}") from error


def read_file(path: Path, *, verify: bool = True, trust: bool = False) -> GraphFile:
    """Return the lowered graph of an engine file or an ``.onnx`` file."""
    if path.suffix.lower() == ".onnx":
        imported = import_onnx(path)
        _lowered(imported, path)
        return GraphFile(imported.module, imported.inputs, imported.outputs, None, str(torch.__version__))
    file = unpacked(path, verify=verify)
    if file.gpu is not None:
        raise EngineError(f"{path} is an engine for a GPU: load it with backend torch-cuda")
    if file.compiled is not None:
        check_trust(path, file.compiled, trust=trust)
    return file


def unpacked(path: Path, *, verify: bool = True) -> GraphFile:
    """Return the contents of an engine file."""
    content, _ = read_engine(existing_file(path), verify=verify)
    try:
        return unpack(content)
    except EngineError as error:
        raise EngineError(f"{path} is not an engine of backend torch or is damaged: {error}; build it again") from error


def loaded(file: GraphFile, threads: int) -> TorchEngine:
    """Return the engine of a file's graph."""
    if file.compiled is None:
        try:
            # Preparation changes the warning filters of the process, so it needs a lock.
            with _PREPARING:
                module = prepare_eager(deepcopy(file.module))
        except _REFUSALS as error:
            raise EngineError(f"torch cannot prepare the engine: {_first_line(error)}; build it again") from error
        return TorchEngine(program(module), file.inputs, file.outputs, threads, list(module.buffers()))
    if file.torch_version != str(torch.__version__):
        raise EngineError(
            f"the engine was compiled by torch {file.torch_version}, but this is torch {torch.__version__}: "
            "build it again from its ONNX file"
        )
    return TorchEngine(CompiledGraph(file.compiled), file.inputs, file.outputs, threads)


def _faster(eager: GraphFile, sizes: InputSizes, compile_requested: bool | None) -> tuple[GraphFile, tuple[str, ...]]:
    """Return the requested or the faster engine, and a warning if compilation was impossible."""
    if compile_requested is False:
        return eager, ()
    reason = missing_compiler()
    if reason is not None:
        return eager, (f"the engine is eager, because {reason}; a compiled engine would be faster",)
    try:
        package = compile_graph(eager.module, eager.inputs, sizes)
    except EngineError as error:
        if compile_requested:
            raise
        return eager, (f"the engine is eager, because compilation failed: {error}",)
    compiled = GraphFile(eager.module, eager.inputs, eager.outputs, package, eager.torch_version)
    if compile_requested:
        return compiled, ()
    engines = {"eager": loaded(eager, 1), "compiled": loaded(compiled, 1)}
    inputs = working_inputs(engines["eager"], sizes)
    calls = {name: partial(engine, inputs) for name, engine in engines.items()}
    medians = {name: statistics.median(seconds) for name, seconds in interleaved_latency(calls, _ROUNDS).items()}
    return (compiled if medians["compiled"] < medians["eager"] else eager), ()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
