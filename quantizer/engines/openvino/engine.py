"""OpenVINO on the CPU.

An engine file is OpenVINO's own export of the compiled model: one file, which loads faster than the ONNX file compiles.
Like a TensorRT engine it belongs to the release and the kind of processor that made it; OpenVINO checks both when it
loads one. (Its portable form, IR, is two files.) The export does not state the inference precision for which it was
compiled, nor the blocks of ranges at run time, and has to be loaded with the same; nor does it keep the names of
dimensions. A line at the file's end holds all of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any
from typing import TypeAlias

import numpy as np

from quantizer.engines.backends import backends
from quantizer.engines.base import Array
from quantizer.engines.base import BuildOptions
from quantizer.engines.base import BuildResult
from quantizer.engines.base import TensorSpec
from quantizer.engines.base import checked_inputs
from quantizer.engines.cpu import cpu_instructions
from quantizer.engines.dimensions import input_dimensions
from quantizer.engines.engine_file import checked_engine
from quantizer.engines.engine_file import checked_onnx
from quantizer.engines.engine_file import checked_output
from quantizer.engines.engine_file import read_engine
from quantizer.engines.engine_file import write_engine
from quantizer.engines.error_hints import explain_error
from quantizer.engines.inspection.from_layers import RUNS
from quantizer.engines.inspection.from_layers import inspection_from_layers
from quantizer.engines.inspection.from_layers import run_note
from quantizer.engines.inspection.inspection import Inspection
from quantizer.engines.int8_saturation import saturation_warnings
from quantizer.engines.measure.dummy_inputs import made_up_inputs
from quantizer.engines.openvino.inspect import observed_layers
from quantizer.engines.openvino.signal_stack import kept_signal_stack
from quantizer.engines.optional_import import import_library
from quantizer.errors import EngineError
from quantizer.targets.openvino import DYNAMIC_BLOCK

__all__ = ["OpenVINOBackend", "OpenVINOEngine"]

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
_EMULATED = "this CPU has no BF16 instructions: OpenVINO emulates them, which is slower than float32"
_NOTE = "inference_precision "
_GROUP = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
"""How many neighbours share a range where OpenVINO rounds the other operand of a stored weight at run time. It holds at
a load, whatever the build had."""

Dimensions: TypeAlias = Mapping[str, Sequence[str]]


class OpenVINOEngine:
    """Compiled OpenVINO model with one inference request.

    Args:
        compiled: an ``openvino.CompiledModel``.
        dimensions: the name of each axis of each input, if known.
    """

    name = "openvino"
    device = "cpu"

    def __init__(self, compiled: Any, dimensions: Dimensions = MappingProxyType({})) -> None:
        self.inputs = tuple(_spec(port, dimensions) for port in compiled.inputs)
        self.input_names = tuple(spec.name for spec in self.inputs)
        self.output_names = tuple(_port_name(port) for port in compiled.outputs)
        self._request = compiled.create_infer_request()

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """Run it once; the returned arrays belong to the caller."""
        arrays = checked_inputs(self.name, self.inputs, inputs)
        try:
            # By position: a port may carry other names beside its own.
            results = self._request.infer(dict(enumerate(arrays.values())), share_inputs=True)
        except RuntimeError as error:
            raise EngineError(f"OpenVINO could not run the engine: {_reason(error)}") from error
        return {name: np.asarray(results[index]) for index, name in enumerate(self.output_names)}


class OpenVINOBackend:
    """Backend of OpenVINO for the CPU.

    Args:
        name: the backend's name; what an engine computes depends on the file and the machine alone.
    """

    device = "cpu"

    def __init__(self, name: str = "openvino") -> None:
        self.name = name

    def check(self, options: BuildOptions) -> None:
        """Raise for options that are for a GPU, or if the library is missing."""
        self._check_options(options)
        import_library("openvino", "openvino")

    def build(self, onnx_path: Path, engine_path: Path, options: BuildOptions) -> BuildResult:
        """Compile the ONNX file and write the compiled model."""
        self._check_options(options)
        precision = options.inference_precision or "float32"
        started = time.perf_counter()
        checked_onnx(onnx_path)
        checked_output(engine_path, onnx_path)
        ov = import_library("openvino", "openvino")
        if options.progress:
            options.progress(0.0, "compile")
        compiled = _compile(ov, onnx_path, _settings(1, precision))
        told = f"{precision},{compiled.get_property(_GROUP)}"
        note = f"{_NOTE}{told} {json.dumps(_dimensions(onnx_path))}"
        write_engine(engine_path, compiled.export_model().getbuffer(), note, cpu_instructions())
        if options.progress:
            options.progress(1.0, "compile")
        emulated = precision == "bfloat16" and "BF16" not in _capabilities(ov)
        return BuildResult(
            engine_path,
            engine_path.stat().st_size,
            time.perf_counter() - started,
            (*((_EMULATED,) if emulated else ()), *saturation_warnings(self.name, onnx_path)),
        )

    def load(self, path: Path, *, threads: int = 1, verify: bool = True) -> OpenVINOEngine:
        """Load an engine file in its own inference precision, or compile an ``.onnx`` file for float32.

        Args:
            path: a file that ``build`` wrote, or one whose name ends in ``.onnx``.
            threads: threads of the CPU to run on.
            verify: compare an engine file with the checksum in it.
        """
        return OpenVINOEngine(*_loaded(path, threads, verify=verify))

    def inspect(
        self, path: Path, *, threads: int = 1, batch: int = 8, sequence: int = 128, runs: int = RUNS
    ) -> Inspection:
        """Run an engine file, or an ``.onnx`` file, with performance counters on."""
        compiled, dimensions = _loaded(path, threads, {"PERF_COUNT": True})
        inputs = made_up_inputs(OpenVINOEngine(compiled, dimensions).inputs, batch, sequence)
        try:
            layers = observed_layers(compiled, inputs, runs)
        except RuntimeError as error:
            raise EngineError(f"OpenVINO could not run {path} on made-up inputs: {_reason(error)}") from error
        return inspection_from_layers(self.name, layers, verified=True, note=run_note(batch, sequence, threads, runs))

    def _check_options(self, options: BuildOptions) -> None:
        if options.compute_capability is not None:
            raise EngineError(
                f"backend {self.name} builds for the CPU: leave out compute_capability {options.compute_capability!r}"
            )
        options.check_for(self.name)


def _settings(threads: int, precision: str) -> dict[str, object]:
    return {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": _PRECISIONS[precision],
    }


def _loaded(
    path: Path, threads: int, more: Mapping[str, object] = MappingProxyType({}), *, verify: bool = True
) -> tuple[Any, dict[str, tuple[str, ...]]]:
    """Return the compiled model of an engine file or ``.onnx`` file, and the names of its dimensions.

    ``more``: settings.
    """
    if path.suffix.lower() == ".onnx":
        checked_onnx(path)
        settings = {**_settings(threads, "float32"), **more}
        return _compile(import_library("openvino", "openvino"), path, settings), _dimensions(path)
    checked_engine(path)
    blob, note = read_engine(path, verify=verify)
    told, _, names = note.removeprefix(_NOTE).partition(" ")
    precision, _, group = told.partition(",")
    if not note.startswith(_NOTE) or precision not in _PRECISIONS or not (group or "0").isdecimal():
        raise EngineError(
            f"{path} is not an engine of backend openvino, or is cut short: it does not end with the precision "
            "that it was built for; build it again from its ONNX file"
        )
    ov = import_library("openvino", "openvino")
    settings = {**_settings(threads, precision), **({_GROUP: int(group)} if group else {}), **more}
    try:
        with kept_signal_stack():
            compiled = ov.Core().import_model(blob, "CPU", settings)
    except RuntimeError as error:
        raise EngineError(
            f"{path} is not an engine that OpenVINO {ov.__version__.partition('-')[0]} can load here: "
            f"{_reason(error)} An engine belongs to the release and the kind of processor that built it: "
            "build it again from its ONNX file"
        ) from error
    return _checked_precision(compiled, path, settings), _told_dimensions(path, names)


def _dimensions(onnx_path: Path) -> dict[str, tuple[str, ...]]:
    """Return the names of dimensions in an ONNX file.

    Raises:
        EngineError: it is damaged.
    """
    try:
        return input_dimensions(onnx_path)
    except ValueError as error:
        raise EngineError(f"{onnx_path} is damaged: {error}; export it again") from error


def _told_dimensions(path: Path, names: str) -> dict[str, tuple[str, ...]]:
    """Return the names of dimensions in an engine file's note; empty for a file that predates them.

    Raises:
        EngineError: the file is damaged.
    """
    try:
        told = json.loads(names or "{}")
        return {str(name): tuple(map(str, axes)) for name, axes in told.items()}
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise EngineError(f"{path} is damaged: it does not end with the names of dimensions; build it again") from error


def _capabilities(ov: Any) -> Sequence[str]:
    with kept_signal_stack():
        found: Sequence[str] = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return found


def _compile(ov: Any, onnx_path: Path, settings: Mapping[str, object]) -> Any:
    core = ov.Core()
    try:
        model = core.read_model(str(onnx_path))
        with kept_signal_stack():
            compiled = core.compile_model(model, "CPU", {**_dynamic_group(model), **settings})
    except RuntimeError as error:
        raise EngineError(f"OpenVINO refused {onnx_path}: {explain_error(onnx_path, _reason(error))}") from error
    _check_outputs(model, compiled, onnx_path)
    return _checked_precision(compiled, onnx_path, settings)


def _dynamic_group(model: Any) -> dict[str, object]:
    """Return the setting of ranges at run time: the one of our plans, unless weights of 4 bits may have smaller blocks,
    which would turn it off."""
    stored = (node.get_element_type().get_type_name() for node in model.get_ops() if node.get_type_name() == "Constant")
    return {} if {"i4", "u4"}.intersection(stored) else {_GROUP: DYNAMIC_BLOCK}


def _check_outputs(model: Any, compiled: Any, path: Path) -> None:
    """Raise if an engine's outputs have other shapes than the file's: a fusion has lost or added an axis."""
    for asked, got in zip(model.outputs, compiled.outputs, strict=True):
        if not asked.partial_shape.compatible(got.partial_shape):
            raise EngineError(
                f"OpenVINO compiles {path} wrongly: its output {_port_name(got)!r} has the shape {got.partial_shape}, "
                f"and that of the file is {asked.partial_shape}; take another release of OpenVINO, or onnxruntime"
            )


def _checked_precision(compiled: Any, path: Path, settings: Mapping[str, object]) -> Any:
    """Return ``compiled`` if it computes in the precision that was asked for.

    Raises:
        EngineError: the CPU lacks it; OpenVINO silently takes another one.
    """
    asked, got = settings["INFERENCE_PRECISION_HINT"], compiled.get_property("INFERENCE_PRECISION_HINT")
    if got.get_type_name() != asked:
        raise EngineError(
            f"OpenVINO computes {path} in {got.get_type_name()} on this CPU, where {asked} was asked for: BF16 needs "
            "AVX-512 or AMX; leave out inference_precision, or build on another machine"
        )
    return compiled


def _spec(port: Any, dimensions: Dimensions) -> TensorSpec:
    sizes: Sequence[Any] = port.partial_shape
    shape = tuple(None if size.is_dynamic else int(size.get_length()) for size in sizes)
    name = _port_name(port)
    return TensorSpec(name, np.dtype(port.element_type.to_dtype()), shape, tuple(dimensions.get(name, ())))


def _port_name(port: Any) -> str:
    """Return the port's name in the ONNX file; removed nodes may have left theirs on the port as well."""
    own = str(port.node.friendly_name).partition("/sink_port_")[0]
    return own if own in port.names else str(port.any_name)


def _reason(error: RuntimeError) -> str:
    """Return an OpenVINO message without the lines that name places in its own source."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith(("Exception from ", "Check '", "Summary:"))]
    return " ".join(kept) or str(error)


for _name in ("openvino", "openvino-avx2"):
    backends.add(_name)(OpenVINOBackend(_name))
