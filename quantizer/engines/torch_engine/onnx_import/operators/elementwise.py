"""Operators that compute each element by itself."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from quantizer.engines.torch_engine.onnx_import.graph_builder import (
    Constant,
    GraphBuilder,
    OnnxNode,
    Sizes,
    Value,
    operators,
)

aten = torch.ops.aten

TYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}
"""Types by ONNX's number."""

_UNARY = {
    "Abs": aten.abs.default,
    "Acos": aten.acos.default,
    "Acosh": aten.acosh.default,
    "Asin": aten.asin.default,
    "Asinh": aten.asinh.default,
    "Atan": aten.atan.default,
    "Atanh": aten.atanh.default,
    "BitwiseNot": aten.bitwise_not.default,
    "Ceil": aten.ceil.default,
    "Cos": aten.cos.default,
    "Cosh": aten.cosh.default,
    "Erf": aten.erf.default,
    "Exp": aten.exp.default,
    "Floor": aten.floor.default,
    "HardSwish": aten.hardswish.default,
    "IsInf": aten.isinf.default,
    "IsNaN": aten.isnan.default,
    "Log": aten.log.default,
    "Mish": aten.mish.default,
    "Neg": aten.neg.default,
    "Not": aten.logical_not.default,
    "Reciprocal": aten.reciprocal.default,
    "Relu": aten.relu.default,
    "Round": aten.round.default,
    "Sigmoid": aten.sigmoid.default,
    "Sign": aten.sign.default,
    "Sin": aten.sin.default,
    "Sinh": aten.sinh.default,
    "Softplus": aten.softplus.default,
    "Sqrt": aten.sqrt.default,
    "Tan": aten.tan.default,
    "Tanh": aten.tanh.default,
}
_BINARY = {
    "Add": aten.add.Tensor,
    "And": aten.logical_and.default,
    "BitwiseAnd": aten.bitwise_and.Tensor,
    "BitwiseOr": aten.bitwise_or.Tensor,
    "BitwiseXor": aten.bitwise_xor.Tensor,
    "Equal": aten.eq.Tensor,
    "Greater": aten.gt.Tensor,
    "GreaterOrEqual": aten.ge.Tensor,
    "Less": aten.lt.Tensor,
    "LessOrEqual": aten.le.Tensor,
    "Max": aten.maximum.default,
    "Min": aten.minimum.default,
    "Mul": aten.mul.Tensor,
    "Or": aten.logical_or.default,
    "Pow": aten.pow.Tensor_Tensor,
    "Sub": aten.sub.Tensor,
    "Sum": aten.add.Tensor,
    "Xor": aten.logical_xor.default,
}
_SELU = (1.67326319217681884765625, 1.05070102214813232421875)
"""The defaults of ONNX: slope of the exponential part, and factor of the whole."""
_OF_SIZES = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": operator.floordiv,
    "Equal": operator.eq,
}


def _unary(target: Any) -> Callable[[GraphBuilder, OnnxNode], Value]:
    return lambda build, node: build.call(target, build.tensor(node.inputs[0]))


def _binary(target: Any) -> Callable[[GraphBuilder, OnnxNode], Value]:
    def translate(build: GraphBuilder, node: OnnxNode) -> Value:
        of_sizes = _sizes(build, node)
        if of_sizes is not None:
            return of_sizes
        made = build.tensor(node.inputs[0])
        for other in node.inputs[1:]:
            made = build.call(target, made, build.tensor(other))
        return made

    return translate


def _sizes(build: GraphBuilder, node: OnnxNode) -> Sizes | None:
    """Return the result where it is made of sizes, item by item; None where it is made of tensors."""
    compute = _OF_SIZES.get(node.operator)
    if compute is None or len(node.inputs) != 2 or not any(isinstance(value, Sizes) for value in node.inputs):
        return None
    left, right = (build.sizes(value) for value in node.inputs)
    if left is None or right is None:
        return None
    count = max(len(left), len(right))
    pairs = zip(left * (count // len(left)), right * (count // len(right)), strict=True)
    items = tuple(_item(build, compute, a, b) for a, b in pairs)
    return Sizes(items, all(_alone(value) for value in node.inputs))


def _item(build: GraphBuilder, compute: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Return a size that is computed from two; an axis never has the -1 that stands for a size to be found."""
    if isinstance(left, int) and isinstance(right, int):
        return compute(left, right)
    if compute is operator.eq and any(isinstance(side, int) and side < 0 for side in (left, right)):
        return False
    return build.call(compute, left, right)


def _alone(value: Value | None) -> bool:
    return value.alone if isinstance(value, Sizes) else isinstance(value, Constant) and value.array.ndim == 0


for _name, _target in _UNARY.items():
    operators.add(_name)(_unary(_target))
for _name, _target in _BINARY.items():
    operators.add(_name)(_binary(_target))


@operators.add("Div")
def _div(build: GraphBuilder, node: OnnxNode) -> Value:
    of_sizes = _sizes(build, node)
    if of_sizes is not None:
        return of_sizes
    left, right = (build.tensor(value) for value in node.inputs)
    whole = any(isinstance(value, Constant) and value.array.dtype.kind in "iu" for value in node.inputs)
    # ONNX divides whole numbers to a whole number, rounded towards zero.
    return (
        build.call(aten.div.Tensor_mode, left, right, rounding_mode="trunc")
        if whole
        else build.call(aten.div.Tensor, left, right)
    )


@operators.add("Mod")
def _mod(build: GraphBuilder, node: OnnxNode) -> Value:
    # The sign is that of the divisor; with fmod, and for floats it must be so, that of the dividend.
    target = aten.fmod.Tensor if node.attributes.get("fmod", 0) else aten.remainder.Tensor
    return build.call(target, *(build.tensor(value) for value in node.inputs))


@operators.add("Gelu")
def _gelu(build: GraphBuilder, node: OnnxNode) -> Value:
    form = node.attributes.get("approximate", "none")
    return build.call(aten.gelu.default, build.tensor(node.inputs[0]), approximate=form)


@operators.add("LeakyRelu")
def _leaky_relu(build: GraphBuilder, node: OnnxNode) -> Value:
    return build.call(aten.leaky_relu.default, build.tensor(node.inputs[0]), node.attributes.get("alpha", 0.01))


@operators.add("Elu")
def _elu(build: GraphBuilder, node: OnnxNode) -> Value:
    return build.call(aten.elu.default, build.tensor(node.inputs[0]), node.attributes.get("alpha", 1.0))


@operators.add("Celu")
def _celu(build: GraphBuilder, node: OnnxNode) -> Value:
    return build.call(aten.celu.default, build.tensor(node.inputs[0]), node.attributes.get("alpha", 1.0))


@operators.add("Selu")
def _selu(build: GraphBuilder, node: OnnxNode) -> Value:
    alpha, gamma = node.attributes.get("alpha", _SELU[0]), node.attributes.get("gamma", _SELU[1])
    return build.call(aten.elu.default, build.tensor(node.inputs[0]), alpha, gamma)


@operators.add("ThresholdedRelu")
def _thresholded_relu(build: GraphBuilder, node: OnnxNode) -> Value:
    return build.call(aten.threshold.default, build.tensor(node.inputs[0]), node.attributes.get("alpha", 1.0), 0.0)


@operators.add("Softsign")
def _softsign(build: GraphBuilder, node: OnnxNode) -> Value:
    given = build.tensor(node.inputs[0])
    size = build.call(aten.add.Scalar, build.call(aten.abs.default, given), 1.0)
    return build.call(aten.div.Tensor, given, size)


@operators.add("Swish")
def _swish(build: GraphBuilder, node: OnnxNode) -> Value:
    given = build.tensor(node.inputs[0])
    gate = build.call(aten.sigmoid.default, build.call(aten.mul.Scalar, given, node.attributes.get("alpha", 1.0)))
    return build.call(aten.mul.Tensor, given, gate)


@operators.add("HardSigmoid")
def _hard_sigmoid(build: GraphBuilder, node: OnnxNode) -> Value:
    slope, shift = node.attributes.get("alpha", 0.2), node.attributes.get("beta", 0.5)
    line = build.call(aten.add.Scalar, build.call(aten.mul.Scalar, build.tensor(node.inputs[0]), slope), shift)
    return build.call(aten.clamp.default, line, 0.0, 1.0)


@operators.add("Clip")
def _clip(build: GraphBuilder, node: OnnxNode) -> Value:
    bounds = [node.input(1), node.input(2)]
    limits = [None if bound is None else build.tensor(bound) for bound in bounds]
    if all(bound is None or isinstance(bound, Constant) for bound in bounds):
        numbers = [bound.array.item() if isinstance(bound, Constant) else None for bound in bounds]
        return build.call(aten.clamp.default, build.tensor(node.inputs[0]), *numbers)
    return build.call(aten.clamp.Tensor, build.tensor(node.inputs[0]), *limits)


@operators.add("Cast")
def _cast(build: GraphBuilder, node: OnnxNode) -> Value:
    given, wanted = node.inputs[0], node.attributes["to"]
    if wanted not in TYPES:
        raise node.fault(f"torch has no type for ONNX's type {wanted}")
    if isinstance(given, Sizes) and TYPES[wanted] in (torch.int32, torch.int64):
        return given
    return build.call(aten.to.dtype, build.tensor(given), TYPES[wanted])


@operators.add("Where")
def _where(build: GraphBuilder, node: OnnxNode) -> Value:
    chosen, left, right = node.inputs[0], build.sizes(node.inputs[1]), build.sizes(node.inputs[2])
    if isinstance(chosen, Constant) and any(isinstance(value, Sizes) for value in node.inputs) and left and right:
        count = max(chosen.array.size, len(left), len(right))
        flags = np.broadcast_to(chosen.array.reshape(-1), count).tolist()
        pairs = zip(left * (count // len(left)), right * (count // len(right)), strict=True)
        return Sizes(tuple(a if flag else b for flag, (a, b) in zip(flags, pairs, strict=True)))
    return build.call(aten.where.self, *(build.tensor(value) for value in node.inputs))


@operators.add("Identity")
def _identity(build: GraphBuilder, node: OnnxNode) -> Value:
    return node.inputs[0] if node.inputs[0] is not None else build.tensor(None)


@operators.add("Dropout")
def _dropout(build: GraphBuilder, node: OnnxNode) -> Value:
    return build.tensor(node.inputs[0])


@operators.add("PRelu")
def _prelu(build: GraphBuilder, node: OnnxNode) -> Value:
    given, slope = (build.tensor(value) for value in node.inputs)
    zero = build.call(aten.clamp.default, given, 0.0, None)
    below = build.call(aten.clamp.default, given, None, 0.0)
    return build.call(aten.add.Tensor, zero, build.call(aten.mul.Tensor, below, slope))
