"""Engines of OpenVINO on the CPU.

An engine file holds OpenVINO's exports of compiled models, which load faster than an ONNX file compiles. They belong to
the release and processor type of the build; OpenVINO checks both. The exports do not store inference precision, blocks
of ranges at run time and names of dimensions, so the footer does.

``compiled_models.py`` explains the models for fixed shapes. If OpenVINO computes the model for all sizes wrongly, the
file only contains models for fixed shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from quantizer.engines.backends import backends
from quantizer.engines.base import USUAL_SIZES, Array, BuildOptions, InputCheck, InputSizes, Pool, in_kind, shown
from quantizer.engines.engine_file import read_engine, write_engine
from quantizer.engines.for_this_cpu import saturation_warnings
from quantizer.engines.inspection import RUNS, inspection_from_layers, run_note
from quantizer.engines.measure import made_up_inputs
from quantizer.engines.openvino.compiled_models import (
    GROUP,
    Dimensions,
    Models,
    Ranges,
    checked_precision,
    compile_models,
    kept_signal_stack,
    parts_of,
    port_name,
    reason,
    shapes_of,
    share_bytes,
)
from quantizer.engines.openvino.inspect import observed_layers
from quantizer.errors import EngineError
from quantizer.export.qdq.onnx_file import TensorSpec, checked_onnx
from quantizer.plan.targets.openvino import DYNAMIC_BLOCK
from quantizer.utils.cpu import cpu_instructions
from quantizer.utils.lazy import import_library
from quantizer.utils.paths import existing_file
from quantizer.utils.plain_values import decoded
from quantizer.utils.records import Inspection

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
_EMULATED = "this CPU has no BF16 instructions: OpenVINO emulates them, which is slower than float32"
_REFUSALS = (RuntimeError, TypeError, ValueError)
"""Errors for a damaged model, such as names that are not UTF-8 and types that numpy lacks."""


@dataclass(frozen=True, slots=True)
class _Note:
    """Note in an engine file.

    Attributes:
        precision: inference precision of the build.
        group: block size of ranges at run time.
        models: byte ranges of each model.
        fixed_only: whether all models are for fixed shapes; otherwise the first is for all sizes.
        dimensions: name of each axis of each input.
    """

    precision: str
    group: int
    models: tuple[Ranges, ...]
    fixed_only: bool
    dimensions: Mapping[str, tuple[str, ...]]


class OpenVINOEngine:
    """Compiled OpenVINO models with pools of inference requests; calls wait for a free one."""

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
        port_groups = zip(compiled.inputs, *(model.inputs for model in fixed), strict=True)
        self.inputs = tuple(_spec(ports, models.dimensions) for ports in port_groups)
        self.input_names = tuple(spec.name for spec in self.inputs)
        self.output_names = tuple(port_name(port) for port in compiled.outputs)
        self._checked = InputCheck(self.name, self.inputs)
        # Requests are made at load time, where a model that cannot run fails.
        self._requests = None if models.compiled is None else _requests(models.compiled)
        self._fixed = {shapes: _requests(model) for shapes, model in models.fixed.items()}
        self._buffers = models.buffers

    def __call__(self, inputs: Any) -> dict[str, Any]:
        """Run the model for these shapes, and return outputs that belong to the caller."""
        arrays = self._checked(inputs)
        requests = self._fixed.get(tuple(array.shape for array in arrays.values()), self._requests)
        if requests is None:
            raise EngineError(f"{self.name} engine: it has no model for {_words(arrays)}; expected {self._sizes()}")
        request = requests.take()
        try:
            # Pass inputs by position, because ports may have several names.
            results = request.infer(dict(enumerate(arrays.values())), share_inputs=True)
        except _REFUSALS as error:
            raise EngineError(f"OpenVINO could not run the engine: {reason(error)}") from error
        finally:
            requests.give_back(request)
        outputs = map(np.asarray, results.to_tuple())
        return in_kind(inputs, self.output_names, outputs)

    def _sizes(self) -> str:
        sizes = (zip(self.input_names, shapes, strict=True) for shapes in self._fixed)
        return " or ".join(
            ", ".join(f"{name} {list(shape)}" for name, shape in shape_of_inputs) for shape_of_inputs in sizes
        )


class OpenVINOBackend:
    """Backend of OpenVINO for the CPU."""

    device = "cpu"

    def __init__(self, name: str = "openvino") -> None:
        self.name = name

    def check(self, options: BuildOptions) -> None:
        """Raise for GPU options or a missing library."""
        options.check_for(self)
        import_library("openvino", "openvino")

    def build(self, onnx_path: Path, engine_path: Path, options: BuildOptions) -> Sequence[str]:
        """Compile the ONNX file and write the compiled models."""
        precision = options.inference_precision or "float32"
        ov = import_library("openvino", "openvino")
        if options.progress:
            options.progress(0.0, "compile")
        models = compile_models(ov, onnx_path, _settings(1, precision), options.dynamic, options.only_sizes)
        content, ranges = share_bytes([model.export_model().getbuffer() for model in models.all])
        group = int(models.all[0].get_property(GROUP))
        fixed_only, dimensions = models.compiled is None, models.dimensions
        note = _Note(precision, group, tuple(ranges), fixed_only, dimensions)
        write_engine(engine_path, content, asdict(note), cpu_instructions())
        if options.progress:
            options.progress(1.0, "compile")
        emulated = precision == "bfloat16" and "BF16" not in _capabilities(ov)
        return *((_EMULATED,) if emulated else ()), *models.warnings, *saturation_warnings(self.name, onnx_path)

    def write_graph(self, onnx_path: Path, path: Path) -> None:
        """Write the graph of an ONNX file to ``path`` (.xml), and its weights beside it (.bin)."""
        ov = import_library("openvino", "openvino")
        try:
            model = ov.Core().read_model(str(onnx_path))
            # Whoever compiles it uses the block size of our engines.
            model.set_rt_info(str(DYNAMIC_BLOCK), ["runtime_options", GROUP])
            # Weights that are not quantized keep their type.
            ov.save_model(model, str(path), compress_to_fp16=False)
        except RuntimeError as error:
            raise EngineError(f"OpenVINO cannot write {onnx_path} as {path.name}: {reason(error)}") from error

    def load(self, path: Path, *, threads: int = 1, verify: bool = True, trust: bool = False) -> OpenVINOEngine:
        """Load an engine file in its inference precision, or compile an ``.onnx`` file for float32.

        Args:
            path: a file of ``build``, or a file with the suffix ``.onnx``.
            threads: number of CPU threads.
            verify: compare an engine file with the checksum in it.
        """
        return OpenVINOEngine(_loaded(path, threads, verify=verify))

    def inspect(
        self,
        path: Path,
        *,
        threads: int = 1,
        sizes: InputSizes = USUAL_SIZES,
        runs: int = RUNS,
        trust: bool = False,
    ) -> Inspection:
        """Run an engine file or an ``.onnx`` file with performance counters."""
        models = _loaded(path, threads, {"PERF_COUNT": True})
        specs = OpenVINOEngine(models).inputs
        inputs = made_up_inputs(specs, sizes)
        if (model := models.of(list(inputs.values()))) is None:
            # The engine only accepts the sizes in the file.
            shapes, model = next(iter(models.fixed.items()))
            inputs = made_up_inputs([replace(s, shape=shape) for s, shape in zip(specs, shapes, strict=True)], sizes)
        try:
            layers = observed_layers(model, inputs, runs)
        except _REFUSALS as error:
            raise EngineError(f"OpenVINO could not run {path} on made-up inputs: {reason(error)}") from error
        words = sizes.words([spec.shape for spec in specs])
        note = run_note(words if models.compiled is not None else _words(inputs), threads, runs)
        return inspection_from_layers(self.name, layers, verified=True, note=note)


def _settings(threads: int, precision: str) -> dict[str, object]:
    return {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": _PRECISIONS[precision],
    }


def _loaded(
    path: Path, threads: int, more: Mapping[str, object] = MappingProxyType({}), *, verify: bool = True
) -> Models:
    """Return the compiled models of an engine file or ``.onnx`` file; ``more`` are additional settings."""
    if path.suffix.lower() == ".onnx":
        checked_onnx(path)
        settings = {**_settings(threads, "float32"), **more}
        return compile_models(import_library("openvino", "openvino"), path, settings)
    existing_file(path)
    content, values = read_engine(path, verify=verify)
    try:
        note: _Note = decoded(_Note, values, "note")
        if note.precision not in _PRECISIONS:
            raise ValueError(f"note.precision: expected one of {', '.join(_PRECISIONS)}, got {note.precision!r}")
        parts = parts_of(content, note.models)
    except ValueError as error:
        raise EngineError(
            f"{path} is not an engine of backend openvino, or is cut short: its footer is invalid ({error}); build it "
            "again from its ONNX file"
        ) from error
    settings = {**_settings(threads, note.precision), GROUP: note.group, **more}
    models = [_imported(path, part, settings) for part in parts]
    compiled, fixed = (None, models) if note.fixed_only else (models[0], models[1:])
    try:
        variants = {shapes_of(model.inputs): model for model in fixed}
    except _REFUSALS as error:
        raise EngineError(f"{path} is damaged: a model in it has no fixed shapes; build it again") from error
    return Models(compiled, note.dimensions, variants, buffers=tuple(parts))


def _imported(path: Path, blob: Array, settings: Mapping[str, object]) -> Any:
    ov = import_library("openvino", "openvino")
    try:
        with kept_signal_stack():
            # A shared tensor avoids a copy of the bytes.
            compiled = ov.Core().import_model(ov.Tensor(blob, shared_memory=True), "CPU", settings)
    except _REFUSALS as error:
        raise EngineError(
            f"{path} is not an engine that OpenVINO {ov.__version__.partition('-')[0]} can load here: "
            f"{reason(error)} An engine only runs with the release and processor type of its build: build it again "
            "from its ONNX file"
        ) from error
    return checked_precision(compiled, path, settings)


def _capabilities(ov: Any) -> Sequence[str]:
    with kept_signal_stack():
        capabilities: Sequence[str] = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return capabilities


def _requests(model: Any) -> Pool[Any]:
    """Return one request more than a model has streams, so that one computes while outputs of another are copied.

    All are made here. In OpenVINO 2026.4, making a request while another one runs ends the process (SIGSEGV).
    """
    streams = int(model.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))
    return Pool(model.create_infer_request() for _ in range(streams + 1))


def _words(arrays: Mapping[str, Array]) -> str:
    return ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())


def _spec(ports: Sequence[Any], dimensions: Dimensions) -> TensorSpec:
    """Return the common input of all models from their ports; the model for all sizes comes first."""
    port, shapes = ports[0], [_sizes(port) for port in ports]
    shape = tuple(size if all(other[axis] == size for other in shapes) else None for axis, size in enumerate(shapes[0]))
    name = port_name(port)
    return TensorSpec(name, np.dtype(port.element_type.to_dtype()), shape, tuple(dimensions.get(name, ())))


def _sizes(port: Any) -> list[int | None]:
    return [None if size.is_dynamic else int(size.get_length()) for size in port.partial_shape]


for _name in ("openvino", "openvino-avx2"):
    backends.add(_name)(OpenVINOBackend(_name))
