"""The contract of an engine: numpy arrays in by name, numpy arrays out by name.

A backend makes engines. It builds an engine file from an ONNX file and loads it; it knows paths and arrays, and nothing
of proxies or PyTorch modules.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quantizer.engines.inspection.inspection import Inspection
from quantizer.errors import EngineError
from quantizer.targets import profile

__all__ = [
    "Array",
    "Backend",
    "BuildOptions",
    "BuildResult",
    "Engine",
    "Progress",
    "TensorSpec",
    "checked_inputs",
]

Array = npt.NDArray[Any]

Progress = Callable[[float, str], None]
"""Called with the share of a build that is done, in [0, 1] and never falling, and the name of the current phase."""


@dataclass(frozen=True)
class TensorSpec:
    """One input of an engine: its name, its type and its shape, with None for a dynamic dimension.

    Attributes:
        dimensions: the name of each axis in the ONNX file, empty where it has none; none at all: they are not known.
            Axes of one name have one size, in all inputs.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]
    dimensions: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.name}: {self.dtype}[{sizes}]"


class Engine(Protocol):
    """A model that is ready to run. Not for use from two threads at once."""

    @property
    def name(self) -> str:
        """The backend that made it, as a configuration names it."""

    @property
    def device(self) -> str:
        """Where it runs: ``cpu`` or ``cuda``."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Name, type and shape of each input."""

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs, all of them required."""

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs, in the order of the ONNX file."""

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """Run it once.

        Args:
            inputs: one array or ``torch.Tensor`` for each of ``input_names``, of the type and shape that ``inputs``
                states.

        Raises:
            EngineError: an input is missing, unknown, or of another type or shape; inputs differ in a dimension that
                they share; or the run failed.
        """


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How to build.

    Attributes:
        dynamic: smallest, usual and largest size of each dynamic dimension, by the name that it has in the ONNX file
            (``{"batch": (1, 8, 32)}``). TensorRT needs it; engines on a CPU take any size and ignore it.
        compute_capability: the GPU generations to build for ahead of time (``sm89``, or several of them in one
            engine), with TensorRT-RTX; None builds one engine for all from compute capability 8.0 on.
        inference_precision: what OpenVINO computes in where nothing is quantized, ``float32`` or ``bfloat16``; None:
            float32. The types of other engines are those of the file.
        strip_weights: write an engine of TensorRT without its weights, which it takes when it is loaded from the ONNX
            file. That has to be in the engine's folder, at either time.
        timing_cache: a file in which TensorRT keeps how fast kernels are on this GPU: read where it exists, written
            after the build. TensorRT-RTX has no such times.
        progress: told how far the build is.

    Raises:
        EngineError: a range that is not ``1 <= smallest <= usual <= largest``; an empty list of compute capabilities.
    """

    dynamic: Mapping[str, Sequence[int]] = field(default_factory=dict)
    compute_capability: str | Sequence[str] | None = None
    inference_precision: str | None = None
    strip_weights: bool = False
    timing_cache: Path | None = None
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

    def check_for(self, name: str) -> None:
        """Refuse what the backend ``name`` cannot be told.

        Raises:
            EngineError: an ``inference_precision`` that it has not, or ``strip_weights`` where it keeps them.
        """
        target = profile(name)
        reason = None if self.inference_precision is None else target.precision_reason(self.inference_precision)
        if reason is not None:
            raise EngineError(f"inference_precision: {reason}")
        if self.strip_weights and (reason := target.stripping_reason()) is not None:
            raise EngineError(f"strip_weights: {reason}")

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The compute capabilities, each once, in lower case; empty where none is named."""
        named = self.compute_capability or ()
        return tuple(dict.fromkeys(name.lower() for name in ((named,) if isinstance(named, str) else named)))


@dataclass(frozen=True)
class BuildResult:
    """A finished build: the engine file, its size in bytes, the time it took, and what the builder warned of."""

    path: Path
    size_bytes: int
    seconds: float
    warnings: tuple[str, ...] = ()


class Backend(Protocol):
    """Builds, loads and inspects the engines of one library. No method imports the library before it needs it."""

    @property
    def name(self) -> str:
        """The name that a configuration gives it."""

    @property
    def device(self) -> str:
        """Where its engines run: ``cpu`` or ``cuda``."""

    def check(self, options: BuildOptions) -> None:
        """Refuse what ``build`` would refuse whatever the ONNX file is: a build may come after an hour of work.

        Raises:
            EngineError: the options are not for this backend, or nothing can be built on this machine.
            MissingDependencyError: the library is not installed.
        """

    def build(self, onnx_path: Path, engine_path: Path, options: BuildOptions) -> BuildResult:
        """Write ``engine_path``, whole or not at all; without ``strip_weights`` it needs the ONNX file no more.

        Raises:
            EngineError: the ONNX file is missing, broken or refused, or the engine cannot be written.
            MissingDependencyError: the library is not installed.
        """

    def load(self, path: Path, *, threads: int = 1, verify: bool = True) -> Engine:
        """Load an engine file, to run on ``threads`` threads of the CPU.

        Args:
            path: the file.
            threads: of the CPU.
            verify: compare the file with its checksum.

        Raises:
            EngineError: the file is missing, damaged or cannot be run here.
            MissingDependencyError: the library is not installed.
        """

    def inspect(
        self, path: Path, *, threads: int = 1, batch: int = 8, sequence: int = 128, runs: int = 5
    ) -> Inspection:
        """Run an engine file on made-up inputs and ask the library what runs in which precision.

        Args:
            path: what ``load`` takes.
            threads: threads of the CPU.
            batch: size of the first dimension of an input, where it is dynamic.
            sequence: size of its other dynamic dimensions.

        Raises:
            EngineError: the file is missing or cannot be run here.
            MissingDependencyError: the library is not installed.
        """


def checked_inputs(engine: str, specs: Sequence[TensorSpec], inputs: Mapping[str, Any]) -> dict[str, Array]:
    """``inputs``, arrays or tensors, in the order of ``specs`` as contiguous arrays.

    Raises:
        EngineError: one is missing or unknown, is no array, or has another type or shape than its spec; or two of them
            differ in a dimension of one name.
    """
    expected = ", ".join(str(spec) for spec in specs)
    names = [spec.name for spec in specs]
    if wrong := [name for name in names if name not in inputs]:
        raise EngineError(f"{engine} engine: input {', '.join(map(repr, wrong))} is missing; it takes {expected}")
    if wrong := [name for name in inputs if name not in names]:
        raise EngineError(f"{engine} engine: it has no input {', '.join(map(repr, wrong))}; it takes {expected}")
    arrays: dict[str, Array] = {}
    for spec in specs:
        array = _array(engine, spec, inputs[spec.name])
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


def _array(engine: str, spec: TensorSpec, value: Any) -> Array:
    try:
        # A tensor may be on another device, or ask for gradients; torch itself is not needed to ask it.
        return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value, order="C")
    except (RuntimeError, TypeError, ValueError) as error:
        # A type that numpy has not, such as bfloat16; rows of several lengths; a tensor without values.
        held = getattr(value, "dtype", None)
        what = type(value).__name__ if held is None else f"{type(value).__name__} of {held}"
        raise EngineError(
            f"{engine} engine: input {spec.name!r} is a {what} that is no array ({error}), expected {spec}"
        ) from error


def _check_shared(engine: str, specs: Sequence[TensorSpec], arrays: Mapping[str, Array]) -> None:
    """Hold inputs to the dimensions that they share by name: libraries do not, and one returns a former call's result.

    A size of 1 that would broadcast is another size too: the file says that the two are equal, and what else goes by
    them is not known here.
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
