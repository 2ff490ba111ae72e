"""Products of matrices, convolutions, and pooling."""

from __future__ import annotations

from typing import Any

import torch

from quantizer.engines.torch_engine.onnx_import.graph_builder import GraphBuilder, OnnxNode, Value, operators

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
    made = _scaled(build, build.call(aten.matmul.default, left, right), node.attributes.get("alpha", 1.0))
    if node.input(2) is None:
        return made
    bias = _scaled(build, build.tensor(node.inputs[2]), node.attributes.get("beta", 1.0))
    return build.call(aten.add.Tensor, made, bias)


def _scaled(build: GraphBuilder, made: torch.fx.Node, factor: float) -> torch.fx.Node:
    return made if factor == 1.0 else build.call(aten.mul.Scalar, made, factor)


@operators.add("Einsum")
def _einsum(build: GraphBuilder, node: OnnxNode) -> Value:
    operands = [build.tensor(value) for value in node.inputs]
    return build.call(aten.einsum.default, node.attributes["equation"].replace(" ", ""), operands)


def _window(build: GraphBuilder, node: OnnxNode, kernel: int) -> tuple[Any, dict[str, Any]]:
    """Return the input, padded where torch cannot pad as ONNX asks, and stride, padding and dilation."""
    before, after = _pads(node, kernel)
    given = build.tensor(node.inputs[0])
    if before != after:
        order = [size for axis in reversed(range(kernel)) for size in (before[axis], after[axis])]
        least = float("-inf") if node.operator == "MaxPool" else 0.0
        given, before = build.call(aten.constant_pad_nd.default, given, order, least), [0] * kernel
    return given, {
        "stride": list(node.attributes.get("strides", [1] * kernel)),
        "padding": before,
        "dilation": list(node.attributes.get("dilations", [1] * kernel)),
    }


def _pads(node: OnnxNode, kernel: int) -> tuple[list[int], list[int]]:
    """Return how much an input is padded before and behind, along each axis of the kernel."""
    asked = node.attributes.get("auto_pad", "NOTSET")
    pads = node.attributes.get("pads", [0] * 2 * kernel) if asked == "NOTSET" else [0] * 2 * kernel
    if asked in ("NOTSET", "VALID"):
        return list(pads[:kernel]), list(pads[kernel:])
    weight = node.attributes.get("kernel_shape") or (node.shapes[1] or ())[2:]
    strides = node.attributes.get("strides", [1] * kernel)
    dilations = node.attributes.get("dilations", [1] * kernel)
    whole = []
    for axis, (length, step, dilation) in enumerate(zip(weight, strides, dilations, strict=True)):
        reach, size = (length - 1) * dilation, (node.shapes[0] or (None,) * (kernel + 2))[axis + 2]
        if node.operator == "ConvTranspose" or (step > 1 and size is None):
            raise node.fault(f"auto_pad {asked} of an input of unknown sizes is not supported; export the model again")
        whole.append(reach if step == 1 or size is None else max((-(-size // step) - 1) * step + reach + 1 - size, 0))
    small, large = [total // 2 for total in whole], [total - total // 2 for total in whole]
    return (small, large) if asked == "SAME_UPPER" else (large, small)


@operators.add("Conv")
def _conv(build: GraphBuilder, node: OnnxNode) -> Value:
    return _convolution(build, node, transposed=False)


@operators.add("ConvTranspose")
def _conv_transpose(build: GraphBuilder, node: OnnxNode) -> Value:
    return _convolution(build, node, transposed=True)


def _convolution(build: GraphBuilder, node: OnnxNode, *, transposed: bool) -> Value:
    rank = node.ranks[0] or node.ranks[1]
    if rank is None:
        raise node.fault("the rank of its input is not known; export the model again")
    given, window = _window(build, node, rank - 2)
    if transposed and given is not build.tensor(node.inputs[0]):
        raise node.fault("uneven padding is not supported")
    bias = None if node.input(2) is None else build.tensor(node.inputs[2])
    return build.call(
        aten.convolution.default,
        given,
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
    given, window = _window(build, node, len(kernel))
    ceil = bool(node.attributes.get("ceil_mode", 0))
    target = {1: aten.max_pool1d.default, 2: aten.max_pool2d.default, 3: aten.max_pool3d.default}[len(kernel)]
    return build.call(target, given, kernel, window["stride"], window["padding"], window["dilation"], ceil)


@operators.add("AveragePool")
def _average_pool(build: GraphBuilder, node: OnnxNode) -> Value:
    kernel = list(node.attributes["kernel_shape"])
    pads = node.attributes.get("pads", [0] * 2 * len(kernel))
    if pads[: len(kernel)] != pads[len(kernel) :]:
        raise node.fault("uneven padding is not supported")
    given, window = _window(build, node, len(kernel))
    if any(step != 1 for step in window["dilation"]):
        raise node.fault("dilations are not supported")
    ceil, counted = bool(node.attributes.get("ceil_mode", 0)), bool(node.attributes.get("count_include_pad", 0))
    target = {1: aten.avg_pool1d.default, 2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}[len(kernel)]
    return build.call(target, given, kernel, window["stride"], window["padding"], ceil, counted)
