"""Backends by name, and functions that build, load, recognize and inspect an engine of one.

``backends.add("name")(SomeBackend())`` in a file of its own adds one.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from quantizer.engines.base import USUAL_SIZES, Backend, BuildOptions, BuildResult, Engine, InputSizes
from quantizer.engines.engine_file import built_on, checked_output
from quantizer.engines.inspection import RUNS, is_product, named
from quantizer.engines.onnx_graph import graph_inspection
from quantizer.errors import EngineError
from quantizer.export.qdq.onnx_file import checked_onnx, read_graph, unreadable_is
from quantizer.plan.targets import profile, profiles
from quantizer.utils.cpu import cpu_instructions
from quantizer.utils.paths import existing_file
from quantizer.utils.records import LEAST_SHARE, LOW_PRECISIONS, Inspection
from quantizer.utils.registry import Registry, named_in_errors

_HEAD = 256


def detect_backend(path: Path) -> str | None:
    """Return the backend that built an engine file; None for an ONNX file.

    Raises:
        EngineError: the file is missing or empty, or its first bytes are not those of a known engine or of an ONNX
            file. The format of TensorRT's own files is not recognized.
    """
    try:
        with existing_file(path).open("rb") as stream:
            head = stream.read(_HEAD)
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror or error}") from error
    for name in profiles.names():
        magic = profile(name).file_magic
        if magic is not None and re.match(magic, head, re.DOTALL):
            return name
    try:
        checked_onnx(path)
    except EngineError as error:
        raise EngineError(
            f"{path} is neither an ONNX file nor an engine that is known by its first bytes; "
            "where it is an engine all the same, say of which backend with --backend"
        ) from error
    domains = {node.domain for node in read_graph(path).graph.node}
    return next((name for name in profiles.names() if profile(name).file_domains & domains), None)


backends: Registry[Backend] = Registry(
    "backend", of="object", has=("name", "device", "check", "build", "load", "inspect")
)


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
    source, place, started = Path(onnx_path), Path(engine_path), time.perf_counter()
    options.check_for(chosen)
    checked_onnx(source)
    checked_output(place, source)
    try:
        with unreadable_is(EngineError, source), named_in_errors(f"backend {name!r}"):
            messages = chosen.build(source, place, options)
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise EngineError(f"backend {name!r}: build() returned {messages!r}; expected a list of warnings")
        if not place.is_file():
            raise EngineError(f"backend {name!r}: build() wrote no file {place}")
        return BuildResult(place, place.stat().st_size, time.perf_counter() - started, tuple(messages))
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
        with _unreadable_onnx(Path(path)), named_in_errors(f"backend {name!r}"):
            loaded = backend(name).load(Path(path), threads=threads, verify=verify, trust=trust)
    except EngineError as error:
        other = _other_backend(name, Path(path))
        if other is None:
            raise
        raise EngineError(f"{path} is an engine of {other}, not of {name}: load_engine({other!r}, ...)") from error
    lacking = [each for each in ("name", "device", "inputs", "output_names", "__call__") if not hasattr(loaded, each)]
    if lacking:
        raise EngineError(
            f"backend {name!r}: load() returned an object of {type(loaded).__name__}, which has no "
            f"{', '.join(lacking)}; expected an engine"
        )
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
    sizes: InputSizes = USUAL_SIZES,
    runs: int = RUNS,
    trust: bool = False,
) -> Inspection:
    """Report the precision of every layer, as the backend ``name`` itself states it.

    Args:
        name: a name from ``backends``.
        path: an engine file of that backend; engines on a CPU also take an ``.onnx`` file.
        threads: threads of the CPU.
        sizes: of the dynamic dimensions of the inputs.
        runs: how many runs the time of a layer is the median of.
        trust: as in ``load_engine``.

    Raises:
        EngineError: unknown backend; a file that is missing, not of this backend, or cannot be run here; or native code
            that is not trusted.
        MissingDependencyError: the backend's library is not installed.
    """
    for word, value in (("threads", threads), ("batch", sizes.batch), ("sequence", sizes.sequence), ("runs", runs)):
        if value < 1:
            raise EngineError(f"{word} is {value}, expected 1 or more")
    with _unreadable_onnx(Path(path)), named_in_errors(f"backend {name!r}"):
        inspected = backend(name).inspect(Path(path), threads=threads, sizes=sizes, runs=runs, trust=trust)
    if not isinstance(inspected, Inspection):
        raise EngineError(f"backend {name!r}: inspect() returned {inspected!r}; expected an Inspection")
    return inspected


def _unreadable_onnx(path: Path) -> AbstractContextManager[None]:
    """Return the boundary of a file that is an ONNX file by its name."""
    return unreadable_is(EngineError, path) if path.suffix.lower() == ".onnx" else nullcontext()


def runs_here(name: str) -> bool:
    """Return whether this machine has the device that engines of the backend ``name`` run on.

    Raises:
        EngineError: unknown backend.
    """
    if backend(name).device == "cpu":
        return True
    import torch

    return bool(torch.cuda.is_available())


def observe_engine(
    name: str,
    path: Path,
    onnx_path: Path,
    *,
    threads: int = 1,
    sizes: InputSizes = USUAL_SIZES,
    required: bool = True,
) -> Inspection:
    """Inspect an engine that was just built, and raise if it lacks the precision that was asked for.

    Args:
        name: its backend.
        path: the engine file.
        onnx_path: the ONNX file that it was built from.
        threads: threads of the CPU.
        sizes: of the dynamic dimensions of the inputs.
        required: whether a lack is an error; False: the inspection tells it.

    Raises:
        EngineError: it cannot be run, or lacks the precision.
        MissingDependencyError: a library is not installed.
    """
    asked = graph_inspection(onnx_path, _why(name), sizes=sizes)
    if not runs_here(name):
        return replace(asked, backend=name)
    observed = inspect_engine(name, path, threads=threads, sizes=sizes)
    if required:
        check_precision(observed, asked)
    return observed


def inspect_file(
    path: Path,
    name: str | None = None,
    *,
    threads: int = 1,
    sizes: InputSizes = USUAL_SIZES,
    trust: bool = False,
) -> Inspection:
    """Inspect an engine or ONNX file of any backend.

    Args:
        path: the file.
        name: its backend; None: detected from the file. An ONNX file that belongs to none is not run.
        threads: threads of the CPU.
        sizes: of the dynamic dimensions of the inputs.
        trust: run native code in the file that this process has not built.

    Raises:
        EngineError: the file is missing, damaged, or of another backend; it cannot be inspected here; or it holds
            native code that is not trusted.
        MissingDependencyError: a library is not installed.
    """
    name = name or detect_backend(path)
    if name is None:
        return graph_inspection(path, "an ONNX file is no engine", sizes=sizes)
    if runs_here(name):
        return inspect_engine(name, path, threads=threads, sizes=sizes, trust=trust)
    source = path.with_suffix(".onnx")
    if not source.is_file():
        return Inspection(backend=name, verified=False, note=f"{_why(name)}; nor is there {source} to read")
    return replace(graph_inspection(source, _why(name), sizes=sizes), backend=name)


def _why(name: str) -> str:
    return f"an engine of {name} runs on an NVIDIA GPU, and there is none here"


_SHOWN = 10


def check_precision(observed: Inspection, graph: Inspection) -> None:
    """Raise if an engine does less than ``LEAST_SHARE`` of what its graph asks for in low precision.

    Shares of multiply-adds are compared; shares of products if an engine does not state all multiply-adds. An engine
    that could not be observed passes.

    Args:
        observed: of the engine.
        graph: of the ONNX file that it was built from, at the same sizes.

    Raises:
        EngineError: it lacks the precision; the message names the products and what the engine makes of them.
    """
    asked, got = graph.low_share(), observed.low_share()
    if not observed.verified or not asked or got is None or got >= LEAST_SHARE * asked:
        return
    wanted = [layer for layer in graph.layers if is_product(layer) and layer.precision in LOW_PRECISIONS]
    kinds = ", ".join(dict.fromkeys(named(layer.precision) for layer in wanted))
    names = {layer.name for layer in wanted}
    wide = [layer for layer in observed.layers if is_product(layer) and layer.precision not in LOW_PRECISIONS]
    # By the graph's names where the engine kept them, else by its own.
    found = [(node, layer) for layer in wide for node in layer.nodes if node in names]
    lines = [
        f"  - {name} runs in {named(layer.precision)} ({layer.type})"
        for name, layer in found or [(layer.name, layer) for layer in wide]
    ]
    more = [f"  - and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    raise EngineError(
        f"the {observed.backend} engine lacks the precision that was asked for: the graph asks for {kinds} in "
        f"{asked:.1%} of the work, the engine does {got:.1%}, less than {LEAST_SHARE:.0%} of that:\n"
        + "\n".join([*lines[:_SHOWN], *more])
        + "".join(f"\n  {reason}" for reason in observed.reasons)
        + "\nexport for this backend (quantizer.backend), or check the file against it"
    )
