"""``from_onnx``: a float ONNX file as a torch module, which is then quantized as any other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantizer.engines.torch_engine.onnx_import.importer import import_graph
from quantizer.errors import EngineError, TaskError
from quantizer.interop.onnx.as_modules import with_modules
from quantizer.interop.onnx.graph_module import OnnxModule, module_of
from quantizer.interop.onnx.read_model import fix_inputs, read_model
from quantizer.qdq.unreadable import unreadable_is


def from_onnx(path: str | os.PathLike[str], *, fixed: Mapping[str, Any] | None = None) -> OnnxModule:
    """Return a torch module that computes what a float ONNX file does.

    Its ``forward`` takes the inputs of the file, by position or by name (what is no letter, digit or ``_`` in a name is
    ``_``), and returns the one output, or a dictionary of several. Products with weights are ``nn.Linear``,
    ``nn.Conv2d`` and the like, under the names of their nodes. Axes that are open in the file stay open.

    Args:
        path: the file; weights outside it lie where it says.
        fixed: inputs that never change, by name, with their values, and named axes, with their lengths: what decides
            which branch of an ``If`` runs, for example.

    Raises:
        TaskError: the file is missing, no ONNX file, damaged or quantized already, its weights are missing, or it has
            an operator, or a form of one, without a counterpart; the message names the node.
        MissingDependencyError: onnx is not installed.
    """
    file = Path(path)
    try:
        with unreadable_is(TaskError, file):
            return _read(file, fixed or {})
    except EngineError as error:
        where = "" if str(file) in str(error) else f"{file}: "
        raise TaskError(f"{where}{error}") from error


def _read(file: Path, fixed: Mapping[str, Any]) -> OnnxModule:
    model = read_model(file)
    fix_inputs(model, fixed)
    imported = import_graph(model, file.parent)
    made = with_modules(imported.module, tuple(spec.name for spec in imported.inputs))
    _name_outputs(made.graph, imported.outputs)
    module = module_of(made.graph, made.root, file.name)
    module.arguments, module.nodes = made.arguments, made.paths
    return module


def _name_outputs(graph: Any, names: tuple[str, ...]) -> None:
    """Let a graph return its one output alone, and several by their names."""
    node = next(iter(reversed(graph.nodes)))
    (outputs,) = node.args
    node.args = (outputs[0] if len(names) == 1 else dict(zip(names, outputs, strict=True)),)
