"""A graph of aten operators with its products as modules: ``nn.Linear``, ``nn.Conv2d`` and others.

A product that the file computes with a weight of its own is a module of torch with that weight, as in a model that was
written in torch, so that it is found, gets a scale for each output channel, and has its bias with it.

``from_onnx``: a float ONNX file as a torch module, which is then quantized as any other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from quantizer.engines.torch_engine.graph_file import LoweredGraph
from quantizer.engines.torch_engine.onnx_import.importer import import_graph
from quantizer.errors import EngineError, TaskError
from quantizer.interop.onnx.graph_module import OnnxModule, identifier, module_of
from quantizer.interop.onnx.operations import Add, MatMul
from quantizer.interop.onnx.read_model import fix_inputs, read_model
from quantizer.interop.onnx.weighted import Made, Weights, weighted_module
from quantizer.qdq.unreadable import unreadable_is

aten = torch.ops.aten

_OF_TWO: Mapping[Any, type[nn.Module]] = {aten.matmul.default: MatMul, aten.add.Tensor: Add}


class ModuleGraph:
    """The new graph, while it is made of the old one.

    Attributes:
        graph: the new graph.
        root: its modules, parameters and buffers.
        arguments: the names of its arguments, by the names of the inputs.
        paths: the path of the module that an ONNX node became, by the node's name.
    """

    def __init__(self, old: LoweredGraph, names: tuple[str, ...]) -> None:
        """
        Args:
            old: the graph of aten operators.
            names: of its inputs, in order.
        """
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.paths: dict[str, str] = {}
        self._taken: set[str] = {"self"}
        self._weights = Weights(old)
        self.arguments = {name: identifier(name, self._taken) for name in names}
        self._arguments = iter(self.arguments.values())
        self._new: dict[fx.Node, fx.Node] = {}
        self._skipped: set[fx.Node] = set()
        for node in old.graph.nodes:
            if node not in self._skipped:
                self._new[node] = self._add(node)

    def _add(self, node: fx.Node) -> fx.Node:
        if node.op == "placeholder":
            return self.graph.placeholder(next(self._arguments))
        if node.op == "get_attr" or _turns_constant(node):
            # Added when something reads it: most are the weights of modules.
            return node
        if node.op == "output":
            output: fx.Node = self.graph.output(fx.map_arg(node.args[0], self._read))
            return output
        made = weighted_module(node, self._weights) or _of_two_tensors(node)
        return self._call_function(node) if made is None else self._call_module(node, made)

    def _call_function(self, node: fx.Node) -> fx.Node:
        args, keywords = fx.map_arg((node.args, node.kwargs), self._read)
        return self.graph.create_node("call_function", node.target, args, keywords, name=self._name(node))

    def _call_module(self, node: fx.Node, made: Made) -> fx.Node:
        name = self._name(node)
        self.root.add_module(name, made.module)
        self.paths[str(node.meta.get("onnx", name))] = name
        inputs = tuple(self._read(given) for given in made.inputs)
        called = self.graph.create_node("call_module", name, inputs, {}, name=name)
        if made.last is not node:
            # The sum with the bias is part of the module.
            self._skipped.add(made.last)
            self._new[made.last] = called
        return called

    def _name(self, node: fx.Node) -> str:
        return identifier(str(node.meta.get("onnx") or node.name), self._taken)

    def _read(self, node: fx.Node) -> fx.Node:
        new: fx.Node = self._new[node]
        if new is not node:
            return new
        if node.op == "call_function":
            self._new[node] = self._call_function(node)
            return self._new[node]
        tensor = self._weights.tensor(node)
        assert tensor is not None
        name = identifier(str(node.meta.get("onnx") or node.name), self._taken)
        if _is_trained(tensor):
            self.root.register_parameter(name, self._weights.parameter(node))
        else:
            self.root.register_buffer(name, tensor)
        self._new[node] = self.graph.get_attr(name)
        return self._new[node]


def with_modules(old: LoweredGraph, names: tuple[str, ...]) -> ModuleGraph:
    """Return a graph that computes what ``old`` does, with modules for its products and normalizations."""
    return ModuleGraph(old, names)


def _of_two_tensors(node: fx.Node) -> Made | None:
    """Return the module for a product or a sum of two tensors that are computed; None for anything else."""
    made = _OF_TWO.get(node.target)
    if made is None or len(node.args) != 2 or node.kwargs:
        return None
    operands = [given for given in node.args if isinstance(given, fx.Node)]
    constants = [given for given in operands if given.op == "get_attr"]
    if len(operands) != 2 or (constants and made is Add):
        return None
    return Made(made(), tuple(operands), node)


def _turns_constant(node: fx.Node) -> bool:
    (given, *_) = (*node.args, None)
    return node.target is aten.permute.default and isinstance(given, fx.Node) and given.op == "get_attr"


def _is_trained(tensor: Tensor) -> bool:
    """Return whether a constant is one that training would change: a number alone is a part of a formula."""
    return tensor.is_floating_point() and tensor.numel() > 1


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
