"""Normalizations and softmax."""

from __future__ import annotations

import torch

from quantizer.engines.torch_engine.onnx_import.graph_builder import (
    Constant,
    GraphBuilder,
    OnnxNode,
    Value,
    as_tensor,
    operators,
)

aten = torch.ops.aten


@operators.add("LayerNormalization")
def _layer_norm(build: GraphBuilder, node: OnnxNode) -> Value:
    weight = node.inputs[1]
    if not isinstance(weight, Constant):
        raise node.fault("a weight that is computed is not supported")
    given, bias = build.tensor(node.inputs[0]), node.input(2)
    return build.call(
        aten.layer_norm.default,
        given,
        list(weight.array.shape),
        build.tensor(weight),
        None if bias is None else build.tensor(bias),
        node.attributes.get("epsilon", 1e-5),
    )


@operators.add("RMSNormalization")
def _rms_norm(build: GraphBuilder, node: OnnxNode) -> Value:
    weight = node.inputs[1]
    if not isinstance(weight, Constant):
        raise node.fault("a weight that is computed is not supported")
    shape, epsilon = list(weight.array.shape), node.attributes.get("epsilon", 1e-5)
    return build.call(aten.rms_norm.default, build.tensor(node.inputs[0]), shape, build.tensor(weight), epsilon)


@operators.add("BatchNormalization")
def _batch_norm(build: GraphBuilder, node: OnnxNode) -> Value:
    given, weight, bias, mean, variance = (build.tensor(value) for value in node.inputs[:5])
    epsilon = node.attributes.get("epsilon", 1e-5)
    return build.call(aten.batch_norm.default, given, weight, bias, mean, variance, False, 0.0, epsilon, False)


@operators.add("GroupNormalization")
def _group_norm(build: GraphBuilder, node: OnnxNode) -> Value:
    given, weight, bias = node.inputs
    groups, epsilon = node.attributes["num_groups"], node.attributes.get("epsilon", 1e-5)
    weight, bias = (_of_channels(build, node, value, groups) for value in (weight, bias))
    return build.call(aten.group_norm.default, build.tensor(given), groups, weight, bias, epsilon)


def _of_channels(build: GraphBuilder, node: OnnxNode, value: Value | None, groups: int) -> Value:
    """Return a number for each channel: until opset 20 there was one for each group."""
    shape = node.shapes[0]
    channels = shape[1] if shape is not None and len(shape) > 1 else None
    if not isinstance(value, Constant) or value.array.size != groups or channels == groups:
        return build.tensor(value)
    if not isinstance(channels, int):
        raise node.fault("the number of its channels is not known; export the model again at opset 21 or later")
    return build.buffer(value.name, as_tensor(value.array.repeat(channels // groups)))


@operators.add("InstanceNormalization")
def _instance_norm(build: GraphBuilder, node: OnnxNode) -> Value:
    given, weight, bias = (build.tensor(value) for value in node.inputs)
    epsilon = node.attributes.get("epsilon", 1e-5)
    return build.call(aten.instance_norm.default, given, weight, bias, None, None, True, 0.0, epsilon, False)


@operators.add("Softmax")
def _softmax(build: GraphBuilder, node: OnnxNode) -> Value:
    return build.call(aten.softmax.int, build.tensor(node.inputs[0]), node.attributes.get("axis", -1))


@operators.add("LogSoftmax")
def _log_softmax(build: GraphBuilder, node: OnnxNode) -> Value:
    return build.call(aten.log_softmax.int, build.tensor(node.inputs[0]), node.attributes.get("axis", -1))
