"""ONNX operators with weights: matrix multiplications, convolutions, pooling and recurrent layers."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from quantizer.export.onnx_import.graph_builder import Constant, GraphBuilder, OnnxNode, Value, as_tensor, operators

aten = torch.ops.aten


@operators.add("MatMul")
def _matmul(build: GraphBuilder, node: OnnxNode) -> Value:
    return build.call(aten.matmul.default, *(build.tensor(value) for value in node.inputs))


@operators.add("Gemm")
def _gemm(build: GraphBuilder, node: OnnxNode) -> Value:
    left, right = build.tensor(node.inputs[0]), build.tensor(node.inputs[1])
    if node.attributes.get("transA", 0):
        left = build.call(aten.permute.default, left, [1, 0])
    if node.attributes.get("transB", 0):
        right = build.call(aten.permute.default, right, [1, 0])
    result = _scaled(build, build.call(aten.matmul.default, left, right), node.attributes.get("alpha", 1.0))
    if node.input(2) is None:
        return result
    bias = _scaled(build, build.tensor(node.inputs[2]), node.attributes.get("beta", 1.0))
    return build.call(aten.add.Tensor, result, bias)


def _scaled(build: GraphBuilder, value: torch.fx.Node, factor: float) -> torch.fx.Node:
    return value if factor == 1.0 else build.call(aten.mul.Scalar, value, factor)


@operators.add("Einsum")
def _einsum(build: GraphBuilder, node: OnnxNode) -> Value:
    operands = [build.tensor(value) for value in node.inputs]
    return build.call(aten.einsum.default, node.attributes["equation"].replace(" ", ""), operands)


def _window(build: GraphBuilder, node: OnnxNode, kernel: int) -> tuple[Any, dict[str, Any]]:
    """Return the input, padded if torch cannot pad like ONNX, and stride, padding and dilation."""
    before, after = _pads(node, kernel)
    x = build.tensor(node.inputs[0])
    if before != after:
        order = [size for axis in reversed(range(kernel)) for size in (before[axis], after[axis])]
        least = float("-inf") if node.operator == "MaxPool" else 0.0
        x, before = build.call(aten.constant_pad_nd.default, x, order, least), [0] * kernel
    return x, {
        "stride": list(node.attributes.get("strides", [1] * kernel)),
        "padding": before,
        "dilation": list(node.attributes.get("dilations", [1] * kernel)),
    }


def _pads(node: OnnxNode, kernel: int) -> tuple[list[int], list[int]]:
    """Return the padding before and after each axis of the kernel."""
    auto_pad = node.attributes.get("auto_pad", "NOTSET")
    pads = node.attributes.get("pads", [0] * 2 * kernel) if auto_pad == "NOTSET" else [0] * 2 * kernel
    if auto_pad in ("NOTSET", "VALID"):
        return list(pads[:kernel]), list(pads[kernel:])
    weight = node.attributes.get("kernel_shape") or (node.shapes[1] or ())[2:]
    strides = node.attributes.get("strides", [1] * kernel)
    dilations = node.attributes.get("dilations", [1] * kernel)
    totals = []
    for axis, (length, step, dilation) in enumerate(zip(weight, strides, dilations, strict=True)):
        reach, size = (length - 1) * dilation, (node.shapes[0] or (None,) * (kernel + 2))[axis + 2]
        if node.operator == "ConvTranspose" or (step > 1 and size is None):
            raise node.error(f"auto_pad {auto_pad} with unknown input sizes is not supported; export the model again")
        totals.append(reach if step == 1 or size is None else max((-(-size // step) - 1) * step + reach + 1 - size, 0))
    small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return (small, large) if auto_pad == "SAME_UPPER" else (large, small)


@operators.add("Conv")
def _conv(build: GraphBuilder, node: OnnxNode) -> Value:
    return _convolution(build, node, transposed=False)


@operators.add("ConvTranspose")
def _conv_transpose(build: GraphBuilder, node: OnnxNode) -> Value:
    return _convolution(build, node, transposed=True)


def _convolution(build: GraphBuilder, node: OnnxNode, *, transposed: bool) -> Value:
    rank = node.ranks[0] or node.ranks[1]
    if rank is None:
        raise node.error("the rank of its input is unknown; export the model again")
    x, window = _window(build, node, rank - 2)
    if transposed and x is not build.tensor(node.inputs[0]):
        raise node.error("uneven padding is not supported")
    bias = None if node.input(2) is None else build.tensor(node.inputs[2])
    return build.call(
        aten.convolution.default,
        x,
        build.tensor(node.inputs[1]),
        bias,
        window["stride"],
        window["padding"],
        window["dilation"],
        transposed,
        list(node.attributes.get("output_padding", [0] * (rank - 2))),
        node.attributes.get("group", 1),
    )


@operators.add("MaxPool")
def _max_pool(build: GraphBuilder, node: OnnxNode) -> Value:
    kernel = list(node.attributes["kernel_shape"])
    x, window = _window(build, node, len(kernel))
    ceil = bool(node.attributes.get("ceil_mode", 0))
    target = {1: aten.max_pool1d.default, 2: aten.max_pool2d.default, 3: aten.max_pool3d.default}[len(kernel)]
    return build.call(target, x, kernel, window["stride"], window["padding"], window["dilation"], ceil)


@operators.add("AveragePool")
def _average_pool(build: GraphBuilder, node: OnnxNode) -> Value:
    kernel = list(node.attributes["kernel_shape"])
    pads = node.attributes.get("pads", [0] * 2 * len(kernel))
    if pads[: len(kernel)] != pads[len(kernel) :]:
        raise node.error("uneven padding is not supported")
    x, window = _window(build, node, len(kernel))
    if any(step != 1 for step in window["dilation"]):
        raise node.error("dilations are not supported")
    ceil, counted = bool(node.attributes.get("ceil_mode", 0)), bool(node.attributes.get("count_include_pad", 0))
    target = {1: aten.avg_pool1d.default, 2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}[len(kernel)]
    return build.call(target, x, kernel, window["stride"], window["padding"], ceil, counted)


_UNSUPPORTED = ("activation_alpha", "activation_beta", "clip", "input_forget", "layout")
_HIDDEN, _CELL, _PEEPHOLES = 5, 6, 7  # inputs of a node


@dataclass(frozen=True, slots=True)
class _Cell:
    """Recurrent operator of torch, with the order of its gates in ONNX's order, and its activations."""

    function: Any
    order: tuple[int, ...]
    activations: list[str]


# LSTM gates in ONNX: input, output, forget, cell; in torch: input, forget, cell, output.
# GRU gates in ONNX: update, reset, new; in torch: reset, update, new.
_LSTM = _Cell(aten.lstm.input, (0, 2, 3, 1), ["Sigmoid", "Tanh", "Tanh"])
_GRU = _Cell(aten.gru.input, (1, 0, 2), ["Sigmoid", "Tanh"])
_RNN = _Cell(aten.rnn_tanh.input, (0,), ["Tanh"])
_RNN_OF_RELU = _Cell(aten.rnn_relu.input, (0,), ["Relu"])


@operators.add("LSTM")
def _lstm(build: GraphBuilder, node: OnnxNode) -> tuple[Value, ...]:
    _check(node, _LSTM)
    states = [_state(build, node, place) for place in (_HIDDEN, _CELL)]
    return _run_cell(build, node, _LSTM, states)


@operators.add("GRU")
def _gru(build: GraphBuilder, node: OnnxNode) -> tuple[Value, ...]:
    _check(node, _GRU)
    if not node.attributes.get("linear_before_reset"):
        raise node.error(
            "linear_before_reset = 0 is not supported: torch applies the reset gate after the matrix multiplication"
        )
    return _run_cell(build, node, _GRU, _state(build, node, _HIDDEN))


@operators.add("RNN")
def _rnn(build: GraphBuilder, node: OnnxNode) -> tuple[Value, ...]:
    cell = _RNN_OF_RELU if "Relu" in _activations(node) else _RNN
    _check(node, cell)
    return _run_cell(build, node, cell, _state(build, node, _HIDDEN))


def _check(node: OnnxNode, cell: _Cell) -> None:
    """Raise for features that torch's recurrent operators lack."""
    activations = _activations(node)
    unusual = activations != cell.activations * (len(activations) // len(cell.activations))
    unusual = unusual or any(node.attributes.get(name) for name in _UNSUPPORTED)
    lengths, peepholes = node.input(4) is not None, cell is _LSTM and node.input(_PEEPHOLES) is not None
    if unusual or lengths or peepholes or node.attributes.get("direction") == "reverse":
        raise node.error(
            "sequence lengths, peepholes, other activations and only the reverse direction are not supported"
        )
    if not all(isinstance(node.input(place), Constant) for place in (1, 2)):
        raise node.error("computed weights are not supported; expected constants")


def _activations(node: OnnxNode) -> list[str]:
    return [value.decode() if isinstance(value, bytes) else value for value in node.attributes.get("activations", [])]


def _run_cell(build: GraphBuilder, node: OnnxNode, cell: _Cell, states: Any) -> tuple[Value, ...]:
    """Return all outputs and the last states of a recurrent node."""
    directions, has_bias = _directions(node), node.input(3) is not None
    x, weights = build.tensor(node.inputs[0]), _weights(build, node, cell)
    train, batch_first = False, False
    outputs = build.call(cell.function, x, states, weights, has_bias, 1, 0.0, train, directions == 2, batch_first)
    every, *last = (build.call(operator.getitem, outputs, place) for place in range(3 if cell is _LSTM else 2))
    # torch concatenates the directions, [T, B, D * H]; ONNX has an axis for them, [T, D, B, H].
    split = build.call(aten.unflatten.int, every, 2, [directions, int(node.attributes["hidden_size"])])
    return build.call(aten.permute.default, split, [0, 2, 1, 3]), *last


def _directions(node: OnnxNode) -> int:
    return 2 if node.attributes.get("direction") == "bidirectional" else 1


def _weights(build: GraphBuilder, node: OnnxNode, cell: _Cell) -> list[fx.Node]:
    weights = []
    values = [node.input(gate) for gate in (1, 2, 3)]
    arrays: list[Any] = [value.array if isinstance(value, Constant) else None for value in values]
    for direction in range(len(arrays[0])):
        parts = [arrays[0][direction], arrays[1][direction]]
        if arrays[2] is not None:
            parts += np.split(arrays[2][direction], 2)
        names = ("weight", "recurrent_weight", "bias", "recurrent_bias")
        for name, part in zip(names, parts, strict=False):
            gates = np.split(part, len(cell.order))
            ordered = np.concatenate([gates[gate] for gate in cell.order])
            weights.append(build.buffer(f"{node.name}.{name}.{direction}", as_tensor(ordered)))
    return weights


def _state(build: GraphBuilder, node: OnnxNode, place: int) -> fx.Node:
    start = node.input(place)
    if start is not None:
        return build.tensor(start)
    rows = build.call(aten.sym_size.int, build.tensor(node.inputs[0]), 1)
    return build.call(aten.full.default, [_directions(node), rows, int(node.attributes["hidden_size"])], 0.0)
