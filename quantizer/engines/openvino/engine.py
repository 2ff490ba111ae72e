"""OpenVINO on the CPU.

An engine file is OpenVINO's own export of the compiled model: one file, which loads faster than the ONNX file compiles.
Like a TensorRT engine it belongs to the release and the kind of processor that made it; OpenVINO checks both when it
loads one. (Its portable form, IR, is two files.) The export does not state the inference precision for which it was
compiled, nor the blocks of ranges at run time, and has to be loaded with the same; nor does it keep the names of
dimensions. A line at the file's end holds all of them. Where the usual sizes of the inputs are known, further exports
follow the first: the same model, each compiled for fixed shapes alone (``fixed_shapes.py``); what they have in common
with it is in the file once (``shared_bytes.py``). Where OpenVINO computes the model for all sizes wrongly, a file holds
those for fixed shapes alone, and its line says so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from quantizer.engines.backends import backends
from quantizer.engines.base import Array, BuildOptions, BuildResult, TensorSpec, checked_inputs, shown
from quantizer.engines.candidates import saturation_warnings
from quantizer.engines.cpu import cpu_instructions
from quantizer.engines.dimensions import shape_words
from quantizer.engines.engine_file import checked_engine, checked_onnx, checked_output, read_engine, write_engine
from quantizer.engines.in_kind import in_kind
from quantizer.engines.inspection.from_layers import RUNS, inspection_from_layers, run_note
from quantizer.engines.inspection.inspection import Inspection
from quantizer.engines.measure.benchmark import made_up_inputs
from quantizer.engines.openvino.compiled_models import (
    GROUP,
    Dimensions,
    Models,
    checked_precision,
    compile_models,
    kept_signal_stack,
    port_name,
    reason,
    shapes_of,
)
from quantizer.engines.openvino.inspect import observed_layers
from quantizer.engines.openvino.shared_bytes import Ranges, parts_of, read_ranges, share_bytes, write_ranges
from quantizer.engines.optional_import import import_library
from quantizer.engines.pool import Pool
from quantizer.errors import EngineError

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
_EMULATED = "this CPU has no BF16 instructions: OpenVINO emulates them, which is slower than float32"
_NOTE = "inference_precision "
_ALONE = "fixed"
"""The word in a file's line where each model in it is for fixed shapes."""
_REFUSALS = (RuntimeError, TypeError, ValueError)
"""What the library raises for a damaged model: names may be no Unicode, and types may be none of numpy."""


class OpenVINOEngine:
    """Compiled OpenVINO models, each with a pool of inference requests: one request serves one call at a time."""

    name = "openvino"
    device = "cpu"
    __repr__ = shown

    def __init__(self, models: Models) -> None:
        try:
            self._prepare(models)
        except _REFUSALS as error:
            raise EngineError(f"OpenVINO cannot run the engine: {reason(error)} Build it again") from error

    def _prepare(self, models: Models) -> None:
        compiled, *fixed = models.all
        same = zip(compiled.inputs, *(model.inputs for model in fixed), strict=True)
        self.inputs = tuple(_spec(ports, models.dimensions) for ports in same)
        self.input_names = tuple(spec.name for spec in self.inputs)
        self.output_names = tuple(port_name(port) for port in compiled.outputs)
        # Each pool starts with a request: a model that cannot run is told when it is loaded.
        self._requests = None if models.compiled is None else _requests(models.compiled)
        self._fixed = {shapes: _requests(model) for shapes, model in models.fixed.items()}
        self._held = models.held

    def __call__(self, inputs: Any) -> dict[str, Any]:
        """Run it once; what it returns belongs to the caller."""
        arrays = checked_inputs(self.name, self.inputs, inputs)
        requests = self._fixed.get(tuple(array.shape for array in arrays.values()), self._requests)
        if requests is None:
            raise EngineError(
                f"{self.name} engine: it has no model for {_words(arrays)}; it takes {self._sizes()} alone"
            )
        try:
            request = requests.take()
            # By position: a port may carry other names beside its own.
            results = request.infer(dict(enumerate(arrays.values())), share_inputs=True)
        except _REFUSALS as error:
            raise EngineError(f"OpenVINO could not run the engine: {reason(error)}") from error
        requests.give_back(request)
        outputs = map(np.asarray, results.to_tuple())
        return in_kind(inputs, self.output_names, outputs)

    def _sizes(self) -> str:
        sizes = (zip(self.input_names, shapes, strict=True) for shapes in self._fixed)
        return " or ".join(", ".join(f"{name} {list(shape)}" for name, shape in one) for one in sizes)


class OpenVINOBackend:
    """Backend of OpenVINO for the CPU."""

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
        models = compile_models(ov, onnx_path, _settings(1, precision), options.dynamic, options.only_sizes)
        content, ranges = share_bytes([model.export_model().getbuffer() for model in models.all])
        alone = f",{_ALONE}" if models.compiled is None else ""
        told = f"{precision},{models.all[0].get_property(GROUP)},{write_ranges(ranges)}{alone}"
        write_engine(engine_path, content, f"{_NOTE}{told} {json.dumps(models.dimensions)}", cpu_instructions())
        if options.progress:
            options.progress(1.0, "compile")
        emulated = precision == "bfloat16" and "BF16" not in _capabilities(ov)
        return BuildResult(
            engine_path,
            engine_path.stat().st_size,
            time.perf_counter() - started,
            (
                *((_EMULATED,) if emulated else ()),
                *models.warnings,
                *saturation_warnings(self.name, onnx_path),
            ),
        )

    def load(self, path: Path, *, threads: int = 1, verify: bool = True, trust: bool = False) -> OpenVINOEngine:
        """Load an engine file in its own inference precision, or compile an ``.onnx`` file for float32.

        Args:
            path: a file that ``build`` wrote, or one whose name ends in ``.onnx``.
            threads: threads of the CPU to run on.
            verify: compare an engine file with the checksum in it.
        """
        return OpenVINOEngine(_loaded(path, threads, verify=verify))

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
        """Run an engine file, or an ``.onnx`` file, with performance counters on."""
        models = _loaded(path, threads, {"PERF_COUNT": True})
        specs = OpenVINOEngine(models).inputs
        inputs = made_up_inputs(specs, batch, sequence, sizes=sizes)
        if (model := models.of(list(inputs.values()))) is None:
            # Its sizes are those of the file, whatever others are usual.
            shapes, model = next(iter(models.fixed.items()))
            inputs = made_up_inputs([replace(s, shape=shape) for s, shape in zip(specs, shapes, strict=True)], 1, 1)
        try:
            layers = observed_layers(model, inputs, runs)
        except _REFUSALS as error:
            raise EngineError(f"OpenVINO could not run {path} on made-up inputs: {reason(error)}") from error
        words = shape_words([spec.shape for spec in specs], batch, sequence, sizes)
        note = run_note(words if models.compiled is not None else _words(inputs), threads, runs)
        return inspection_from_layers(self.name, layers, verified=True, note=note)

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
) -> Models:
    """Return the compiled models of an engine file or ``.onnx`` file; ``more``: settings."""
    if path.suffix.lower() == ".onnx":
        checked_onnx(path)
        settings = {**_settings(threads, "float32"), **more}
        return compile_models(import_library("openvino", "openvino"), path, settings)
    checked_engine(path)
    blob, note = read_engine(path, verify=verify)
    told, _, names = note.removeprefix(_NOTE).partition(" ")
    precision, *rest = told.split(",")
    if alone := rest[-1:] == [_ALONE]:
        rest.pop()
    try:
        if not note.startswith(_NOTE) or precision not in _PRECISIONS:
            raise ValueError("the note of another backend")
        group = {GROUP: int(rest[0])} if rest else {}
        parts = parts_of(blob, _told_ranges(rest[1:], len(blob)))
    except ValueError as error:
        raise EngineError(
            f"{path} is not an engine of backend openvino, or is cut short: it does not end with the precision "
            "that it was built for; build it again from its ONNX file"
        ) from error
    settings = {**_settings(threads, precision), **group, **more}
    models = [_imported(path, part, settings) for part in parts]
    compiled, fixed = (None, models) if alone else (models[0], models[1:])
    try:
        variants = {shapes_of(model.inputs): model for model in fixed}
    except _REFUSALS as error:
        raise EngineError(f"{path} is damaged: a model in it has no fixed shapes; build it again") from error
    return Models(compiled, _told_dimensions(path, names), variants, held=tuple(parts))


def _told_ranges(told: Sequence[str], size: int) -> list[Ranges]:
    """Return where the models of a file of ``size`` bytes lie, whatever version wrote it."""
    if len(told) == 1 and not told[0].isdecimal():
        return read_ranges(told[0])
    ends = [*accumulate(map(int, told)), size]
    return [((start, end),) for start, end in pairwise([0, *ends])]


def _imported(path: Path, blob: Array, settings: Mapping[str, object]) -> Any:
    ov = import_library("openvino", "openvino")
    try:
        with kept_signal_stack():
            # Bytes would be copied.
            compiled = ov.Core().import_model(ov.Tensor(blob, shared_memory=True), "CPU", settings)
    except _REFUSALS as error:
        raise EngineError(
            f"{path} is not an engine that OpenVINO {ov.__version__.partition('-')[0]} can load here: "
            f"{reason(error)} An engine belongs to the release and the kind of processor that built it: "
            "build it again from its ONNX file"
        ) from error
    return checked_precision(compiled, path, settings)


def _told_dimensions(path: Path, names: str) -> dict[str, tuple[str, ...]]:
    """Return the names of dimensions in an engine file's note; empty for a file that predates them."""
    try:
        told = json.loads(names or "{}")
        return {str(name): tuple(map(str, axes)) for name, axes in told.items()}
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise EngineError(f"{path} is damaged: it does not end with the names of dimensions; build it again") from error


def _capabilities(ov: Any) -> Sequence[str]:
    with kept_signal_stack():
        found: Sequence[str] = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return found


def _requests(model: Any) -> Pool[Any]:
    return Pool(model.create_infer_request, model.create_infer_request())


def _words(arrays: Mapping[str, Array]) -> str:
    return ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())


def _spec(ports: Sequence[Any], dimensions: Dimensions) -> TensorSpec:
    """Return the input that all models have; ports: theirs, that of the model for all sizes first."""
    port, shapes = ports[0], [_sizes(port) for port in ports]
    shape = tuple(size if all(other[axis] == size for other in shapes) else None for axis, size in enumerate(shapes[0]))
    name = port_name(port)
    return TensorSpec(name, np.dtype(port.element_type.to_dtype()), shape, tuple(dimensions.get(name, ())))


def _sizes(port: Any) -> list[int | None]:
    return [None if size.is_dynamic else int(size.get_length()) for size in port.partial_shape]


for _name in ("openvino", "openvino-avx2"):
    backends.add(_name)(OpenVINOBackend(_name))
