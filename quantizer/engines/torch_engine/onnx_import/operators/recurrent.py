"""LSTM, as the operator of torch; its weights are constants, which are put in torch's order."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import fx

from quantizer.engines.torch_engine.onnx_import.graph_builder import Constant
from quantizer.engines.torch_engine.onnx_import.graph_builder import GraphBuilder
from quantizer.engines.torch_engine.onnx_import.graph_builder import OnnxNode
from quantizer.engines.torch_engine.onnx_import.graph_builder import Value
from quantizer.engines.torch_engine.onnx_import.graph_builder import as_tensor
from quantizer.engines.torch_engine.onnx_import.graph_builder import operators

__all__: list[str] = []

aten = torch.ops.aten

_GATES = (0, 2, 3, 1)
"""ONNX lists the gates as input, output, forget and cell; torch as input, forget, cell and output."""
_PLAIN = ("activations", "activation_alpha", "activation_beta", "clip", "input_forget", "layout")


@operators.add("LSTM")
def _lstm(build: GraphBuilder, node: OnnxNode) -> tuple[Value, ...]:
    unusual = [name for name in _PLAIN if node.attributes.get(name) and not _is_default(node, name)]
    direction = node.attributes.get("direction", "forward")
    if unusual or direction == "reverse" or node.input(4) is not None or node.input(7) is not None:
        raise node.fault("lengths, peepholes, other activations and a reversed direction alone are not supported")
    if not all(isinstance(node.input(place), Constant) for place in (1, 2)):
        raise node.fault("weights that are computed are not supported")
    given = build.tensor(node.inputs[0])
    weights = _weights(build, node)
    directions, hidden = 2 if direction == "bidirectional" else 1, int(node.attributes["hidden_size"])
    states = [_state(build, given, node.input(place), directions, hidden) for place in (5, 6)]
    has_bias, train, batch_first = node.input(3) is not None, False, False
    found = build.call(aten.lstm.input, given, states, weights, has_bias, 1, 0.0, train, directions == 2, batch_first)
    every, last, cell = (build.call(operator.getitem, found, place) for place in range(3))
    # torch has the directions side by side [T, B, D * H]; ONNX in an axis of their own [T, D, B, H].
    apart = build.call(aten.unflatten.int, every, 2, [directions, hidden])
    return build.call(aten.permute.default, apart, [0, 2, 1, 3]), last, cell


def _is_default(node: OnnxNode, name: str) -> bool:
    given = [value.decode() if isinstance(value, bytes) else value for value in node.attributes[name]]
    return name == "activations" and given == ["Sigmoid", "Tanh", "Tanh"] * (len(given) // 3)


def _weights(build: GraphBuilder, node: OnnxNode) -> list[fx.Node]:
    found = []
    arrays: list[Any] = [value.array if isinstance(value, Constant) else None for value in node.inputs[1:4]]
    for direction in range(len(arrays[0])):
        parts = [arrays[0][direction], arrays[1][direction]]
        if arrays[2] is not None:
            parts += np.split(arrays[2][direction], 2)
        names = ("weight", "recurrent_weight", "bias", "recurrent_bias")
        for name, part in zip(names, parts, strict=False):
            gates = np.split(part, 4)
            ordered = np.concatenate([gates[place] for place in _GATES])
            found.append(build.buffer(f"{node.name}.{name}.{direction}", as_tensor(ordered)))
    return found


def _state(build: GraphBuilder, given: fx.Node, start: Value | None, directions: int, hidden: int) -> fx.Node:
    if start is not None:
        return build.tensor(start)
    rows = build.call(aten.sym_size.int, given, 1)
    return build.call(aten.full.default, [directions, rows, hidden], 0.0)
