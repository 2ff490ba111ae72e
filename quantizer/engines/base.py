"""Engines, seen from outside: build, load, run, and the sizes of inputs.

An ONNX file states the names, and its libraries do not enforce them. OpenVINO, given two sizes, may return the result
of an earlier call, and go on doing so; its engine files do not keep the names.

A backend builds an engine file from an ONNX file and loads it. It knows paths and arrays, and nothing of proxies or
PyTorch modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

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
    """Sizes for the dynamic dimensions of made-up inputs.

    Attributes:
        batch: the size of the first dimension of an input.
        sequence: the size of its other dimensions, such as the tokens of a text.
        named: sizes of dimensions by name, where they are known; they come before the two.
    """

    batch: int = 8
    sequence: int = 128
    named: Mapping[str, int] = field(default_factory=dict)

    def of(self, shapes: Iterable[Sequence[str]]) -> dict[str, int]:
        """Return a size for each name of a dimension; ``shapes`` has the names of the axes of each input.

        A name other than ``batch`` or ``sequence`` gets the batch's size if it is the first axis of every input that
        has it, else the sequence's: [b, s] gives b the batch's size and s the sequence's. With a cache, ``sequence``
        tokens are one that is read and those before it, which are in the cache.
        """
        sizes: dict[str, int] = {}
        for names in shapes:
            for axis, name in enumerate(names):
                if name and (axis > 0 or name not in sizes):
                    sizes[name] = self.sequence if axis > 0 else self.batch
        sizes |= {"batch": self.batch, "sequence": self.sequence, **self.named}
        return sizes | {PAST: self.sequence - 1, TOTAL: self.sequence, "sequence": 1} if PAST in sizes else sizes

    def words(self, shapes: Iterable[Sequence[int | str | None]]) -> str:
        """Return what inputs were made up with: ``8 x 128``, or ``batch 8`` where only the number of samples varies.

        Where other dimensions vary, each is named: ``batch 8, x_axis2 160``. ``shapes`` has the axes of each input: a
        size or an empty name where it is fixed, None or a name where it varies.
        """
        others = [f"{name} {size}" for name, size in self.named.items() if name != "batch"]
        if any(name not in ("batch", "sequence") for name in self.named):
            return ", ".join([f"batch {self.batch}", *others])
        varies = any(size is None or (isinstance(size, str) and size) for shape in shapes for size in shape[1:])
        return f"{self.batch} x {self.sequence}" if varies else f"batch {self.batch}"


USUAL_SIZES = InputSizes()


def ranges_with_cache(ranges: Mapping[str, Sequence[int]], shapes: Iterable[Sequence[str]]) -> dict[str, Sequence[int]]:
    """Return the ranges of the dimensions of a file; with a cache, those of ``sequence`` hold for all its tokens.

    The usual call of such a decoder reads one token.

    Args:
        ranges: smallest, usual and largest size of each name.
        shapes: the names of the axes of each input.
    """
    if "sequence" not in ranges or not any(PAST in names for names in shapes):
        return dict(ranges)
    _, usual, most = ranges["sequence"]
    return {**ranges, "sequence": (1, 1, most), PAST: (0, usual - 1, most - 1), TOTAL: (1, usual, most)}


MOST_COPIED_BYTES = 2**29
"""The most bytes that further copies of a model's constants may take, where an engine has models for fixed sizes."""

Array = npt.NDArray[Any]

Progress = Callable[[float, str], None]
"""Called with the share of a build that is done, in [0, 1] and never falling, and the name of the current phase."""


class Engine(Protocol):
    """Model that is ready to run, called from any number of threads at once."""

    @property
    def name(self) -> str:
        """Name of its backend, as a configuration spells it."""

    @property
    def device(self) -> str:
        """Device on which it runs: ``cpu`` or ``cuda``."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Name, type and shape of each input."""

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, all of them required."""

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in the order of the ONNX file."""

    def __call__(self, inputs: Any) -> dict[str, Any]:
        """Run it once, and return its outputs by name: tensors if it was given tensors, arrays otherwise.

        Args:
            inputs: one array or ``torch.Tensor`` for each of ``input_names``, of the type and shape that ``inputs``
                states; where there is one input, that alone is enough.

        Raises:
            EngineError: an input is missing, unknown, or of another type or shape; inputs differ in a dimension that
                they share; or the run failed.
        """


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of a build.

    Attributes:
        dynamic: smallest, usual and largest size of each dynamic dimension, by its name in the ONNX file
            (``{"batch": (1, 8, 32)}``). TensorRT needs it, and OpenVINO compiles a model of its own for the usual
            sizes and for the smallest batch; engines on a CPU take any size.
        only_sizes: with OpenVINO, the sizes of all dynamic dimensions, by name, that the engine takes, with a model of
            its own for each; empty: it takes any, with one more model for those.
        compute_capability: with TensorRT-RTX, the GPU generations to build for ahead of time (``sm89``, or several in
            one engine); None builds one engine for all from compute capability 8.0 on.
        inference_precision: the type in which OpenVINO computes what is not quantized, ``float32`` or ``bfloat16``;
            None: float32. Other engines take their types from the file.
        strip_weights: write a TensorRT engine without its weights. Loading takes them from the ONNX file, which must be
            in the engine's folder at both times.
        timing_cache: file in which TensorRT keeps its measured kernel times on this GPU: read if it exists, written
            after the build. TensorRT-RTX has no such times.
        compiled: with torch, whether Inductor compiles the graph, which takes a C++ compiler and about a minute; None:
            where there is one and the result is faster.
        progress: called with the progress of the build.

    Raises:
        EngineError: a range that is not ``1 <= smallest <= usual <= largest``; an empty list of compute capabilities.
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
            raise EngineError("compute_capability is an empty list: name at least one, such as sm89, or leave it out")

    def check_for(self, backend: Backend) -> None:
        """Raise if an option does not apply to a backend.

        Raises:
            EngineError: a ``compute_capability`` where it builds for a CPU, an ``inference_precision`` that it lacks,
                ``strip_weights`` where it cannot strip them, or ``only_sizes`` where one model is for all.
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
        """Compute capabilities, each once, in lower case; empty if none is named."""
        named = self.compute_capability or ()
        return tuple(dict.fromkeys(name.lower() for name in ((named,) if isinstance(named, str) else named)))


@dataclass(frozen=True)
class BuildResult:
    """Finished build: the engine file, its size in bytes, the build time, and the builder's warnings."""

    path: Path
    size_bytes: int
    seconds: float
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        told = "".join(f", warning: {warning}" for warning in self.warnings)
        return f"BuildResult({str(self.path)!r}, {self.size_bytes / 2**20:.1f} MiB, in {self.seconds:.1f} s{told})"


class Backend(Protocol):
    """Builder, loader and inspector of one library's engines. Methods import the library only when they need it."""

    @property
    def name(self) -> str:
        """Name of the backend in a configuration."""

    @property
    def device(self) -> str:
        """Device on which its engines run: ``cpu`` or ``cuda``."""

    def check(self, options: BuildOptions) -> None:
        """Raise if ``build`` would fail whatever the ONNX file is; call it before hours of work that lead to a build.

        Raises:
            EngineError: the options are not for this backend, or nothing can be built on this machine.
            MissingDependencyError: the library is not installed.
        """

    def build(self, onnx_path: Path, engine_path: Path, options: BuildOptions) -> Sequence[str]:
        """Write ``engine_path``, whole or not at all, and return warnings.

        ``build_engine`` has checked paths and options before. Without ``strip_weights`` the ONNX file is not needed
        later.

        Raises:
            EngineError: the ONNX file is refused, or the engine cannot be written.
            MissingDependencyError: the library is not installed.
        """

    def load(self, path: Path, *, threads: int = 1, verify: bool = True, trust: bool = False) -> Engine:
        """Load an engine file, to run on ``threads`` threads of the CPU.

        Args:
            path: the file.
            threads: of the CPU.
            verify: compare the file with its checksum.
            trust: run native code in the file that this process has not built; see ``utils/cpu.py``.

        Raises:
            EngineError: the file is missing, damaged or cannot be run here, or holds native code that is not trusted.
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
        """Run an engine file on made-up inputs and report the precision of its layers.

        Args:
            path: what ``load`` takes.
            threads: threads of the CPU.
            sizes: of the dynamic dimensions of the inputs.
            runs: how many runs the time of a layer is the median of.
            trust: as in ``load``.

        Raises:
            EngineError: the file is missing or cannot be run here, or holds native code that is not trusted.
            MissingDependencyError: the library is not installed.
        """


def shown(engine: Engine) -> str:
    """Return an engine in one line: its backend, its inputs and its outputs; the ``__repr__`` of engines."""
    inputs = ", ".join(map(str, engine.inputs))
    return f"{type(engine).__name__}({engine.name!r}, {inputs} -> {', '.join(engine.output_names)})"


def checked_inputs(engine: str, specs: Sequence[TensorSpec], inputs: Any) -> dict[str, Array]:
    """Return ``inputs``, arrays or tensors by name, as contiguous arrays in the order of ``specs``.

    An engine of one input takes it without its name, too.

    Raises:
        EngineError: one is missing or unknown, is no array, or has another type or shape than its spec; or two of them
            differ in a dimension of one name.
    """
    names = [spec.name for spec in specs]
    if not isinstance(inputs, Mapping):
        if len(specs) != 1:
            raise EngineError(
                f"{engine} engine: it has {len(specs)} inputs and was given one {type(inputs).__name__}; it takes a "
                f"mapping of {_listed(specs)}"
            )
        inputs = {names[0]: inputs}
    if wrong := [name for name in names if name not in inputs]:
        raise EngineError(f"{engine} engine: input {', '.join(map(repr, wrong))} is missing; it takes {_listed(specs)}")
    if wrong := [name for name in inputs if name not in names]:
        raise EngineError(f"{engine} engine: it has no input {', '.join(map(repr, wrong))}; it takes {_listed(specs)}")
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


def _listed(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(str(spec) for spec in specs)


def _as_array(engine: str, spec: TensorSpec, value: Any) -> Array:
    try:
        # A tensor may be on another device or require gradients; duck typing avoids an import of torch.
        return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value, order="C")
    except (RuntimeError, TypeError, ValueError) as error:
        # A type that numpy lacks, such as bfloat16; rows of several lengths; a tensor without values.
        held = getattr(value, "dtype", None)
        what = type(value).__name__ if held is None else f"{type(value).__name__} of {held}"
        raise EngineError(
            f"{engine} engine: input {spec.name!r} is a {what} that is no array ({error}), expected {spec}"
        ) from error


def _check_shared(engine: str, specs: Sequence[TensorSpec], arrays: Mapping[str, Array]) -> None:
    """Raise if inputs differ in a dimension of one name.

    The libraries do not check this, and one of them returns the result of an earlier call. A size of 1, which would
    broadcast, is an error too: the file states that the two dimensions are equal.
    """
    first: dict[str, tuple[int, str, int]] = {}
    for spec in specs:
        for axis, (name, size) in enumerate(zip(spec.dimensions, arrays[spec.name].shape, strict=False)):
            if not name:
                continue
            other, where, place = first.setdefault(name, (size, spec.name, axis))
            if size != other:
                raise EngineError(
                    f"{engine} engine: dimension {name!r} is {other} in input {where!r} (axis {place}) and {size} in "
                    f"input {spec.name!r} (axis {axis}): pass one size, or give the two axes names of their own when "
                    "the model is exported (dynamic_axes)"
                )


def in_kind(inputs: Any, names: Iterable[str], arrays: Iterable[npt.NDArray[Any]]) -> dict[str, Any]:
    """Return the outputs of an engine by name, in the kind of its inputs."""
    given = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    # A tensor is told by duck typing, so that arrays need no import of torch.
    device = next((value.device for value in given if hasattr(value, "detach")), None)
    if device is None:
        return dict(zip(names, arrays, strict=True))
    import torch

    writable = (array if array.flags.writeable else array.copy() for array in map(np.asarray, arrays))
    return {name: torch.from_numpy(array).to(device) for name, array in zip(names, writable, strict=True)}


T = TypeVar("T")


class Pool(Generic[T]):
    """Objects of one kind, each in use by at most one call: a call takes a free one, or makes one.

    There are as many as there were calls at one time, whatever threads those came from: threads that end leave nothing
    behind. The last one that came back is the next one taken, whose memory is still in the cache.

    Taking and giving back are one operation of a list each, which no other thread interrupts, so no lock is needed.
    """

    def __init__(self, make: Callable[[], T], *first: T) -> None:
        self._make = make
        self._free = [*first]

    def take(self) -> T:
        """Return an object for the caller alone, who gives it back unless its call failed."""
        try:
            return self._free.pop()
        except IndexError:
            return self._make()

    def give_back(self, one: T) -> None:
        """Return an object to the pool."""
        self._free.append(one)
