"""Inspection of an engine; if it cannot run here, of what its graph asks for, marked as not verified.

Check that an engine runs in the precision that its graph asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from quantizer.engines.backends import backend, inspect_engine
from quantizer.engines.detect_backend import detect_backend
from quantizer.engines.inspection.from_layers import is_product, named
from quantizer.engines.inspection.inspection import LOW_PRECISIONS, Inspection
from quantizer.engines.inspection.onnx_graph import graph_inspection
from quantizer.errors import EngineError


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


LEAST_SHARE = 0.5
"""The least part of the work that a graph asks for in low precision that an engine has to do in it.

Libraries leave single products in floats, with good reason: a head of three rows, an attention that is fused in floats.
Below one half it is the graph that they did not take: the other half is then slower than the float model, for what it
quantizes and dequantizes around it.
"""

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
