"""Modules of torch for the nodes of a graph that compute with weights of the file."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from quantizer.engines.torch_engine.graph_file import LoweredGraph
from quantizer.interop.onnx.operations import Lstm

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
class Made:
    """A module in the place of nodes of a graph.

    Attributes:
        module: the module.
        inputs: the nodes that it reads.
        last: the last of the nodes that it stands for: the sum with its bias, or the node itself.
    """

    module: nn.Module
    inputs: tuple[fx.Node, ...]
    last: fx.Node


class Weights:
    """The constants of a graph as parameters; what is one constant in the file is one parameter."""

    def __init__(self, owner: LoweredGraph) -> None:
        self._owner = owner
        self._parameters: dict[tuple[str, bool], nn.Parameter] = {}

    def tensor(self, node: Any) -> Tensor | None:
        """Return the constant that a node reads; None for a node that reads none."""
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            return None
        found: Tensor = operator.attrgetter(str(node.target))(self._owner)
        return found

    def parameter(self, node: fx.Node, *, turned: bool = False) -> nn.Parameter:
        """Return the constant that a node reads, with two axes exchanged if it is ``turned``."""
        key = str(node.target), turned
        if key not in self._parameters:
            tensor = self.tensor(node)
            assert tensor is not None
            self._parameters[key] = nn.Parameter(tensor.t().contiguous() if turned else tensor)
        return self._parameters[key]

    def set(self, module: nn.Module, **nodes: Any) -> None:
        """Set parameters and buffers of a module; a node of None stands for a parameter that the module lacks."""
        for name, node in nodes.items():
            if name in module._buffers:
                module.register_buffer(name, self.tensor(node))
            else:
                module.register_parameter(name, None if node is None else self.parameter(node))


def weighted_module(node: fx.Node, weights: Weights) -> Made | None:
    """Return the module for a node that computes with weights of the file; None for any other."""
    make = _MAKERS.get(node.target)
    return None if make is None else make(node, weights)


def _linear(node: fx.Node, weights: Weights) -> Made | None:
    given, right = _arguments(node)
    turned = True
    if isinstance(right, fx.Node) and right.target is aten.permute.default and _arguments(right)[1] == [1, 0]:
        right, turned = right.args[0], False
    weight = weights.tensor(right)
    if weight is None or weight.dim() != 2 or not weight.is_floating_point() or not _is_computed(given):
        return None
    parameter = weights.parameter(right, turned=turned)
    features = parameter.shape
    bias, last = _bias(node, weights, features[0])
    module = _empty(nn.Linear, features[1], features[0], bias=bias is not None)
    module.register_parameter("weight", parameter)
    weights.set(module, bias=bias)
    return Made(module, (given,), last)


def _bias(node: fx.Node, weights: Weights, channels: int) -> tuple[fx.Node | None, fx.Node]:
    """Return the constant that is added to a product and to nothing else, and the node that adds it."""
    reader = next(iter(node.users)) if len(node.users) == 1 else None
    if reader is None or reader.target is not aten.add.Tensor or reader.kwargs or len(reader.args) != 2:
        return None, node
    left, right = _arguments(reader)
    other = right if left is node else left
    tensor = weights.tensor(other)
    if tensor is None or tuple(tensor.shape) != (channels,):
        return None, node
    return other, reader


def _convolution(node: fx.Node, weights: Weights) -> Made | None:
    given, kernel, bias, stride, padding, dilation, transposed, output_padding, groups = _arguments(node)
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
    return Made(module, (given,), node)


def _embedding(node: fx.Node, weights: Weights) -> Made | None:
    table, indices = _arguments(node)
    weight = weights.tensor(table)
    if weight is None or not _is_computed(indices) or not weight.is_floating_point():
        return None
    module = _empty(nn.Embedding, *weight.shape)
    weights.set(module, weight=table)
    return Made(module, (indices,), node)


def _batch_norm(node: fx.Node, weights: Weights) -> Made | None:
    given, scale, shift, mean, variance, _, _, epsilon, _ = _arguments(node)
    constant = weights.tensor(scale)
    axes = _axes_behind_channels(given)
    if constant is None or axes is None or any(weights.tensor(value) is None for value in (shift, mean, variance)):
        return None
    module = _empty(_BATCH_NORMS[axes], constant.numel(), eps=epsilon)
    weights.set(module, weight=scale, bias=shift, running_mean=mean, running_var=variance)
    return Made(module, (given,), node)


def _axes_behind_channels(node: fx.Node) -> int | None:
    """Return how many axes an activation has behind its channels, if the convolution before it tells; else None."""
    for _ in range(_SEARCHED):
        if node.target is aten.convolution.default:
            return len(_arguments(node)[3])
        if not node.args or not isinstance(node.args[0], fx.Node):
            return None
        node = node.args[0]
    return None


_SEARCHED = 8
"""How many nodes before a batch normalization are looked at for the convolution."""


def _layer_norm(node: fx.Node, weights: Weights) -> Made | None:
    given, shape, weight, bias, epsilon = _arguments(node)
    if weights.tensor(weight) is None or (bias is not None and weights.tensor(bias) is None):
        return None
    module = _empty(nn.LayerNorm, list(shape), eps=epsilon, bias=bias is not None)
    weights.set(module, weight=weight, bias=bias)
    return Made(module, (given,), node)


def _recurrent(node: fx.Node, weights: Weights) -> Made | None:
    given, states, parameters, has_bias, layers, _, _, bidirectional, batch_first = _arguments(node)
    given_weight, recurrent_weight = (weights.tensor(parameter) for parameter in parameters[:2])
    # The importer takes constants alone.
    assert given_weight is not None
    assert recurrent_weight is not None
    module = _empty(
        _RECURRENT[node.target],
        given_weight.shape[1],
        recurrent_weight.shape[1],
        num_layers=layers,
        bias=bool(has_bias),
        batch_first=batch_first,
        bidirectional=bool(bidirectional),
    )
    for name, parameter in zip([name for name, _ in module.named_parameters()], parameters, strict=True):
        # Not register_parameter: the layer keeps a list of its parameters, too.
        setattr(module, name, weights.parameter(parameter))
    return Made(module, (given, *(states if isinstance(states, (list, tuple)) else [states])), node)


_RECURRENT: dict[Any, Callable[..., nn.Module]] = {
    aten.lstm.input: Lstm,
    aten.gru.input: nn.GRU,
    aten.rnn_tanh.input: nn.RNN,
    aten.rnn_relu.input: partial(nn.RNN, nonlinearity="relu"),
}

_MAKERS: dict[Any, Callable[[fx.Node, Weights], Made | None]] = {
    aten.matmul.default: _linear,
    aten.convolution.default: _convolution,
    aten.embedding.default: _embedding,
    aten.batch_norm.default: _batch_norm,
    aten.layer_norm.default: _layer_norm,
    **dict.fromkeys(_RECURRENT, _recurrent),
}


def _empty(cls: Callable[..., nn.Module], *args: Any, **keywords: Any) -> nn.Module:
    """Return a module without values: its tensors are set from the file."""
    return cls(*args, **keywords, device="meta")


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a call, whose types its operator fixes."""
    return node.args


def _is_computed(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op != "get_attr"
