"""Registry of backends by name; functions that build, load and inspect an engine of one.

``backends.add("name")(SomeBackend())`` in a file of its own adds one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from quantizer.common.registry import Registry
from quantizer.engines.base import Backend, BuildOptions, BuildResult, Engine
from quantizer.engines.cpu import cpu_instructions
from quantizer.engines.detect_backend import detect_backend
from quantizer.engines.engine_file import built_on
from quantizer.engines.inspection.from_layers import RUNS
from quantizer.engines.inspection.inspection import Inspection
from quantizer.errors import EngineError
from quantizer.qdq.unreadable import unreadable_is
from quantizer.targets import profile

backends: Registry[Backend] = Registry("backend")


def backend(name: str) -> Backend:
    """Return the backend ``name``.

    Raises:
        EngineError: no such backend; the message lists those there are.
    """
    if name not in backends.names():
        raise EngineError(f"unknown backend {name!r}; known: {', '.join(backends.names())}")
    return backends[name]


def build_engine(
    name: str, onnx_path: str | Path, engine_path: str | Path, options: BuildOptions | None = None
) -> BuildResult:
    """Build the ONNX file into one engine file of the backend ``name``.

    Args:
        name: a name from ``backends``.
        onnx_path: the file to read.
        engine_path: the file to write; its folder must exist. An older file there is replaced when all has gone well.
        options: None means the defaults of ``BuildOptions``.

    Raises:
        EngineError: unknown backend; the ONNX file is missing, broken or refused; the engine cannot be written.
        MissingDependencyError: the backend's library is not installed.
    """
    chosen, options, raised = backend(name), options or BuildOptions(), list[Exception]()
    if (told := options.progress) is not None:

        def progress(share: float, phase: str) -> None:
            try:
                told(share, phase)
            except Exception as error:
                raised.append(error)
                raise

        options = replace(options, progress=progress)
    try:
        with unreadable_is(EngineError, Path(onnx_path)):
            return chosen.build(Path(onnx_path), Path(engine_path), options)
    except EngineError as error:
        if raised and error.__cause__ is raised[0]:
            # The caller's own, not one of the file.
            raise raised[0] from None
        raise


def load_engine(name: str, path: str | Path, *, threads: int = 1, verify: bool = True, trust: bool = False) -> Engine:
    """Load an engine file of the backend ``name``; engines on a CPU also take an ``.onnx`` file.

    Where an engine was built on a CPU with instructions that this one lacks, a warning says so.

    Args:
        name: a name from ``backends``.
        path: the file.
        threads: threads of the CPU.
        verify: compare the file with the checksum in it, which reads it once more: without, a damaged engine may load,
            and give other outputs.
        trust: load a compiled torch engine, which is native code, also where this process has not built it.

    Raises:
        EngineError: unknown backend; a file that is missing, damaged, not of this backend, or cannot be run here; or
            native code that is not trusted.
        MissingDependencyError: the backend's library is not installed.
    """
    if threads < 1:
        raise EngineError(f"threads is {threads}, expected 1 or more")
    try:
        with _unreadable_onnx(Path(path)):
            loaded = backend(name).load(Path(path), threads=threads, verify=verify, trust=trust)
    except EngineError as error:
        other = _other_backend(name, Path(path))
        if other is None:
            raise
        raise EngineError(f"{path} is an engine of {other}, not of {name}: load_engine({other!r}, ...)") from error
    if backend(name).device == "cpu":
        _warn_of_another_cpu(Path(path))
    return loaded


def _other_backend(name: str, path: Path) -> str | None:
    """Return the backend whose library wrote a file, if that is not the library of ``name``."""
    try:
        found = detect_backend(path)
    except EngineError:
        return None
    return None if found is None or profile(found).library == profile(name).library else found


def _warn_of_another_cpu(path: Path) -> None:
    """Warn if this CPU lacks instructions of the one that an engine was built on: others may be faster here."""
    here = cpu_instructions()
    lacking = [name for name in built_on(path) if name not in here]
    if here and lacking:
        warnings.warn(
            f"{path} was built on a CPU with {', '.join(lacking)}, which this one lacks: it may be slower and less "
            "exact here; choose and build an engine here again",
            stacklevel=3,
        )


def inspect_engine(
    name: str,
    path: str | Path,
    *,
    threads: int = 1,
    batch: int = 8,
    sequence: int = 128,
    sizes: Mapping[str, int] = MappingProxyType({}),
    runs: int = RUNS,
    trust: bool = False,
) -> Inspection:
    """Report the precision of every layer, as the backend ``name`` itself states it.

    Args:
        name: a name from ``backends``.
        path: an engine file of that backend; engines on a CPU also take an ``.onnx`` file.
        threads: threads of the CPU.
        batch: size of the first dimension of an input, where it is dynamic.
        sequence: size of its other dynamic dimensions.
        sizes: sizes of dynamic dimensions by name, where they are known; they come before the two.
        runs: how many runs the time of a layer is the median of.
        trust: as in ``load_engine``.

    Raises:
        EngineError: unknown backend; a file that is missing, not of this backend, or cannot be run here; or native code
            that is not trusted.
        MissingDependencyError: the backend's library is not installed.
    """
    for word, value in (("threads", threads), ("batch", batch), ("sequence", sequence), ("runs", runs)):
        if value < 1:
            raise EngineError(f"{word} is {value}, expected 1 or more")
    with _unreadable_onnx(Path(path)):
        return backend(name).inspect(
            Path(path), threads=threads, batch=batch, sequence=sequence, sizes=sizes, runs=runs, trust=trust
        )


def _unreadable_onnx(path: Path) -> AbstractContextManager[None]:
    """Return the boundary of a file that is an ONNX file by its name."""
    return unreadable_is(EngineError, path) if path.suffix.lower() == ".onnx" else nullcontext()
