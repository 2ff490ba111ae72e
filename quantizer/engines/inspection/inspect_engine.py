"""Inspection of an engine; if it cannot run here, of what its graph asks for, marked as not verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from quantizer.engines.backends import backend, inspect_engine
from quantizer.engines.detect_backend import detect_backend
from quantizer.engines.inspection.check_precision import check_precision
from quantizer.engines.inspection.inspection import Inspection
from quantizer.engines.inspection.onnx_graph import graph_inspection


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
    batch: int = 8,
    sequence: int = 128,
    sizes: Mapping[str, int] = MappingProxyType({}),
    required: bool = True,
) -> Inspection:
    """Inspect an engine that was just built, and raise if it lacks the precision that was asked for.

    Args:
        name: its backend.
        path: the engine file.
        onnx_path: the ONNX file that it was built from.
        threads: threads of the CPU.
        batch: size of the first dimension of an input, where it is dynamic.
        sequence: size of its other dynamic dimensions.
        sizes: sizes of dynamic dimensions by name, where they are known; they come before the two.
        required: whether a lack is an error; False: the inspection tells it.

    Raises:
        EngineError: it cannot be run, or lacks the precision.
        MissingDependencyError: a library is not installed.
    """
    asked = graph_inspection(onnx_path, _why(name), batch=batch, sequence=sequence, sizes=sizes)
    if not runs_here(name):
        return replace(asked, backend=name)
    observed = inspect_engine(name, path, threads=threads, batch=batch, sequence=sequence, sizes=sizes)
    if required:
        check_precision(observed, asked)
    return observed


def inspect_file(
    path: Path,
    name: str | None = None,
    *,
    threads: int = 1,
    batch: int = 8,
    sequence: int = 128,
    trust: bool = False,
) -> Inspection:
    """Inspect an engine or ONNX file of any backend.

    Args:
        path: the file.
        name: its backend; None: detected from the file. An ONNX file that belongs to none is not run.
        threads: threads of the CPU.
        batch: size of the first dimension of an input, where it is dynamic.
        sequence: size of its other dynamic dimensions.
        trust: run native code in the file that this process has not built.

    Raises:
        EngineError: the file is missing, damaged, or of another backend; it cannot be inspected here; or it holds
            native code that is not trusted.
        MissingDependencyError: a library is not installed.
    """
    name = name or detect_backend(path)
    if name is None:
        return graph_inspection(path, "an ONNX file is no engine", batch=batch, sequence=sequence)
    if runs_here(name):
        return inspect_engine(name, path, threads=threads, batch=batch, sequence=sequence, trust=trust)
    source = path.with_suffix(".onnx")
    if not source.is_file():
        return Inspection(backend=name, verified=False, note=f"{_why(name)}; nor is there {source} to read")
    return replace(graph_inspection(source, _why(name), batch=batch, sequence=sequence), backend=name)


def _why(name: str) -> str:
    return f"an engine of {name} runs on an NVIDIA GPU, and there is none here"
