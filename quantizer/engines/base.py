"""Interfaces of engines and backends, build options, and checks of inputs.

A backend builds an engine file from an ONNX file and loads it. It works on paths and arrays, not on proxies or modules.

Sizes of inputs are checked here, because libraries do not enforce the dimension names of an ONNX file. OpenVINO may
even return the result of an earlier call, and its engine files do not store the names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from quantizer.engines.inspection import RUNS
from quantizer.errors import EngineError
from quantizer.export.qdq.onnx_file import TensorSpec
from quantizer.plan.targets import profile
from quantizer.utils.dimension_names import PAST, TOTAL
from quantizer.utils.records import Inspection


@dataclass(frozen=True)
class InputSizes:
    """Sizes for the dynamic dimensions of generated inputs.

    Attributes:
        batch: size of the first dimension of an input.
        sequence: size of its other dimensions, such as the tokens of a text.
        named: sizes of dimensions by name, which take precedence.
    """

    batch: int = 8
    sequence: int = 128
    named: Mapping[str, int] = field(default_factory=dict)

    def of(self, shapes: Iterable[Sequence[str]]) -> dict[str, int]:
        """Return a size for each dimension name; ``shapes`` contains the axis names of each input.

        A name gets the batch size if it is the first axis of every input with that name, else the sequence size. With a
        cache, ``sequence`` counts the one token of the call and the cached tokens.
        """
        sizes: dict[str, int] = {}
        for names in shapes:
            for axis, name in enumerate(names):
                if name and (axis > 0 or name not in sizes):
                    sizes[name] = self.sequence if axis > 0 else self.batch
        sizes |= {"batch": self.batch, "sequence": self.sequence, **self.named}
        return sizes | {PAST: self.sequence - 1, TOTAL: self.sequence, "sequence": 1} if PAST in sizes else sizes

    def words(self, shapes: Iterable[Sequence[int | str | None]]) -> str:
        """Return the sizes as text: ``8 x 128``, or ``batch 8`` if only the batch varies.

        Other dynamic dimensions are named: ``batch 8, x_axis2 160``. ``shapes`` contains the axes of each input: a size
        or an empty name for a fixed axis, None or a name for a dynamic one.
        """
        others = [f"{name} {size}" for name, size in self.named.items() if name != "batch"]
        if any(name not in ("batch", "sequence") for name in self.named):
            return ", ".join([f"batch {self.batch}", *others])
        has_dynamic_axes = any(
            size is None or (isinstance(size, str) and size) for shape in shapes for size in shape[1:]
        )
        return f"{self.batch} x {self.sequence}" if has_dynamic_axes else f"batch {self.batch}"


USUAL_SIZES = InputSizes()


def ranges_with_cache(ranges: Mapping[str, Sequence[int]], shapes: Iterable[Sequence[str]]) -> dict[str, Sequence[int]]:
    """Return the ranges of the dimensions; for a decoder with a cache, ``sequence`` covers all its tokens.

    The usual call of such a decoder reads one token.

    Args:
        ranges: smallest, usual and largest size of each name.
        shapes: axis names of each input.
    """
    if "sequence" not in ranges or not any(PAST in names for names in shapes):
        return dict(ranges)
    _, usual, largest = ranges["sequence"]
    return {**ranges, "sequence": (1, 1, largest), PAST: (0, usual - 1, largest - 1), TOTAL: (1, usual, largest)}


MOST_COPIED_BYTES = 2**29
"""Maximum bytes for additional copies of a model's constants in an engine with models for fixed sizes."""

Array = npt.NDArray[Any]

Progress = Callable[[float, str], None]
"""Function of the completed share of a build, in [0, 1] and never decreasing, and the name of the current phase."""


class Engine(Protocol):
    """Loaded model, callable from several threads at once."""

    @property
    def name(self) -> str:
        """Name of its backend in a configuration."""

    @property
    def device(self) -> str:
        """Device on which it runs: ``cpu`` or ``cuda``."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Name, type and shape of each input."""

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs; all are required."""

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in the order of the ONNX file."""

    def __call__(self, inputs: Any) -> dict[str, Any]:
        """Run the model, and return its outputs by name: tensors for tensor inputs, else arrays.

        Args:
            inputs: one array or ``torch.Tensor`` per name of ``input_names``, with the type and shape of ``inputs``. An
                engine with one input also takes its array or tensor directly.

        Raises:
            EngineError: an input is missing, unknown, or of another type or shape; inputs differ in a shared dimension;
                or the run failed.
        """


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of a build.

    Attributes:
        dynamic: smallest, usual and largest size of each dynamic dimension, by its name in the ONNX file (``{"batch":
            (1, 8, 32)}``). TensorRT requires it. OpenVINO compiles additional models for the usual sizes and for the
            smallest batch. Engines on a CPU accept any size.
        only_sizes: OpenVINO only: the accepted sizes of all dynamic dimensions, by name, with one model for each.
            Empty: any sizes, with one more model for them.
        compute_capability: TensorRT-RTX only: GPU generations to build for ahead of time (``sm89``, or several in one
            engine). None: one engine for compute capability 8.0 and later.
        inference_precision: type of non-quantized operations. OpenVINO: ``float32`` or ``bfloat16``; None: float32.
            torch-cuda: ``float16`` or ``bfloat16``; None: float16, or bfloat16 for a file in bfloat16. Other engines
            use the types of the file.
        strip_weights: write a TensorRT engine without its weights. Loading reads them from the ONNX file, which must be
            in the engine's folder at build and load time.
        timing_cache: file with the kernel times that TensorRT measured on this GPU: read if it exists, written after
            the build. Not for TensorRT-RTX.
        compiled: torch only: whether Inductor compiles the graph, which needs a C++ compiler and about a minute. None:
            compile if there is a compiler and the result is faster. An engine of torch-cuda is compiled at its first
            call in each process.
        progress: called with the progress of the build.

    Raises:
        EngineError: a range is not ``1 <= smallest <= usual <= largest``, or the list of compute capabilities is empty.
    """

    dynamic: Mapping[str, Sequence[int]] = field(default_factory=dict)
    only_sizes: Sequence[Mapping[str, int]] = ()
    compute_capability: str | Sequence[str] | None = None
    inference_precision: str | None = None
    strip_weights: bool = False
    timing_cache: Path | None = None
    compiled: bool | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        for dimension, sizes in self.dynamic.items():
            if len(sizes) != 3 or not 1 <= sizes[0] <= sizes[1] <= sizes[2]:
                raise EngineError(
                    f"the range of dimension {dimension!r} is {list(sizes)}: "
                    "give [smallest, usual, largest] with 1 <= smallest <= usual <= largest"
                )
        if self.compute_capability is not None and not self.capabilities:
            raise EngineError("compute_capability is an empty list: give at least one, such as sm89, or leave it out")

    def check_for(self, backend: Backend) -> None:
        """Raise if an option does not apply to a backend.

        Raises:
            EngineError: ``compute_capability`` for a CPU, an unsupported ``inference_precision``, or ``strip_weights``
                or ``only_sizes`` for a backend without them.
        """
        name, target = backend.name, profile(backend.name)
        if self.compute_capability is not None and backend.device == "cpu":
            raise EngineError(
                f"backend {name} builds for the CPU: leave out compute_capability {self.compute_capability!r}"
            )
        reason = None if self.inference_precision is None else target.precision_reason(self.inference_precision)
        if reason is not None:
            raise EngineError(f"inference_precision: {reason}")
        if self.strip_weights and (reason := target.stripping_reason()) is not None:
            raise EngineError(f"strip_weights: {reason}")
        if self.only_sizes and not target.fixed_sizes:
            raise EngineError(f"only_sizes: an engine of {name} has one model for all sizes; leave it out")

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Compute capabilities in lower case, without duplicates; empty if unset."""
        named = self.compute_capability or ()
        return tuple(dict.fromkeys(name.lower() for name in ((named,) if isinstance(named, str) else named)))


@dataclass(frozen=True)
class BuildResult:
    """Finished build: engine file, size in bytes, build time in seconds, and the builder's warnings."""

    path: Path
    size_bytes: int
    seconds: float
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        warnings = "".join(f", warning: {warning}" for warning in self.warnings)
        return f"BuildResult({str(self.path)!r}, {self.size_bytes / 2**20:.1f} MiB, in {self.seconds:.1f} s{warnings})"


@runtime_checkable
class GraphWriter(Protocol):
    """A backend whose library has a format of its own for graphs."""

    def write_graph(self, onnx_path: Path, path: Path) -> None:
        """Write the graph of an ONNX file in that format.

        Raises:
            EngineError: the library cannot read the file.
        """
        ...


class Backend(Protocol):
    """Builder, loader and inspector of one library's engines. Methods import the library on first use."""

    @property
    def name(self) -> str:
        """Name of the backend in a configuration."""

    @property
    def device(self) -> str:
        """Device on which its engines run: ``cpu`` or ``cuda``."""

    def check(self, options: BuildOptions) -> None:
        """Raise if ``build`` would fail for every ONNX file; called before the work that precedes a build.

        Raises:
            EngineError: the options do not fit this backend, or this machine cannot build its engines.
            MissingDependencyError: the library is not installed.
        """

    def build(self, onnx_path: Path, engine_path: Path, options: BuildOptions) -> Sequence[str]:
        """Write ``engine_path`` atomically, and return warnings.

        ``build_engine`` has checked paths and options. Without ``strip_weights`` the engine does not need the ONNX file
        later.

        Raises:
            EngineError: the ONNX file is refused, or the engine cannot be written.
            MissingDependencyError: the library is not installed.
        """

    def load(self, path: Path, *, threads: int = 1, verify: bool = True, trust: bool = False) -> Engine:
        """Load an engine file that runs on ``threads`` threads of the CPU.

        Args:
            path: the file.
            threads: number of CPU threads.
            verify: compare the file with its checksum.
            trust: run native code that this process has not built; see ``utils/cpu.py``.

        Raises:
            EngineError: the file is missing, damaged or cannot run here, or contains native code that is not trusted.
            MissingDependencyError: the library is not installed.
        """

    def inspect(
        self,
        path: Path,
        *,
        threads: int = 1,
        sizes: InputSizes = USUAL_SIZES,
        runs: int = RUNS,
        trust: bool = False,
    ) -> Inspection:
        """Run an engine file on generated inputs and report the precision of its layers.

        Args:
            path: file as in ``load``.
            threads: number of CPU threads.
            sizes: sizes of the dynamic dimensions of the inputs.
            runs: number of runs for the time of a layer.
            trust: as in ``load``.

        Raises:
            EngineError: the file is missing or cannot run here, or contains native code that is not trusted.
            MissingDependencyError: the library is not installed.
        """


def shown(engine: Engine) -> str:
    """Return the backend, inputs and outputs of an engine in one line; the ``__repr__`` of engines."""
    inputs = ", ".join(map(str, engine.inputs))
    return f"{type(engine).__name__}({engine.name!r}, {inputs} -> {', '.join(engine.output_names)})"


def checked_inputs(engine: str, specs: Sequence[TensorSpec], inputs: Any) -> dict[str, Array]:
    """Return ``inputs``, arrays or tensors by name, as contiguous arrays in the order of ``specs``.

    An engine with one input also takes it without its name.

    Raises:
        EngineError: an input is missing, unknown, not an array, or has another type or shape than its spec; or two
            inputs differ in a dimension with one name.
    """
    names = [spec.name for spec in specs]
    if not isinstance(inputs, Mapping):
        if len(specs) != 1:
            raise EngineError(
                f"{engine} engine: it has {len(specs)} inputs but got one {type(inputs).__name__}; expected a mapping "
                f"of {_listed(specs)}"
            )
        inputs = {names[0]: inputs}
    if wrong := [name for name in names if name not in inputs]:
        raise EngineError(f"{engine} engine: input {', '.join(map(repr, wrong))} is missing; expected {_listed(specs)}")
    if wrong := [name for name in inputs if name not in names]:
        raise EngineError(f"{engine} engine: it has no input {', '.join(map(repr, wrong))}; expected {_listed(specs)}")
    arrays: dict[str, Array] = {}
    for spec in specs:
        array = _as_array(engine, spec, inputs[spec.name])
        fits = len(array.shape) == len(spec.shape) and all(
            size in (None, actual) for size, actual in zip(spec.shape, array.shape, strict=True)
        )
        if array.dtype != spec.dtype or not fits:
            raise EngineError(
                f"{engine} engine: input {spec.name!r} is {array.dtype}{list(array.shape)}, expected {spec}"
            )
        arrays[spec.name] = array
    _check_shared(engine, specs, arrays)
    return arrays


_REMEMBERED = 256
"""Number of correct types and shapes of inputs that an engine remembers."""


class InputCheck:
    """``checked_inputs`` of one engine, which checks inputs of the same types and shapes only once."""

    def __init__(self, engine: str, specs: Sequence[TensorSpec]) -> None:
        self._engine = engine
        self._specs = specs
        self._names = [spec.name for spec in specs]
        self._correct: set[tuple[Any, ...]] = set()

    def __call__(self, inputs: Any) -> dict[str, Array]:
        """Return the inputs as ``checked_inputs`` does; errors as there."""
        arrays = arrays_without_copies(self._names, inputs) if type(inputs) is dict else {}
        kinds = tuple([(array.dtype, array.shape) for array in arrays.values()])
        if kinds in self._correct:
            return arrays
        checked = checked_inputs(self._engine, self._specs, inputs)
        if arrays and len(self._correct) < _REMEMBERED:
            self._correct.add(kinds)
        return checked


def arrays_without_copies(names: Collection[str], inputs: Mapping[str, Any]) -> dict[str, Array]:
    """Return arrays and tensors as contiguous arrays that share their memory; empty if that is not possible.

    It is also empty unless the inputs have exactly these names. After a call of an engine, its weights fill the caches,
    so that each line of Python takes several times longer.
    """
    arrays: dict[str, Array] = {}
    if len(inputs) != len(names):
        return arrays
    for name in names:
        value: Any = inputs.get(name)
        if type(value) is not np.ndarray:
            if not hasattr(value, "detach"):
                return {}
            try:
                value = value.numpy()
            except (RuntimeError, TypeError):
                # On another device, of a type that numpy lacks, or it requires gradients.
                return {}
        if not value.flags.c_contiguous:
            return {}
        arrays[name] = value
    return arrays


def _listed(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(str(spec) for spec in specs)


def _as_array(engine: str, spec: TensorSpec, value: Any) -> Array:
    try:
        # A tensor may be on another device or require gradients; duck typing avoids an import of torch.
        return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value, order="C")
    except (RuntimeError, TypeError, ValueError) as error:
        # A type that numpy lacks, such as bfloat16; ragged lists; a tensor without values.
        dtype = getattr(value, "dtype", None)
        kind = type(value).__name__ if dtype is None else f"{type(value).__name__} of {dtype}"
        raise EngineError(
            f"{engine} engine: input {spec.name!r} is a {kind}, which cannot become an array ({error}); expected {spec}"
        ) from error


def _check_shared(engine: str, specs: Sequence[TensorSpec], arrays: Mapping[str, Array]) -> None:
    """Raise if inputs differ in a dimension with one name.

    Libraries do not check this, and OpenVINO returns the result of an earlier call. A size of 1, which would broadcast,
    is also an error: the file states that both dimensions are equal.
    """
    first: dict[str, tuple[int, str, int]] = {}
    for spec in specs:
        for axis, (name, size) in enumerate(zip(spec.dimensions, arrays[spec.name].shape, strict=False)):
            if not name:
                continue
            other, other_input, other_axis = first.setdefault(name, (size, spec.name, axis))
            if size != other:
                raise EngineError(
                    f"{engine} engine: dimension {name!r} is {other} in input {other_input!r} (axis {other_axis}) and "
                    f"{size} in input {spec.name!r} (axis {axis}): pass one size, or give both axes different names at "
                    "export (dynamic_axes)"
                )


def in_kind(inputs: Any, names: Iterable[str], arrays: Iterable[npt.NDArray[Any]]) -> dict[str, Any]:
    """Return the outputs of an engine by name, as tensors for tensor inputs, else as arrays."""
    values = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    # Duck typing: arrays need no import of torch.
    device = next((value.device for value in values if hasattr(value, "detach")), None)
    if device is None:
        return dict(zip(names, arrays, strict=True))
    import torch

    writable = (array if array.flags.writeable else array.copy() for array in map(np.asarray, arrays))
    outputs = {name: torch.from_numpy(array) for name, array in zip(names, writable, strict=True)}
    return outputs if device.type == "cpu" else {name: value.to(device) for name, value in outputs.items()}


T = TypeVar("T")


class Pool(Generic[T]):
    """Pool of objects that each serve one call at a time; ``take`` waits until one is free."""

    def __init__(self, items: Iterable[T]) -> None:
        # Written in C: a semaphore takes some microseconds more for each call.
        self._free: SimpleQueue[T] = SimpleQueue()
        for item in items:
            self._free.put(item)

    def take(self) -> T:
        """Return an object for the caller, who returns it with ``give_back``."""
        return self._free.get()

    def give_back(self, item: T) -> None:
        """Return an object to the pool."""
        self._free.put(item)
