"""Long build in another thread: progress from its phases, and an end soon after Ctrl-C.

Timing cache of TensorRT: kernel times on this GPU, kept in a file from one build to the next.

Untested on a GPU.

TensorRT and TensorRT-RTX: one builder, two modules that share an API.

TensorRT-RTX builds ahead of time for a named GPU generation on a machine that has no GPU; TensorRT builds for the GPU
that it finds. Types come from the graph alone (strongly typed networks), so there is no precision to choose here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quantizer.common.inspection import Inspection
from quantizer.common.optional_import import import_library
from quantizer.common.paths import existing_file
from quantizer.engines.backends import backends
from quantizer.engines.base import BuildOptions, Progress
from quantizer.engines.engine_file import checked_output, read_engine, whole_file, write_engine
from quantizer.engines.input_sizes import USUAL_SIZES, InputSizes, ranges_with_cache
from quantizer.engines.inspection import RUNS, inspection_from_layers, run_note
from quantizer.engines.measure import made_up_inputs
from quantizer.engines.onnx_graph import hint_for, named_node
from quantizer.engines.tensorrt.run import TensorRTEngine, TrtLog, strip_weights, stripping_hint, trt_log, weights_note
from quantizer.errors import EngineError
from quantizer.targets import profile
from quantizer.targets.tensorrt_rtx import RTX_MAGIC

T = TypeVar("T")

_POLL_S = 0.05


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class BuildMonitor:
    """Progress of a builder's phases; written by the builder's thread, read by the waiting one.

    Attributes:
        latest: the share that is done, in [0, 1] and never falling, and the name of the phase that moved last. One
            tuple, replaced as a whole, so that a reader needs no lock.
        cancelled: if set, the builder stops at its next step.
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
        """Count step ``step`` of a phase, from 0, as done; return False to stop the builder."""
        if name in self._phases:
            phase = self._phases[name]
            phase.done = max(phase.done, min(step + 1, phase.steps))
            self._update(name)
        return not self.cancelled

    def phase_finish(self, name: str) -> None:
        """End a phase, whether all of its steps are done or not."""
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
    """Return ``state`` as an ``IProgressMonitor`` of the module ``trt``, whose class only exists after its import."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            state.phase_start(name, parent, steps)

        def step_complete(self, name: str, step: int) -> bool:
            return state.step_complete(name, step)

        def phase_finish(self, name: str) -> None:
            state.phase_finish(name)

    return Monitor()


def run_monitored(build: Callable[[], T], state: BuildMonitor, progress: Progress | None) -> T:
    """Run ``build`` in a thread and wait for it here, reporting the progress of ``state`` to ``progress``.

    A builder that holds this thread in native code would delay Ctrl-C until its end. After an exception here, Ctrl-C or
    one of ``progress``, the builder is asked to stop and waited for, and the exception is raised again; a second Ctrl-C
    does not wait.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    # Not Thread.join: if Ctrl-C interrupts it, the thread is marked as ended while it still runs (CPython 3.11).
    finished = threading.Event()

    def work() -> None:
        try:
            results.append(build())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            errors.append(error)
        finally:
            finished.set()

    threading.Thread(target=work, name="engine build", daemon=True).start()
    try:
        told: tuple[float, str] | None = None
        while not finished.wait(_POLL_S):
            if progress and state.latest != told:
                told = state.latest
                progress(*told)
    except BaseException:
        state.cancelled = True
        finished.wait()
        raise
    if errors:
        raise errors[0]
    return results[0]


def use_cache(config: Any, path: Path) -> None:
    """Give the cache in ``path`` to a builder's configuration; an empty one if there is no such file."""
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    # With ignore_mismatch a cache of another GPU would be accepted, with wrong times.
    if cache is None or not config.set_timing_cache(cache, False):
        raise EngineError(f"{path} is no timing cache of this TensorRT and this GPU: delete it, or name another file")


def save_cache(config: Any, path: Path) -> None:
    """Write the cache of a configuration after a build, whole or not at all."""
    with whole_file(path) as part:
        part.write_bytes(memoryview(config.get_timing_cache().serialize()))


_HEAD = 24


class TensorRTBackend:
    """Backend for one module of the TensorRT family."""

    device = "cuda"

    def __init__(self, name: str, modules: Sequence[str]) -> None:
        self.name = name
        self._modules = tuple(modules)

    def check(self, options: BuildOptions) -> None:
        """Raise for an unknown GPU generation, a missing library, or a missing GPU where the builder needs one."""
        options.check_for(self)
        trt = self._import()
        for name in options.capabilities:
            self._capability(trt, name)
        self._check_cache(trt, options.timing_cache)
        self._builder(trt, TrtLog())

    def build(self, onnx_path: Path, engine_path: Path, options: BuildOptions) -> Sequence[str]:
        """Parse the ONNX file, build for ``options.dynamic`` and ``options.compute_capability``, write the engine."""
        note = weights_note(onnx_path, engine_path) if options.strip_weights else {}
        trt = self._import()
        capabilities = [self._capability(trt, name) for name in options.capabilities]
        self._check_cache(trt, options.timing_cache)
        log = TrtLog()
        builder = self._builder(trt, log)
        # Strong typing is the only mode of newer releases, which accept the flag and ignore it.
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        config = builder.create_builder_config()
        # Without it the inspector reports names and no types.
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if capabilities:
            config.num_compute_capabilities = len(capabilities)
        for index, found in enumerate(capabilities):
            config.set_compute_capability(found, index)
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
        # The network refers to weights that the parser owns.
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
            EngineError: there is no NVIDIA GPU with a driver here, or the engine was built for another GPU or release.
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
            # The bindings' error for a null pointer: TensorRT needs a GPU for its builder already.
            raise EngineError(
                f"{self.name} cannot build on this machine: {log.reason()}; backend tensorrt-rtx builds without a GPU"
            ) from error

    def _check_cache(self, trt: Any, path: Path | None) -> None:
        if path is not None and hasattr(trt, "ComputeCapability"):
            raise EngineError(
                f"backend {self.name} measures no kernels when it builds: leave out timing_cache, or use tensorrt"
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


def _read_rtx(path: Path, verify: bool) -> tuple[bytes, dict[str, Any]]:
    """Read an engine of TensorRT-RTX and its note; raise before a GPU gets anything else.

    As 1.7 writes it, an engine begins with four letters, twelve bytes and its own size in eight more.
    """
    with path.open("rb") as stream:
        head = stream.read(_HEAD)
    if not head.startswith(RTX_MAGIC):
        raise EngineError(f"{path} is no engine of tensorrt-rtx: build it again from its ONNX file")
    size, told = path.stat().st_size, int.from_bytes(head[16:_HEAD], "little")
    if len(head) < _HEAD or size < told:
        raise EngineError(f"{path} is cut short: it has {size} bytes of {told}; copy it again, or build it again")
    content, note = read_engine(path, verify=verify)
    if len(content) != told:
        raise EngineError(
            f"{path} is cut short: it has {size} bytes of an engine of {told} and the line with its checksum, which is "
            "not whole; copy it again, or build it again"
        )
    return content, note


def _parse(name: str, trt: Any, network: Any, log: TrtLog, onnx_path: Path) -> Any:
    """Fill ``network`` and return the parser, which owns its weights."""
    parser = trt.OnnxParser(network, trt_log(trt, log))
    if parser.parse_from_file(str(onnx_path)):
        return parser
    problems = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        where = f"{named_node(error.node_name(), error.node_operator())}: " if error.node_operator() else ""
        # For an unknown operator the parser only reports that no plugin of that name was found.
        told = "neither an operator of it nor a plugin" if "Plugin not found" in error.desc() else error.desc()
        problems.append(f"  - {where}{told}{hint_for(error.desc())}")
    raise EngineError(f"{name} refused {onnx_path}:\n" + "\n".join(problems or [f"  - {log.reason()}"]))


def _add_ranges(builder: Any, config: Any, network: Any, dynamic: Mapping[str, Sequence[int]]) -> None:
    """Set the range of each dynamic dimension of each input, found by its name in the ONNX file."""
    profile = builder.create_optimization_profile()
    missing = []
    found = False
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
                missing.append(f"input {tensor.name!r}, axis {axis} ({name or 'no name'})")
        if -1 in tuple(tensor.shape) and len(ranges) == len(tensor.shape):
            profile.set_shape(tensor.name, *zip(*ranges, strict=True))
            found = True
    if missing:
        raise EngineError(
            f"dynamic dimensions without a range: {'; '.join(missing)}; ranges were given for: "
            f"{', '.join(dynamic) or 'none'}. Give each one [smallest, usual, largest] under its name"
        )
    if found:
        config.add_optimization_profile(profile)


def _refuse_fp8(name: str, capability: str, onnx_path: Path, nodes: Sequence[str]) -> None:
    """Raise if FP8 is asked for on a GPU generation that lacks it."""
    first = profile(name).fp8_from
    if nodes and first is not None and int(capability.lower().removeprefix("sm")) < first:
        more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        raise EngineError(
            f"{name} cannot build {onnx_path} for {capability}, which has no FP8: it came with sm{first}, and the file "
            f"has it at node {nodes[0]!r}{more}; build for sm{first} or later, or quantize with dtype int8"
        )


def _narrow_nodes(trt: Any, network: Any) -> list[str]:
    """Return the names of the nodes that make FP8 or FP4."""
    narrow = {getattr(trt, name) for name in ("fp8", "fp4") if hasattr(trt, name)}
    layers = (network.get_layer(index) for index in range(network.num_layers))
    return [
        layer.name
        for layer in layers
        if any(layer.get_output(index).dtype in narrow for index in range(layer.num_outputs))
    ]


def _named(trt: Any, network: Any, log: TrtLog) -> str:
    """Return those nodes in words, if the builder complained of types that a GPU generation lacks."""
    names = _narrow_nodes(trt, network) if "datatypes" in log.reason() else []
    return f"; nodes with such types: {', '.join(names)}" if names else ""


backends.add("tensorrt")(TensorRTBackend("tensorrt", ["tensorrt"]))
backends.add("tensorrt-rtx")(TensorRTBackend("tensorrt-rtx", ["tensorrt_rtx_bindings", "tensorrt_rtx"]))
