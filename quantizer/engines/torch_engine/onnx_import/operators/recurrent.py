"""LSTM, GRU and RNN, as the operators of torch; their weights are constants, which are put in torch's order."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from quantizer.engines.torch_engine.onnx_import.graph_builder import (
    Constant,
    GraphBuilder,
    OnnxNode,
    Value,
    as_tensor,
    operators,
)

aten = torch.ops.aten

_PLAIN = ("activation_alpha", "activation_beta", "clip", "input_forget", "layout")
_HIDDEN, _CELL, _PEEPHOLES = 5, 6, 7  # inputs of a node


@dataclass(frozen=True, slots=True)
class _Cell:
    """A recurrence of torch."""

    function: Any
    order: tuple[int, ...]
    activations: list[str]


# ONNX lists the gates of an LSTM as input, output, forget and cell, torch as input, forget, cell and output; those of a
# GRU as update, reset and new, torch as reset, update and new.
_LSTM = _Cell(aten.lstm.input, (0, 2, 3, 1), ["Sigmoid", "Tanh", "Tanh"])
_GRU = _Cell(aten.gru.input, (1, 0, 2), ["Sigmoid", "Tanh"])
_RNN = _Cell(aten.rnn_tanh.input, (0,), ["Tanh"])
_RNN_OF_RELU = _Cell(aten.rnn_relu.input, (0,), ["Relu"])


@operators.add("LSTM")
def _lstm(build: GraphBuilder, node: OnnxNode) -> tuple[Value, ...]:
    _check(node, _LSTM)
    states = [_state(build, node, place) for place in (_HIDDEN, _CELL)]
    return _called(build, node, _LSTM, states)


@operators.add("GRU")
def _gru(build: GraphBuilder, node: OnnxNode) -> tuple[Value, ...]:
    _check(node, _GRU)
    if not node.attributes.get("linear_before_reset"):
        raise node.fault("a reset before the product (linear_before_reset = 0) is not supported: torch resets after it")
    return _called(build, node, _GRU, _state(build, node, _HIDDEN))


@operators.add("RNN")
def _rnn(build: GraphBuilder, node: OnnxNode) -> tuple[Value, ...]:
    cell = _RNN_OF_RELU if "Relu" in _activations(node) else _RNN
    _check(node, cell)
    return _called(build, node, cell, _state(build, node, _HIDDEN))


def _check(node: OnnxNode, cell: _Cell) -> None:
    """Raise for what torch's recurrence does not compute."""
    given = _activations(node)
    unusual = given != cell.activations * (len(given) // len(cell.activations))
    unusual = unusual or any(node.attributes.get(name) for name in _PLAIN)
    lengths, peepholes = node.input(4) is not None, cell is _LSTM and node.input(_PEEPHOLES) is not None
    if unusual or lengths or peepholes or node.attributes.get("direction") == "reverse":
        raise node.fault("lengths, peepholes, other activations and a reversed direction alone are not supported")
    if not all(isinstance(node.input(place), Constant) for place in (1, 2)):
        raise node.fault("weights that are computed are not supported")


def _activations(node: OnnxNode) -> list[str]:
    return [value.decode() if isinstance(value, bytes) else value for value in node.attributes.get("activations", [])]


def _called(build: GraphBuilder, node: OnnxNode, cell: _Cell, states: Any) -> tuple[Value, ...]:
    """Return the outputs and the last states of a node."""
    directions, has_bias = _directions(node), node.input(3) is not None
    given, weights = build.tensor(node.inputs[0]), _weights(build, node, cell)
    train, batch_first = False, False
    found = build.call(cell.function, given, states, weights, has_bias, 1, 0.0, train, directions == 2, batch_first)
    every, *last = (build.call(operator.getitem, found, place) for place in range(3 if cell is _LSTM else 2))
    # torch has the directions side by side [T, B, D * H]; ONNX in an axis of their own [T, D, B, H].
    apart = build.call(aten.unflatten.int, every, 2, [directions, int(node.attributes["hidden_size"])])
    return build.call(aten.permute.default, apart, [0, 2, 1, 3]), *last


def _directions(node: OnnxNode) -> int:
    return 2 if node.attributes.get("direction") == "bidirectional" else 1


def _weights(build: GraphBuilder, node: OnnxNode, cell: _Cell) -> list[fx.Node]:
    found = []
    values = [node.input(place) for place in (1, 2, 3)]
    arrays: list[Any] = [value.array if isinstance(value, Constant) else None for value in values]
    for direction in range(len(arrays[0])):
        parts = [arrays[0][direction], arrays[1][direction]]
        if arrays[2] is not None:
            parts += np.split(arrays[2][direction], 2)
        names = ("weight", "recurrent_weight", "bias", "recurrent_bias")
        for name, part in zip(names, parts, strict=False):
            gates = np.split(part, len(cell.order))
            ordered = np.concatenate([gates[place] for place in cell.order])
            found.append(build.buffer(f"{node.name}.{name}.{direction}", as_tensor(ordered)))
    return found


def _state(build: GraphBuilder, node: OnnxNode, place: int) -> fx.Node:
    start = node.input(place)
    if start is not None:
        return build.tensor(start)
    rows = build.call(aten.sym_size.int, build.tensor(node.inputs[0]), 1)
    return build.call(aten.full.default, [_directions(node), rows, int(node.attributes["hidden_size"])], 0.0)
