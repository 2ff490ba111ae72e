"""Engines of TensorRT and TensorRT-RTX: build with progress and a timing cache, load, run and inspect on a GPU.

Both libraries share one API. TensorRT-RTX builds ahead of time for a named GPU generation on a machine without a GPU;
TensorRT builds for the GPU of the machine. Networks are strongly typed: types come from the graph.

Engines without weights read them from the ONNX file at load time. The engine file stores the name and SHA-256 of that
file, because TensorRT only checks names and sizes of weights. TensorRT-RTX 1.7 strips no weights without a GPU.

The timing cache of TensorRT is untested on a GPU.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from quantizer.engines.backends import backends
from quantizer.engines.base import (
    USUAL_SIZES,
    Array,
    BuildOptions,
    InputCheck,
    InputSizes,
    Progress,
    in_kind,
    ranges_with_cache,
    shown,
)
from quantizer.engines.engine_file import checked_output, read_engine, whole_file, write_engine
from quantizer.engines.inspection import RUNS, WARMUP, inspection_from_layers, run_note, undisturbed_time
from quantizer.engines.measure import made_up_inputs
from quantizer.engines.onnx_graph import hint_for, named_node
from quantizer.errors import EngineError
from quantizer.export.qdq.onnx_file import TensorSpec, checked_onnx
from quantizer.plan.targets import profile
from quantizer.plan.targets.tensorrt import RTX_MAGIC
from quantizer.utils.lazy import import_library
from quantizer.utils.paths import existing_file
from quantizer.utils.records import Inspection, Layer, convolution_work, matmul_work

T = TypeVar("T")

_POLL_S = 0.05


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class BuildMonitor:
    """Progress of a builder's phases, written by the builder's thread and read by the waiting thread.

    Attributes:
        latest: completed share in [0, 1], never decreasing, and the name of the latest phase. The tuple is replaced as
            a whole, so readers need no lock.
        cancelled: stops the builder at its next step if set.
    """

    def __init__(self) -> None:
        self.latest: tuple[float, str] = (0.0, "start")
        self.cancelled = False
        self._phases: dict[str, _Phase] = {}

    def phase_start(self, name: str, parent: str | None, steps: int) -> None:
        """Begin a phase of ``steps`` steps inside the current step of ``parent``."""
        self._phases[name] = _Phase(parent, max(steps, 1))
        self._update(name)

    def step_complete(self, name: str, step: int) -> bool:
        """Mark step ``step``, counted from 0, as done; return False to stop the builder."""
        if name in self._phases:
            phase = self._phases[name]
            phase.done = max(phase.done, min(step + 1, phase.steps))
            self._update(name)
        return not self.cancelled

    def phase_finish(self, name: str) -> None:
        """End a phase, with or without all its steps."""
        if name in self._phases:
            self._phases[name].done = self._phases[name].steps
            self._update(name)
            del self._phases[name]

    def _update(self, name: str) -> None:
        roots = [phase for phase, state in self._phases.items() if state.parent not in self._phases]
        share = max((self._share(root) for root in roots), default=0.0)
        self.latest = (max(self.latest[0], min(share, 1.0)), name)

    def _share(self, name: str) -> float:
        phase = self._phases[name]
        inner = max((self._share(child) for child, state in self._phases.items() if state.parent == name), default=0.0)
        return min(phase.done + inner, phase.steps) / phase.steps


def trt_monitor(trt: Any, state: BuildMonitor) -> Any:
    """Return ``state`` as an ``IProgressMonitor`` of the module ``trt``, which is imported on demand."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            state.phase_start(name, parent, steps)

        def step_complete(self, name: str, step: int) -> bool:
            return state.step_complete(name, step)

        def phase_finish(self, name: str) -> None:
            state.phase_finish(name)

    return Monitor()


def run_monitored(build: Callable[[], T], state: BuildMonitor, progress: Progress | None) -> T:
    """Run ``build`` in a thread, and report the progress of ``state`` to ``progress`` from this thread.

    Native code in this thread would delay Ctrl-C. After an exception here, from Ctrl-C or ``progress``, the builder is
    stopped and the exception is raised again; a second Ctrl-C does not wait.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    # If Ctrl-C interrupts Thread.join, CPython 3.11 marks the running thread as ended.
    finished = threading.Event()

    def work() -> None:
        try:
            results.append(build())
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            errors.append(error)
        finally:
            finished.set()

    threading.Thread(target=work, name="engine build", daemon=True).start()
    try:
        reported: tuple[float, str] | None = None
        while not finished.wait(_POLL_S):
            if progress and state.latest != reported:
                reported = state.latest
                progress(*reported)
    except BaseException:
        state.cancelled = True
        finished.wait()
        raise
    if errors:
        raise errors[0]
    return results[0]


def use_cache(config: Any, path: Path) -> None:
    """Use the timing cache in ``path`` for a build, or an empty one if the file does not exist."""
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    # ignore_mismatch would accept the times of another GPU.
    if cache is None or not config.set_timing_cache(cache, False):
        raise EngineError(
            f"{path} is not a timing cache of this TensorRT release and GPU: delete it, or use another file"
        )


def save_cache(config: Any, path: Path) -> None:
    """Write the timing cache of a configuration atomically."""
    with whole_file(path) as part:
        part.write_bytes(memoryview(config.get_timing_cache().serialize()))


_HEAD = 24


class TensorRTBackend:
    """Backend for TensorRT or TensorRT-RTX."""

    device = "cuda"

    def __init__(self, name: str, modules: Sequence[str]) -> None:
        self.name = name
        self._modules = tuple(modules)

    def check(self, options: BuildOptions) -> None:
        """Raise for an unknown GPU generation, a missing library, or a missing GPU that the builder needs."""
        options.check_for(self)
        trt = self._import()
        for name in options.capabilities:
            self._capability(trt, name)
        self._check_cache(trt, options.timing_cache)
        self._builder(trt, TrtLog())

    def build(self, onnx_path: Path, engine_path: Path, options: BuildOptions) -> Sequence[str]:
        """Parse the ONNX file, build for the ranges and GPU generations of ``options``, and write the engine."""
        note = weights_note(onnx_path, engine_path) if options.strip_weights else {}
        trt = self._import()
        capabilities = [self._capability(trt, name) for name in options.capabilities]
        self._check_cache(trt, options.timing_cache)
        log = TrtLog()
        builder = self._builder(trt, log)
        # Newer releases only have strong typing, and ignore the flag.
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        config = builder.create_builder_config()
        # Otherwise the inspector reports names without types.
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if capabilities:
            config.num_compute_capabilities = len(capabilities)
        for index, compute_capability in enumerate(capabilities):
            config.set_compute_capability(compute_capability, index)
        if options.strip_weights:
            strip_weights(trt, config)
        if options.timing_cache is not None:
            use_cache(config, options.timing_cache)
        parser = _parse(self.name, trt, network, log, onnx_path)
        for capability in options.capabilities:
            _refuse_fp8(self.name, capability, onnx_path, _narrow_nodes(trt, network))
        _add_ranges(builder, config, network, options.dynamic)
        state = BuildMonitor()
        config.progress_monitor = trt_monitor(trt, state)
        log.errors.clear()
        plan = run_monitored(lambda: builder.build_serialized_network(network, config), state, options.progress)
        if plan is None:
            raise EngineError(
                f"{self.name} could not build {onnx_path}: {log.reason()}{_named(trt, network, log)}"
                f"{hint_for(log.reason())}{stripping_hint(log.reason()) if options.strip_weights else ''}"
            )
        # The parser owns the weights of the network.
        del parser
        write_engine(engine_path, memoryview(plan), note)
        if options.timing_cache is not None:
            save_cache(config, options.timing_cache)
        if options.progress:
            options.progress(1.0, "written")
        return list(dict.fromkeys(log.warnings))

    def load(self, path: Path, *, threads: int = 1, verify: bool = True, trust: bool = False) -> TensorRTEngine:
        """Load an engine onto the GPU; ``threads`` is ignored, ``verify`` compares the file's checksum.

        Raises:
            EngineError: this machine has no NVIDIA GPU with a driver, or the engine was built for another GPU or
                release.
        """
        existing_file(path)
        content, note = _read_rtx(path, verify) if self.name == "tensorrt-rtx" else read_engine(path, verify=verify)
        return TensorRTEngine(self.name, self._import(), path, content, note)

    def inspect(
        self,
        path: Path,
        *,
        threads: int = 1,
        sizes: InputSizes = USUAL_SIZES,
        runs: int = RUNS,
        trust: bool = False,
    ) -> Inspection:
        """Run an engine on the GPU under a profiler and read its inspector."""
        engine = self.load(path, threads=threads)
        layers = engine.observed_layers(made_up_inputs(engine.inputs, sizes), runs)
        note = run_note(sizes.words([spec.shape for spec in engine.inputs]), threads, runs)
        return inspection_from_layers(self.name, layers, verified=True, note=note)

    def _import(self) -> Any:
        return import_library(self.name, *self._modules)

    def _builder(self, trt: Any, log: TrtLog) -> Any:
        try:
            return trt.Builder(trt_log(trt, log))
        except TypeError as error:
            # The bindings raise it for a null pointer: the builder of TensorRT needs a GPU.
            raise EngineError(
                f"{self.name} cannot build on this machine: {log.reason()}; backend tensorrt-rtx builds without a GPU"
            ) from error

    def _check_cache(self, trt: Any, path: Path | None) -> None:
        if path is not None and hasattr(trt, "ComputeCapability"):
            raise EngineError(
                f"backend {self.name} has no timing cache: leave out timing_cache, or use backend tensorrt"
            )
        if path is not None:
            checked_output(path)

    def _capability(self, trt: Any, name: str) -> Any:
        if not hasattr(trt, "ComputeCapability"):
            raise EngineError(
                f"backend {self.name} builds for the GPU of this machine: leave out compute_capability {name!r}, "
                "or use backend tensorrt-rtx"
            )
        known = {key.lower(): value for key, value in trt.ComputeCapability.__members__.items() if key.startswith("SM")}
        if name.lower() not in known:
            raise EngineError(f"unknown compute capability {name!r} for {self.name}; known: {', '.join(known)}")
        return known[name.lower()]


def _read_rtx(path: Path, verify: bool) -> tuple[memoryview, dict[str, Any]]:
    """Return an engine of TensorRT-RTX and its note, after a check of its header.

    In release 1.7, an engine begins with four letters, twelve bytes and its size in eight bytes.
    """
    with path.open("rb") as stream:
        head = stream.read(_HEAD)
    if not head.startswith(RTX_MAGIC):
        raise EngineError(f"{path} is not an engine of tensorrt-rtx: build it again from its ONNX file")
    size, expected = path.stat().st_size, int.from_bytes(head[16:_HEAD], "little")
    if len(head) < _HEAD or size < expected:
        raise EngineError(f"{path} is cut short: it has {size} bytes of {expected}; copy it again, or build it again")
    content, note = read_engine(path, verify=verify)
    if len(content) != expected:
        raise EngineError(
            f"{path} is cut short: it has {size} bytes for an engine of {expected} bytes and its checksum; copy it "
            "again, or build it again"
        )
    return content, note


def _parse(name: str, trt: Any, network: Any, log: TrtLog, onnx_path: Path) -> Any:
    """Parse the ONNX file into ``network`` and return the parser, which owns the weights."""
    parser = trt.OnnxParser(network, trt_log(trt, log))
    if parser.parse_from_file(str(onnx_path)):
        return parser
    problems = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        where = f"{named_node(error.node_name(), error.node_operator())}: " if error.node_operator() else ""
        # For an unknown operator, the parser only reports a missing plugin.
        description = (
            "neither a supported operator nor a plugin" if "Plugin not found" in error.desc() else error.desc()
        )
        problems.append(f"  - {where}{description}{hint_for(error.desc())}")
    raise EngineError(f"{name} refused {onnx_path}:\n" + "\n".join(problems or [f"  - {log.reason()}"]))


def _add_ranges(builder: Any, config: Any, network: Any, dynamic: Mapping[str, Sequence[int]]) -> None:
    """Set the range of each dynamic dimension of the inputs, by its name in the ONNX file."""
    profile = builder.create_optimization_profile()
    missing = []
    has_ranges = False
    tensors = [network.get_input(index) for index in range(network.num_inputs)]
    dynamic = ranges_with_cache(
        dynamic, [[tensor.get_dimension_name(axis) for axis in range(len(tensor.shape))] for tensor in tensors]
    )
    for tensor in tensors:
        ranges: list[tuple[int, ...]] = []
        for axis, size in enumerate(tuple(tensor.shape)):
            name = tensor.get_dimension_name(axis)
            if size != -1:
                ranges.append((size, size, size))
            elif name in dynamic:
                ranges.append(tuple(dynamic[name]))
            else:
                missing.append(f"input {tensor.name!r}, axis {axis} ({name or 'without a name'})")
        if -1 in tuple(tensor.shape) and len(ranges) == len(tensor.shape):
            profile.set_shape(tensor.name, *zip(*ranges, strict=True))
            has_ranges = True
    if missing:
        raise EngineError(
            f"dynamic dimensions without a range: {'; '.join(missing)}; dimensions with a range: "
            f"{', '.join(dynamic) or 'none'}. Set [smallest, usual, largest] for each name"
        )
    if has_ranges:
        config.add_optimization_profile(profile)


def _refuse_fp8(name: str, capability: str, onnx_path: Path, nodes: Sequence[str]) -> None:
    """Raise if the file uses FP8 and the GPU generation lacks it."""
    first = profile(name).fp8_from
    if nodes and first is not None and int(capability.lower().removeprefix("sm")) < first:
        more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        raise EngineError(
            f"{name} cannot build {onnx_path} for {capability}, which lacks FP8. The file uses FP8 at node "
            f"{nodes[0]!r}{more}: build for sm{first} or later, or quantize with dtype int8"
        )


def _narrow_nodes(trt: Any, network: Any) -> list[str]:
    """Return the names of the nodes with FP8 or FP4 outputs."""
    narrow = {getattr(trt, name) for name in ("fp8", "fp4") if hasattr(trt, name)}
    layers = (network.get_layer(index) for index in range(network.num_layers))
    return [
        layer.name
        for layer in layers
        if any(layer.get_output(index).dtype in narrow for index in range(layer.num_outputs))
    ]


def _named(trt: Any, network: Any, log: TrtLog) -> str:
    """Return these nodes as text if the builder reports types that a GPU generation lacks; else an empty text."""
    names = _narrow_nodes(trt, network) if "datatypes" in log.reason() else []
    return f"; nodes with such types: {', '.join(names)}" if names else ""


backends.add("tensorrt")(TensorRTBackend("tensorrt", ["tensorrt"]))
backends.add("tensorrt-rtx")(TensorRTBackend("tensorrt-rtx", ["tensorrt_rtx_bindings", "tensorrt_rtx"]))


# Longest first, because "float" is part of other words.
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
    """Return the layers of ``EngineInspector.get_engine_information`` in JSON format."""
    try:
        entries = json.loads(text)["Layers"]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"the engine's inspector returned no list of layers: {error!r}") from error
    if not all(isinstance(entry, Mapping) for entry in entries):
        raise EngineError(
            "the engine only reports the names of its layers: build it with detailed profiling verbosity, as this "
            "package does"
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
    """Return precision and shape; releases differ in the fields for type and layout."""
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
    """Configure a builder to write an engine without its weights."""
    config.set_flag(trt.BuilderFlag.STRIP_PLAN)
    # Refitting restores the same weights, so kernels may be chosen for their values.
    config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)


def stripping_hint(reason: str) -> str:
    """Return advice if a builder refused to strip weights; else an empty text."""
    if "CUDA_SUCCESS" not in reason:
        return ""
    return (
        "; weights can only be stripped with an NVIDIA GPU: leave out strip_weights, or build on a machine with a GPU"
    )


def weights_note(onnx_path: Path, engine_path: Path) -> dict[str, Any]:
    """Return the note of an engine file about the ONNX file with its weights."""
    if onnx_path.resolve().parent != engine_path.resolve().parent:
        raise EngineError(
            f"strip_weights: {engine_path} must be in the folder of its ONNX file {onnx_path.name}, which is in "
            f"{onnx_path.parent}"
        )
    return {"weights": {"name": onnx_path.name, "sha256": _sha256(onnx_path)}}


def refit(trt: Any, engine: Any, logger: Any, path: Path, note: Mapping[str, Any]) -> None:
    """Load the weights of an engine from its ONNX file."""
    weights = note.get("weights")
    name = weights.get("name") if isinstance(weights, dict) else None
    if not isinstance(weights, dict) or not isinstance(name, str) or not name or Path(name).name != name:
        raise EngineError(
            f"{path} needs the weights of an ONNX file but does not name it: it is cut short, or was not built by this "
            "package; build it again"
        )
    onnx_path = path.parent / name
    if not onnx_path.is_file():
        raise EngineError(
            f"{path} was built without its weights, and {onnx_path} does not exist: keep that file beside it, or build "
            "the engine without strip_weights"
        )
    if _sha256(checked_onnx(onnx_path)) != weights.get("sha256"):
        raise EngineError(
            f"{path} was built without its weights, and {onnx_path} is not the ONNX file of its build (the "
            "SHA-256 differs): restore that file, or build the engine again"
        )
    refitter = trt.Refitter(engine, logger)
    parser = trt.OnnxParserRefitter(refitter, logger)
    if not parser.refit_from_file(str(onnx_path)):
        reasons = " ".join(parser.get_error(index).desc() for index in range(parser.num_errors))
        raise EngineError(f"{path} did not take its weights from {onnx_path}: {reasons or 'no reason given'}")
    if not refitter.refit_cuda_engine():
        missing = ", ".join(refitter.get_missing_weights())
        raise EngineError(f"{path} did not take all weights from {onnx_path}; missing: {missing or 'not reported'}")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# Without a driver, this message follows every other, also after success.
_NOISE = "catchCudaError"


class TrtLog:
    """Errors and warnings of a TensorRT library; nothing is printed."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def reason(self) -> str:
        """Return the errors in one line."""
        messages = [message for message in self.errors if _NOISE not in message] or self.errors
        return " ".join(dict.fromkeys(messages)) or "no reason given"


def trt_log(trt: Any, log: TrtLog) -> Any:
    """Return ``log`` as an ``ILogger`` of the module ``trt``, which is imported on demand."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                log.errors.append(message)
            elif severity == trt.ILogger.WARNING:
                log.warnings.append(message)

    return Logger()


def trt_profiler(trt: Any, times_ms: dict[str, list[float]]) -> Any:
    """Return an ``IProfiler`` of the module ``trt`` that appends the time of each layer to ``times_ms``."""

    class Profiler(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            times_ms[layer_name].append(ms)

    return Profiler()


class TensorRTEngine:
    """Deserialized engine with one execution context on the current GPU.

    Calls from several threads run one after the other: another context needs the memory of all activations again, and
    the GPU runs calls sequentially.
    """

    device = "cuda"
    __repr__ = shown

    def __init__(self, name: str, trt: Any, path: Path, content: memoryview, note: Mapping[str, Any]) -> None:
        import torch

        self.name = name
        self._trt = trt
        if not torch.cuda.is_available():
            raise EngineError(
                f"cannot run {path}: this machine has no NVIDIA GPU with a driver, or its PyTorch lacks CUDA. "
                "Run the engine on a machine with an NVIDIA GPU"
            )
        log = TrtLog()
        self._logger = trt_log(trt, log)
        self._runtime = trt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            raise EngineError(
                f"{name} cannot load {path}: {log.reason()}; "
                "an engine only runs with the release and the GPU generation of its build"
            )
        if note or self._engine.refittable:
            refit(trt, self._engine, self._logger, path, note)
        self._context = self._engine.create_execution_context()
        self._turn = threading.Lock()
        # The current GPU of a calling thread may differ from the engine's.
        self._gpu = torch.cuda.current_device()
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        is_input = {tensor: self._engine.get_tensor_mode(tensor) == trt.TensorIOMode.INPUT for tensor in names}
        self._dtypes = {tensor: np.dtype(trt.nptype(self._engine.get_tensor_dtype(tensor))) for tensor in names}
        self.inputs = tuple(self._spec(tensor) for tensor in names if is_input[tensor])
        self.input_names = tuple(spec.name for spec in self.inputs)
        self.output_names = tuple(tensor for tensor in names if not is_input[tensor])
        self._checked = InputCheck(self.name, self.inputs)

    def _spec(self, name: str) -> TensorSpec:
        shape = tuple(None if size == -1 else int(size) for size in self._engine.get_tensor_shape(name))
        return TensorSpec(name, self._dtypes[name], shape)

    def __call__(self, inputs: Any) -> dict[str, Any]:
        """Copy the inputs to the GPU, run, and return copies of the outputs on the CPU."""
        import torch

        arrays = self._checked(inputs)
        with self._turn, torch.cuda.device(self._gpu):
            results = self._run(arrays)
        return in_kind(inputs, self.output_names, results)

    def _run(self, arrays: Mapping[str, Array]) -> list[Array]:
        import torch

        # The context stores bare addresses, so the dictionary keeps the tensors alive during the run.
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
        """Return the inspector's layers at the shapes of ``inputs``, with profiled times."""
        for _ in range(WARMUP):
            self(inputs)
        times: dict[str, list[float]] = defaultdict(list)
        profiler = trt_profiler(self._trt, times)
        self._context.profiler = profiler
        for _ in range(runs):
            self(inputs)
        inspector = self._engine.create_engine_inspector()
        inspector.execution_context = self._context
        information = inspector.get_engine_information(self._trt.LayerInformationFormat.JSON)
        return layers_from_json(
            information, {name: 1000 * undisturbed_time(milliseconds) for name, milliseconds in times.items()}
        )
