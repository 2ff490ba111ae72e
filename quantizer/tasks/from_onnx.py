"""``from_onnx``: a float ONNX file as a torch module.

The file becomes a graph of aten operators. MatMul, Conv, Gemm, embeddings and normalizations with weights in the file
become torch modules, so that they are quantized as in any other model. The result is a class of its own, whose
``forward`` is Python text in ``linecache``: ``inspect.getsource(type(model).forward)`` and tracebacks show it.
"""

from __future__ import annotations

import hashlib
import keyword
import linecache
import operator
import os
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from quantizer.errors import EngineError, TaskError
from quantizer.export.onnx_import.graph_builder import OperatorGraph
from quantizer.export.onnx_import.importer import import_graph
from quantizer.export.qdq.onnx_file import read_graph, unreadable_is
from quantizer.export.qdq.structure import files_of
from quantizer.utils.lazy import import_library


class MatMul(nn.Module):
    """The matrix multiplication of [..., M, K] and [..., K, N]."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the product [..., M, N]."""
        return torch.matmul(left, right)


class Add(nn.Module):
    """The sum of two tensors, whose shapes are broadcast."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the sum."""
        return left + right


class Lstm(nn.LSTM):
    """An LSTM whose states are separate arguments and results, as in an ONNX graph."""

    def forward(  # type: ignore[override]
        self, x: Tensor, hidden: Tensor, cell: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs [T, B, D H] and both states [D, B, H], from x [T, B, I] and the previous states."""
        outputs, (hidden, cell) = super().forward(x, (hidden, cell))
        return outputs, hidden, cell


_QUANTIZED = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger")
_QUANTIZED_STARTS = ("QLinear", "QGemm", "QAttention", "DynamicQuantize", "MatMulNBits")


def read_model(path: Path) -> Any:
    """Return the ``onnx.ModelProto`` of a float model; its external data stays in its file.

    Negative dimensions, which some tools write for dynamic ones, become dynamic.
    """
    onnx, model = import_library("onnx", "onnx"), read_graph(path, _leave_open)
    for node in _nodes(model.graph):
        if node.op_type in _QUANTIZED or node.op_type.startswith(_QUANTIZED_STARTS):
            raise TaskError(
                f"{path} is already quantized: node {node.name or node.output[0]!r} is a {node.op_type}; use the "
                "original float file"
            )
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _require_data(path, tensor)
    return model


def _leave_open(model: Any) -> None:
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.HasField("dim_value") and size.dim_value < 0:
                size.Clear()


def fix_inputs(model: Any, fixed: Mapping[str, Any]) -> None:
    """Turn inputs of a model into constants, and set the lengths of named dynamic axes."""
    onnx = import_library("onnx", "onnx")
    inputs = {value_info.name: value_info.type.tensor_type for value_info in model.graph.input}
    axes = {size.dim_param for tensor in inputs.values() for size in tensor.shape.dim if size.dim_param}
    unknown_names = sorted(set(fixed) - set(inputs) - axes)
    if unknown_names:
        raise TaskError(
            f"fixed names unknown inputs or axes {', '.join(map(repr, unknown_names))}; the model has the inputs "
            f"{', '.join(inputs)}, and the named "
            f"axes {', '.join(sorted(axes)) or '(none)'}"
        )
    for name, value in fixed.items():
        if name in inputs:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(inputs[name].elem_type)
            array = np.asarray(value, dtype)
            if array.ndim != len(inputs[name].shape.dim):
                raise TaskError(
                    f"fixed: {name!r} has {len(inputs[name].shape.dim)} axes in the model, but the value has "
                    f"{array.ndim}"
                )
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        elif not isinstance(value, int) or value < 1:
            raise TaskError(f"fixed: {name!r} is an axis with the length {value!r}; expected an integer of at least 1")
    for tensor in inputs.values():
        for size in tensor.shape.dim:
            if size.dim_param in fixed:
                size.dim_value = fixed[size.dim_param]


def _nodes(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a graph and its subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.g.node:
                yield from _nodes(attribute.g)


def _require_data(path: Path, tensor: Any) -> None:
    location = next(iter(files_of([tensor])), "")
    if not (path.parent / location).is_file():
        raise TaskError(
            f"{path} has weights such as {tensor.name!r} in the file {location!r} beside it, which is missing: "
            "copy both files into one folder, under their original names"
        )


aten = torch.ops.aten

_CONVOLUTIONS: dict[tuple[int, bool], type[nn.Module]] = {
    (1, False): nn.Conv1d,
    (2, False): nn.Conv2d,
    (3, False): nn.Conv3d,
    (1, True): nn.ConvTranspose1d,
    (2, True): nn.ConvTranspose2d,
    (3, True): nn.ConvTranspose3d,
}
_BATCH_NORMS: dict[int, type[nn.Module]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


@dataclass(frozen=True, slots=True)
class ModuleNodes:
    """A module that replaces nodes of a graph.

    Attributes:
        module: the module.
        inputs: the nodes that it reads.
        last: the last replaced node: the sum with the bias, or the node itself.
    """

    module: nn.Module
    inputs: tuple[fx.Node, ...]
    last: fx.Node


class Weights:
    """The constants of a graph as parameters, one per constant of the file."""

    def __init__(self, owner: OperatorGraph) -> None:
        self._owner = owner
        self._parameters: dict[tuple[str, bool], nn.Parameter] = {}

    def tensor(self, node: Any) -> Tensor | None:
        """Return the constant of a node; None for other nodes."""
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            return None
        tensor: Tensor = operator.attrgetter(str(node.target))(self._owner)
        return tensor

    def parameter(self, node: fx.Node, *, turned: bool = False) -> nn.Parameter:
        """Return the constant of a node as a parameter, transposed if ``turned``."""
        key = str(node.target), turned
        if key not in self._parameters:
            tensor = self.tensor(node)
            assert tensor is not None
            self._parameters[key] = nn.Parameter(tensor.t().contiguous() if turned else tensor)
        return self._parameters[key]

    def set(self, module: nn.Module, **nodes: Any) -> None:
        """Set parameters and buffers of a module from nodes; None sets a parameter to None."""
        for name, node in nodes.items():
            if name in module._buffers:
                module.register_buffer(name, self.tensor(node))
            else:
                module.register_parameter(name, None if node is None else self.parameter(node))


def weighted_module(node: fx.Node, weights: Weights) -> ModuleNodes | None:
    """Return the module for a node that computes with constant weights; None for other nodes."""
    make = _MAKERS.get(node.target)
    return None if make is None else make(node, weights)


def _linear(node: fx.Node, weights: Weights) -> ModuleNodes | None:
    data, right = _arguments(node)
    turned = True
    if isinstance(right, fx.Node) and right.target is aten.permute.default and _arguments(right)[1] == [1, 0]:
        right, turned = right.args[0], False
    weight = weights.tensor(right)
    if weight is None or weight.dim() != 2 or not weight.is_floating_point() or not _is_computed(data):
        return None
    parameter = weights.parameter(right, turned=turned)
    features = parameter.shape
    bias, last = _bias(node, weights, features[0])
    module = _empty(nn.Linear, features[1], features[0], bias=bias is not None)
    module.register_parameter("weight", parameter)
    weights.set(module, bias=bias)
    return ModuleNodes(module, (data,), last)


def _bias(node: fx.Node, weights: Weights, channels: int) -> tuple[fx.Node | None, fx.Node]:
    """Return the constant bias added to the only use of a node, and the node of that addition; without one, None and
    the node.
    """
    reader = next(iter(node.users)) if len(node.users) == 1 else None
    if reader is None or reader.target is not aten.add.Tensor or reader.kwargs or len(reader.args) != 2:
        return None, node
    left, right = _arguments(reader)
    other = right if left is node else left
    tensor = weights.tensor(other)
    if tensor is None or tuple(tensor.shape) != (channels,):
        return None, node
    return other, reader


def _convolution(node: fx.Node, weights: Weights) -> ModuleNodes | None:
    data, kernel, bias, stride, padding, dilation, transposed, output_padding, groups = _arguments(node)
    weight = weights.tensor(kernel)
    axes = len(stride)
    if weight is None or (bias is not None and weights.tensor(bias) is None) or (axes, transposed) not in _CONVOLUTIONS:
        return None
    channels = (weight.shape[1] * groups, weight.shape[0])
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "bias": bias is not None}
    if transposed:
        channels = (weight.shape[0], weight.shape[1] * groups)
        options["output_padding"] = output_padding
    sizes = {name: tuple(value) if isinstance(value, list | tuple) else value for name, value in options.items()}
    module = _empty(_CONVOLUTIONS[axes, bool(transposed)], *channels, tuple(weight.shape[2:]), **sizes)
    weights.set(module, weight=kernel, bias=bias)
    return ModuleNodes(module, (data,), node)


def _embedding(node: fx.Node, weights: Weights) -> ModuleNodes | None:
    table, indices = _arguments(node)
    weight = weights.tensor(table)
    if weight is None or not _is_computed(indices) or not weight.is_floating_point():
        return None
    module = _empty(nn.Embedding, *weight.shape)
    weights.set(module, weight=table)
    return ModuleNodes(module, (indices,), node)


def _batch_norm(node: fx.Node, weights: Weights) -> ModuleNodes | None:
    data, scale, shift, mean, variance, _, _, epsilon, _ = _arguments(node)
    constant = weights.tensor(scale)
    axes = _axes_behind_channels(data)
    if constant is None or axes is None or any(weights.tensor(value) is None for value in (shift, mean, variance)):
        return None
    module = _empty(_BATCH_NORMS[axes], constant.numel(), eps=epsilon)
    weights.set(module, weight=scale, bias=shift, running_mean=mean, running_var=variance)
    return ModuleNodes(module, (data,), node)


def _axes_behind_channels(node: fx.Node) -> int | None:
    """Return the number of axes after the channels of an activation, from the convolution before; None if unknown."""
    for _ in range(_SEARCHED):
        if node.target is aten.convolution.default:
            return len(_arguments(node)[3])
        if not node.args or not isinstance(node.args[0], fx.Node):
            return None
        node = node.args[0]
    return None


_SEARCHED = 8
"""The most nodes between a convolution and its batch normalization."""


def _layer_norm(node: fx.Node, weights: Weights) -> ModuleNodes | None:
    data, shape, weight, bias, epsilon = _arguments(node)
    if weights.tensor(weight) is None or (bias is not None and weights.tensor(bias) is None):
        return None
    module = _empty(nn.LayerNorm, list(shape), eps=epsilon, bias=bias is not None)
    weights.set(module, weight=weight, bias=bias)
    return ModuleNodes(module, (data,), node)


def _recurrent(node: fx.Node, weights: Weights) -> ModuleNodes | None:
    data, states, parameters, has_bias, layers, _, _, bidirectional, batch_first = _arguments(node)
    input_weight, recurrent_weight = (weights.tensor(parameter) for parameter in parameters[:2])
    # The importer accepts constants only.
    assert input_weight is not None
    assert recurrent_weight is not None
    module = _empty(
        _RECURRENT[node.target],
        input_weight.shape[1],
        recurrent_weight.shape[1],
        num_layers=layers,
        bias=bool(has_bias),
        batch_first=batch_first,
        bidirectional=bool(bidirectional),
    )
    for name, parameter in zip([name for name, _ in module.named_parameters()], parameters, strict=True):
        # register_parameter would not update the layer's own list of parameters.
        setattr(module, name, weights.parameter(parameter))
    return ModuleNodes(module, (data, *(states if isinstance(states, (list, tuple)) else [states])), node)


_RECURRENT: dict[Any, Callable[..., nn.Module]] = {
    aten.lstm.input: Lstm,
    aten.gru.input: nn.GRU,
    aten.rnn_tanh.input: nn.RNN,
    aten.rnn_relu.input: partial(nn.RNN, nonlinearity="relu"),
}

_MAKERS: dict[Any, Callable[[fx.Node, Weights], ModuleNodes | None]] = {
    aten.matmul.default: _linear,
    aten.convolution.default: _convolution,
    aten.embedding.default: _embedding,
    aten.batch_norm.default: _batch_norm,
    aten.layer_norm.default: _layer_norm,
    **dict.fromkeys(_RECURRENT, _recurrent),
}


def _empty(cls: Callable[..., nn.Module], *args: Any, **keywords: Any) -> nn.Module:
    """Return a module on the meta device; its tensors are set from the file."""
    return cls(*args, **keywords, device="meta")


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a call as Any; its operator determines their types."""
    return node.args


def _is_computed(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op != "get_attr"


_NO_LETTERS = re.compile(r"\W+", re.ASCII)


class OnnxModule(nn.Module):
    """Base class of modules from ONNX files.

    Attributes:
        source: the name of the file.
        arguments: the name of each argument of ``forward``, by the name of the input in the file.
        nodes: the path of the module for each ONNX node with one, by node name; other nodes are lines of ``forward``.
    """

    source: str
    arguments: dict[str, str]
    nodes: dict[str, str]

    def extra_repr(self) -> str:
        """Return the source for ``repr``."""
        return f"from {self.source}"


def identifier(name: str, used: set[str]) -> str:
    """Return a unique Python identifier for an ONNX name, and add it to ``used``."""
    plain = _NO_LETTERS.sub("_", name).strip("_") or "node"
    if plain[0].isdigit() or keyword.iskeyword(plain):
        plain = f"n{plain}"
    unique, number = plain, 1
    while unique in used or hasattr(nn.Module, unique):
        unique, number = f"{plain}_{number}", number + 1
    used.add(unique)
    return unique


def module_of(graph: fx.Graph, root: nn.Module, source: str) -> OnnxModule:
    """Return a module that computes a graph."""
    code = graph.python_code("self")
    name = "".join(part.capitalize() for part in identifier(source.rpartition(".")[0] or source, set()).split("_"))
    # A file such as none.onnx would give a keyword.
    name = f"{name}_" if keyword.iskeyword(name) else name
    text = f"class {name}:\n{textwrap.indent(code.src.strip(), '    ')}\n"
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    file = f"<onnx {source} {digest}>"
    # With None as modification time, linecache.checkcache keeps the entry.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {**code.globals, "torch": torch, "__name__": __name__}
    forward = types.FunctionType(_forward_code(compile(text, file, "exec")), namespace, "forward")
    cls = type(name, (OnnxModule,), {"forward": forward, "__module__": __name__})
    module: OnnxModule = cls()
    for child_name, child in root.named_children():
        module.add_module(child_name, child)
    for parameter_name, parameter in root.named_parameters(recurse=False):
        module.register_parameter(parameter_name, parameter)
    for buffer_name, buffer in root.named_buffers(recurse=False):
        module.register_buffer(buffer_name, buffer)
    module.source = source
    return module.eval()


def _forward_code(code: types.CodeType) -> types.CodeType:
    """Return the code of the only function of the only class in a module's code, without running any of it."""
    (of_class,) = (inner for inner in code.co_consts if isinstance(inner, types.CodeType))
    (of_function,) = (inner for inner in of_class.co_consts if isinstance(inner, types.CodeType))
    return of_function


_OF_TWO: Mapping[Any, type[nn.Module]] = {aten.matmul.default: MatMul, aten.add.Tensor: Add}


class ModuleGraph:
    """A graph with modules, built from a graph of aten operators.

    Attributes:
        graph: the new graph.
        root: its modules, parameters and buffers.
        arguments: the names of its arguments, by the names of the inputs.
        paths: the path of the module for each ONNX node with one, by node name.
    """

    def __init__(self, old: OperatorGraph, names: tuple[str, ...]) -> None:
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
            # Added only when read: most are weights of modules.
            return node
        if node.op == "output":
            output: fx.Node = self.graph.output(fx.map_arg(node.args[0], self._read))
            return output
        replacement = weighted_module(node, self._weights) or _of_two_tensors(node)
        return self._call_function(node) if replacement is None else self._call_module(node, replacement)

    def _call_function(self, node: fx.Node) -> fx.Node:
        args, keywords = fx.map_arg((node.args, node.kwargs), self._read)
        return self.graph.create_node("call_function", node.target, args, keywords, name=self._name(node))

    def _call_module(self, node: fx.Node, replacement: ModuleNodes) -> fx.Node:
        name = self._name(node)
        self.root.add_module(name, replacement.module)
        self.paths[str(node.meta.get("onnx", name))] = name
        inputs = tuple(self._read(node_input) for node_input in replacement.inputs)
        called = self.graph.create_node("call_module", name, inputs, {}, name=name)
        if replacement.last is not node:
            # The module includes the addition of the bias.
            self._skipped.add(replacement.last)
            self._new[replacement.last] = called
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


def with_modules(old: OperatorGraph, names: tuple[str, ...]) -> ModuleGraph:
    """Return a graph that computes the same as ``old``, with modules for MatMul, Conv, Gemm and normalizations."""
    return ModuleGraph(old, names)


def _of_two_tensors(node: fx.Node) -> ModuleNodes | None:
    """Return the module for a MatMul or Add of two activations; None for other nodes."""
    module_type = _OF_TWO.get(node.target)
    if module_type is None or len(node.args) != 2 or node.kwargs:
        return None
    operands = [operand for operand in node.args if isinstance(operand, fx.Node)]
    constants = [operand for operand in operands if operand.op == "get_attr"]
    if len(operands) != 2 or (constants and module_type is Add):
        return None
    return ModuleNodes(module_type(), tuple(operands), node)


def _turns_constant(node: fx.Node) -> bool:
    (source, *_) = (*node.args, None)
    return node.target is aten.permute.default and isinstance(source, fx.Node) and source.op == "get_attr"


def _is_trained(tensor: Tensor) -> bool:
    """Return whether a constant is trainable: floating point, and more than one number."""
    return tensor.is_floating_point() and tensor.numel() > 1


def from_onnx(path: str | os.PathLike[str], *, fixed: Mapping[str, Any] | None = None) -> OnnxModule:
    """Return a torch module that computes the same as a float ONNX file.

    ``forward`` takes the inputs of the file, by position or by name. Characters other than letters, digits and ``_`` in
    a name become ``_``. It returns the only output, or a dictionary of several. Nodes with weights become
    ``nn.Linear``, ``nn.Conv2d`` and similar modules under their node names. Dynamic axes stay dynamic.

    Args:
        path: the file; external weights lie at the location that it names.
        fixed: constant values of inputs, by name, and lengths of named dynamic axes: for example, an input that selects
            the branch of an ``If``.

    Raises:
        TaskError: the file is missing, not an ONNX file, damaged or already quantized, its weights are missing, or it
            has an operator without a counterpart; the message names the node.
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
    graph_with_modules = with_modules(imported.module, tuple(spec.name for spec in imported.inputs))
    _name_outputs(graph_with_modules.graph, imported.outputs)
    module = module_of(graph_with_modules.graph, graph_with_modules.root, file.name)
    module.arguments, module.nodes = graph_with_modules.arguments, graph_with_modules.paths
    return module


def _name_outputs(graph: Any, names: tuple[str, ...]) -> None:
    """Make a graph return its only output, or a dictionary of several."""
    node = next(iter(reversed(graph.nodes)))
    (outputs,) = node.args
    node.args = (outputs[0] if len(names) == 1 else dict(zip(names, outputs, strict=True)),)
