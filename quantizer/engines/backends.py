"""Registry of backends, and functions that build, load, recognize and inspect their engines.

``backends.add("name")(SomeBackend())`` in a separate file registers one.
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
from quantizer.utils import gpu
from quantizer.utils.cpu import cpu_instructions
from quantizer.utils.paths import existing_file
from quantizer.utils.records import LEAST_SHARE, LOW_PRECISIONS, Inspection
from quantizer.utils.registry import Registry, named_in_errors

_HEAD = 256


def detect_backend(path: Path) -> str | None:
    """Return the backend that built an engine file; None for an ONNX file.

    Raises:
        EngineError: the file is missing or empty, or is neither an ONNX file nor a recognized engine. TensorRT's own
            files are not recognized.
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
            f"{path} is neither an ONNX file nor a recognized engine; for an engine, specify its backend with --backend"
        ) from error
    domains = {node.domain for node in read_graph(path).graph.node}
    return next((name for name in profiles.names() if profile(name).file_domains & domains), None)


backends: Registry[Backend] = Registry(
    "backend", of="object", has=("name", "device", "check", "build", "load", "inspect")
)


def backend(name: str) -> Backend:
    """Return the backend ``name``.

    Raises:
        EngineError: the backend does not exist; the message lists all backends.
    """
    if name not in backends.names():
        raise EngineError(f"unknown backend {name!r}; known: {', '.join(backends.names())}")
    return backends[name]


def build_engine(
    name: str, onnx_path: str | Path, engine_path: str | Path, options: BuildOptions | None = None
) -> BuildResult:
    """Build an engine file of the backend ``name`` from an ONNX file.

    Args:
        name: a name of ``backends``.
        onnx_path: the file to read.
        engine_path: the file to write; its folder must exist. An existing file is replaced after a successful build.
        options: None: the defaults of ``BuildOptions``.

    Raises:
        EngineError: unknown backend; the ONNX file is missing, broken or refused; the engine cannot be written.
        MissingDependencyError: the backend's library is not installed.
    """
    selected, options, raised = backend(name), options or BuildOptions(), list[Exception]()
    if (report := options.progress) is not None:

        def progress(share: float, phase: str) -> None:
            try:
                report(share, phase)
            except Exception as error:
                raised.append(error)
                raise

        options = replace(options, progress=progress)
    source, destination, started = Path(onnx_path), Path(engine_path), time.perf_counter()
    options.check_for(selected)
    checked_onnx(source)
    checked_output(destination, source)
    try:
        with unreadable_is(EngineError, source), named_in_errors(f"backend {name!r}"):
            messages = selected.build(source, destination, options)
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise EngineError(f"backend {name!r}: build() returned {messages!r}; expected a list of warnings")
        if not destination.is_file():
            raise EngineError(f"backend {name!r}: build() did not write {destination}")
        return BuildResult(destination, destination.stat().st_size, time.perf_counter() - started, tuple(messages))
    except EngineError as error:
        if raised and error.__cause__ is raised[0]:
            # Raise the caller's error unchanged.
            raise raised[0] from None
        raise


def load_engine(
    name: str,
    path: str | Path,
    *,
    threads: int = 1,
    verify: bool = True,
    trust: bool = False,
) -> Engine:
    """Load an engine file of the backend ``name``; engines on a CPU and of torch-cuda also accept an ``.onnx`` file.

    A warning is raised if the engine was built on a CPU with instructions that this CPU lacks.

    Args:
        name: a name of ``backends``.
        path: the file.
        threads: number of CPU threads.
        verify: compare the file with the checksum in it, which reads it once more. Without it, a damaged engine may
            load and return wrong outputs.
        trust: load a compiled torch engine, which is native code, even if this process has not built it.

    Raises:
        EngineError: unknown backend; the file is missing, damaged, of another backend, or cannot run here; or it
            contains native code that is not trusted.
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
        raise EngineError(f"{path} is an engine of {other}, not of {name}: call load_engine({other!r}, ...)") from error
    missing = [each for each in ("name", "device", "inputs", "output_names", "__call__") if not hasattr(loaded, each)]
    if missing:
        raise EngineError(
            f"backend {name!r}: load() returned an object of {type(loaded).__name__}, which has no "
            f"{', '.join(missing)}; expected an engine"
        )
    if loaded.device == "cpu":
        _warn_of_another_cpu(Path(path))
    return loaded


def _other_backend(name: str, path: Path) -> str | None:
    """Return the backend whose library wrote a file, if it differs from the library of ``name``; else None."""
    try:
        detected = detect_backend(path)
    except EngineError:
        return None
    return None if detected is None or profile(detected).library == profile(name).library else detected


def _warn_of_another_cpu(path: Path) -> None:
    """Warn if an engine was built on a CPU with instructions that this CPU lacks."""
    here = cpu_instructions()
    missing = [name for name in built_on(path) if name not in here]
    if here and missing:
        warnings.warn(
            f"{path} was built on a CPU with {', '.join(missing)}, which this CPU lacks: it may be slower and less "
            "accurate here; choose and build an engine on this CPU",
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
    """Return the precision of every layer of an engine, as its backend reports it.

    Args:
        name: a name of ``backends``.
        path: an engine file of that backend; engines on a CPU also accept an ``.onnx`` file.
        threads: number of CPU threads.
        sizes: sizes of the dynamic dimensions of the inputs.
        runs: number of runs for the median time of a layer.
        trust: as in ``load_engine``.

    Raises:
        EngineError: unknown backend; the file is missing, of another backend, or cannot run here; or it contains native
            code that is not trusted.
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
    """Return ``unreadable_is`` for a file with the suffix ``.onnx``, else a null context."""
    return unreadable_is(EngineError, path) if path.suffix.lower() == ".onnx" else nullcontext()


def runs_here(name: str) -> bool:
    """Return whether this machine has the device of the backend's engines.

    Raises:
        EngineError: unknown backend.
    """
    return backend(name).device == "cpu" or gpu.is_present()


def observe_engine(
    name: str,
    path: Path,
    onnx_path: Path,
    *,
    threads: int = 1,
    sizes: InputSizes = USUAL_SIZES,
    required: bool = True,
) -> Inspection:
    """Inspect a new engine, and raise if it lacks the requested precision.

    Args:
        name: its backend.
        path: the engine file.
        onnx_path: the ONNX file from which it was built.
        threads: number of CPU threads.
        sizes: sizes of the dynamic dimensions of the inputs.
        required: whether a lack of precision is an error; False: only the inspection reports it.

    Raises:
        EngineError: the engine cannot run, or lacks the precision.
        MissingDependencyError: a library is not installed.
    """
    requested = graph_inspection(onnx_path, _not_run_reason(name), sizes=sizes)
    if not runs_here(name):
        return replace(requested, backend=name)
    observed = inspect_engine(name, path, threads=threads, sizes=sizes)
    if required:
        check_precision(observed, requested)
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
        name: its backend; None: detected from the file. An ONNX file without a backend is not run.
        threads: number of CPU threads.
        sizes: sizes of the dynamic dimensions of the inputs.
        trust: run native code that this process has not built.

    Raises:
        EngineError: the file is missing, damaged, or of another backend; it cannot be inspected here; or it contains
            native code that is not trusted.
        MissingDependencyError: a library is not installed.
    """
    name = name or detect_backend(path)
    if name is None:
        return graph_inspection(path, "an ONNX file is not an engine", sizes=sizes)
    if runs_here(name):
        return inspect_engine(name, path, threads=threads, sizes=sizes, trust=trust)
    source = path.with_suffix(".onnx")
    if not source.is_file():
        return Inspection(backend=name, verified=False, note=f"{_not_run_reason(name)}, and {source} does not exist")
    return replace(graph_inspection(source, _not_run_reason(name), sizes=sizes), backend=name)


def _not_run_reason(name: str) -> str:
    return f"an engine of {name} needs an NVIDIA GPU, which this machine lacks"


_SHOWN = 10


def check_precision(observed: Inspection, graph: Inspection) -> None:
    """Raise if an engine computes less than ``LEAST_SHARE`` of the low-precision work of its graph.

    Shares of multiply-adds are compared, or shares of operations if the engine does not report all multiply-adds. An
    engine that was not run passes.

    Args:
        observed: inspection of the engine.
        graph: inspection of the ONNX file from which it was built, at the same sizes.

    Raises:
        EngineError: the engine lacks the precision; the message lists the operations and their actual precision.
    """
    expected, actual = graph.low_share(), observed.low_share()
    if not observed.verified or not expected or actual is None or actual >= LEAST_SHARE * expected:
        return
    low_layers = [layer for layer in graph.layers if is_product(layer) and layer.precision in LOW_PRECISIONS]
    kinds = ", ".join(dict.fromkeys(named(layer.precision) for layer in low_layers))
    names = {layer.name for layer in low_layers}
    wide = [layer for layer in observed.layers if is_product(layer) and layer.precision not in LOW_PRECISIONS]
    # Use the node names of the graph where the engine kept them.
    known = [(node, layer) for layer in wide for node in layer.nodes if node in names]
    lines = [
        f"  - {name} runs in {named(layer.precision)} ({layer.type})"
        for name, layer in known or [(layer.name, layer) for layer in wide]
    ]
    more = [f"  - and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    raise EngineError(
        f"the {observed.backend} engine lacks the requested precision: the graph requests {kinds} for {expected:.1%} "
        f"of the work, the engine computes {actual:.1%} in it, less than {LEAST_SHARE:.0%} of that:\n"
        + "\n".join([*lines[:_SHOWN], *more])
        + "".join(f"\n  {reason}" for reason in observed.reasons)
        + "\nexport for this backend (quantizer.backend), or check the file against it"
    )
