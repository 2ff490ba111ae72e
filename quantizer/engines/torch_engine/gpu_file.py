"""Engine files of the torch backend for an NVIDIA GPU: built from an ONNX file, loaded and inspected.

A file holds the graph as it was imported. It is lowered when it is loaded, so that it runs on every GPU with the
kernels. A build on a machine with a GPU also measures how the linear layers are fastest, and whether the compiled graph
is faster; the file keeps both.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from quantizer.engines.base import BuildOptions, InputSizes, Progress
from quantizer.engines.inspection import inspection_from_layers
from quantizer.engines.measure import interleaved_latency, medians, working_inputs
from quantizer.engines.torch_engine.compiled import missing_compiler
from quantizer.engines.torch_engine.engine import unpacked
from quantizer.engines.torch_engine.gpu_engine import PRECISIONS, GpuEngine, engine_of, no_gpu, refusals_name
from quantizer.engines.torch_engine.gpu_lowering import lower_for_gpu
from quantizer.engines.torch_engine.graph_file import GpuOptions, GraphFile
from quantizer.engines.torch_engine.inspect import graph_layers
from quantizer.engines.torch_engine.lowering import node_values
from quantizer.errors import EngineError
from quantizer.export.onnx_import.importer import Imported, import_onnx
from quantizer.numerics.triton_kernels.tiles import TABLE
from quantizer.utils.files import scratch
from quantizer.utils.lazy import import_library
from quantizer.utils.records import Inspection

_NO_OPTIONS = BuildOptions()


def load_on_gpu(path: Path, *, threads: int = 1, verify: bool = True) -> GpuEngine:
    """Return the engine of an engine file or an ``.onnx`` file on the current GPU.

    Raises:
        EngineError: there is no GPU, or it is too old; the file is damaged, does not run, or does not fit into memory.
        MissingDependencyError: Triton is not installed.
    """
    if (reason := no_gpu()) is not None:
        raise EngineError(f"backend torch-cuda cannot load {path}: {reason}")
    import_library("triton", "triton")
    file = read_for_gpu(path, verify=verify)
    with refusals_name(path):
        return _engine(_imported(file), file, threads)


def read_for_gpu(path: Path, *, verify: bool = True) -> GraphFile:
    """Return the contents of an engine file for a GPU, or of an ``.onnx`` file."""
    if path.suffix.lower() == ".onnx":
        return _file_of(path)
    file = unpacked(path, verify=verify)
    if file.gpu is None:
        raise EngineError(f"{path} is an engine for the CPU: build one with backend torch-cuda from its ONNX file")
    if file.gpu.precision not in PRECISIONS:
        raise EngineError(f"{path} has the precision {file.gpu.precision!r}, expected {' or '.join(PRECISIONS)}")
    return file


def built_for_gpu(path: Path, options: BuildOptions, report: Progress) -> tuple[GraphFile, tuple[str, ...]]:
    """Return the contents of an engine file for an ONNX file, and warnings.

    Raises:
        EngineError: the graph does not run.
        MissingDependencyError: this machine has a GPU, but Triton is not installed.
    """
    report(0.0, "lower")
    file = _file_of(path, options)
    with refusals_name(path):
        if (reason := no_gpu()) is not None:
            lower_for_gpu(_copy(file), usual=_options(file).usual)
            note = f"the engine was neither run nor measured: {reason.partition(';')[0]}"
            return _with(file, compiled=options.compiled is True), (note,)
        import_library("triton", "triton")
        engine = _engine(_copy(file), file, 1)
        report(0.2, "measure the linear layers")
        warnings = _tune(engine, options)
        report(0.5, "compile")
        compiled, reasons = _is_compiled(file, engine, options)
    return _with(file, compiled=compiled, tiles=_measured_tiles()), (*warnings, *reasons)


def inspect_on_gpu(path: Path, name: str, threads: int, sizes: InputSizes) -> Inspection:
    """Return the inspection of an engine that runs on generated inputs; its layers have no times."""
    engine, file = load_on_gpu(path, threads=threads), read_for_gpu(path)
    engine(working_inputs(engine, sizes))
    # On the CPU, where tensors without data show shapes and types.
    imported = _imported(file)
    lower_for_gpu(imported, dtype=PRECISIONS[_options(file).precision], usual=_options(file).usual)
    layers = graph_layers(imported.module, node_values(imported.module, file.inputs, sizes))
    shape = sizes.words([spec.shape for spec in file.inputs])
    note = f"run at {shape}; layers have no times, because one CUDA graph launches all kernels"
    inspection = inspection_from_layers(name, layers, verified=True, note=note)
    failed = [f"{', '.join(each.sites)}: {each.fallback}" for each in engine.plan.kernels if each.fallback]
    return replace(inspection, reasons=(*inspection.reasons, *failed))


def _file_of(path: Path, options: BuildOptions = _NO_OPTIONS) -> GraphFile:
    """Return the contents of an eager engine's file; without a precision, the file's own 16-bit type, or float16."""
    imported = import_onnx(path, fp8=True)
    is_bfloat16 = any(tensor.dtype is torch.bfloat16 for tensor in imported.module.buffers())
    precision = options.inference_precision or ("bfloat16" if is_bfloat16 else "float16")
    gpu = GpuOptions(precision, usual={name: sizes[1] for name, sizes in options.dynamic.items()})
    return GraphFile(imported.module, imported.inputs, imported.outputs, None, str(torch.__version__), gpu)


def _options(file: GraphFile) -> GpuOptions:
    assert file.gpu is not None
    return file.gpu


def _with(file: GraphFile, *, compiled: bool, tiles: str = "") -> GraphFile:
    return replace(file, gpu=replace(_options(file), compiled=compiled, tiles=tiles))


def _imported(file: GraphFile) -> Imported:
    return Imported(file.module, file.inputs, file.outputs)


def _copy(file: GraphFile) -> Imported:
    """Return a copy of the graph, which a lowering changes."""
    return _imported(replace(file, module=deepcopy(file.module)))


def _engine(imported: Imported, file: GraphFile, threads: int) -> GpuEngine:
    """Return the engine of the graph of a file, with its options."""
    options = _options(file)
    if options.tiles:
        _use_tiles(options.tiles)
    dtype = PRECISIONS[options.precision]
    return engine_of(imported, "cuda", threads=threads, dtype=dtype, compiled=options.compiled, usual=options.usual)


def _use_tiles(text: str) -> None:
    """Add the measured methods of an engine file to those of this process."""
    with scratch() as folder:
        path = folder / "tiles.json"
        path.write_text(text, encoding="utf-8")
        try:
            TABLE.read(path)
        except EngineError as error:
            raise EngineError("its measured tiles are damaged or of another release: build it again") from error


def _measured_tiles() -> str:
    """Return the measured methods of this process as text; empty if there are none."""
    if not list(TABLE):
        return ""
    with scratch() as folder:
        path = folder / "tiles.json"
        TABLE.write(path)
        return path.read_text(encoding="utf-8")


def _tune(engine: GpuEngine, options: BuildOptions) -> list[str]:
    """Measure the linear layers of an engine at the usual sizes and at the smallest batch; return warnings."""
    usual, smallest = _sizes(options)
    warnings = []
    for sizes in (usual, smallest):
        try:
            engine.tune(working_inputs(engine, sizes))
        except EngineError as error:
            warnings.append(f"the linear layers were not measured at {sizes.batch} x {sizes.sequence}: {error}")
    return warnings


def _sizes(options: BuildOptions) -> tuple[InputSizes, InputSizes]:
    """Return the usual sizes, and those with the smallest batch."""
    usual = {name: sizes[1] for name, sizes in options.dynamic.items()}
    batch, sequence = (usual.get(name, size) for name, size in (("batch", 8), ("sequence", 128)))
    smallest = {name: sizes[0] for name, sizes in options.dynamic.items() if name == "batch"}
    return InputSizes(batch, sequence, usual), InputSizes(smallest.get("batch", 1), sequence, {**usual, **smallest})


_ROUNDS = 20


def _is_compiled(file: GraphFile, eager: GpuEngine, options: BuildOptions) -> tuple[bool, tuple[str, ...]]:
    """Return whether the graph is to be compiled, by request or because it is faster, and a warning if it cannot."""
    if options.compiled is not None:
        return options.compiled, ()
    if (reason := missing_compiler()) is not None:
        return False, (f"the engine is not compiled, because {reason}; a compiled engine may be faster",)
    try:
        compiled = _engine(_copy(file), _with(file, compiled=True), 1)
        inputs = working_inputs(eager, _sizes(options)[0])
        calls = {name: partial(engine, inputs) for name, engine in (("eager", eager), ("compiled", compiled))}
        seconds = medians(interleaved_latency(calls, _ROUNDS))
    except (EngineError, torch.OutOfMemoryError) as error:
        return False, (f"the engine is not compiled, because compilation failed: {error}",)
    return seconds["compiled"] < seconds["eager"], ()
