"""ONNX operators that compute elements, normalize, quantize or reduce axes.

QuantizeLinear and DequantizeLinear become ``quantized_decomposed`` operators, which a lowering looks for. Constants
keep their quantized values and a dequantizer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.ao.quantization.fx._decomposed as _decomposed  # registers the operators

from quantizer.export.onnx_import.graph_builder import (
    Constant,
    GraphBuilder,
    OnnxNode,
    Sizes,
    Value,
    as_tensor,
    operators,
)
from quantizer.numerics.formats import FP8, INT8, UINT8

del _decomposed

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
"""torch types by ``TensorProto.DataType``."""

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
"""Defaults of ONNX: alpha and gamma."""
_ON_SIZES = {
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
        size_result = _sizes(build, node)
        if size_result is not None:
            return size_result
        result = build.tensor(node.inputs[0])
        for operand in node.inputs[1:]:
            result = build.call(target, result, build.tensor(operand))
        return result

    return translate


def _sizes(build: GraphBuilder, node: OnnxNode) -> Sizes | None:
    """Return the elementwise result of two lists of sizes; None for tensors."""
    compute = _ON_SIZES.get(node.operator)
    if compute is None or len(node.inputs) != 2 or not any(isinstance(value, Sizes) for value in node.inputs):
        return None
    left, right = (build.sizes(value) for value in node.inputs)
    if left is None or right is None:
        return None
    count = max(len(left), len(right))
    pairs = zip(left * (count // len(left)), right * (count // len(right)), strict=True)
    items = tuple(_item(build, compute, a, b) for a, b in pairs)
    return Sizes(items, all(_is_scalar(value) for value in node.inputs))


def _item(build: GraphBuilder, compute: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
    """Return a size computed from two sizes; the placeholder -1 never equals a size."""
    if isinstance(first, int) and isinstance(second, int):
        return compute(first, second)
    if compute is operator.eq and any(isinstance(side, int) and side < 0 for side in (first, second)):
        return False
    return build.call(compute, first, second)


def _is_scalar(value: Value | None) -> bool:
    return value.is_scalar if isinstance(value, Sizes) else isinstance(value, Constant) and value.array.ndim == 0


for _name, _target in _UNARY.items():
    operators.add(_name)(_unary(_target))
for _name, _target in _BINARY.items():
    operators.add(_name)(_binary(_target))


@operators.add("Div")
def _div(build: GraphBuilder, node: OnnxNode) -> Value:
    size_result = _sizes(build, node)
    if size_result is not None:
        return size_result
    left, right = (build.tensor(value) for value in node.inputs)
    is_integer = any(isinstance(value, Constant) and value.array.dtype.kind in "iu" for value in node.inputs)
    # Integer division in ONNX rounds towards zero.
    return (
        build.call(aten.div.Tensor_mode, left, right, rounding_mode="trunc")
        if is_integer
        else build.call(aten.div.Tensor, left, right)
    )


@operators.add("Mod")
def _mod(build: GraphBuilder, node: OnnxNode) -> Value:
    # The result has the sign of the divisor; with fmod, required for floats, of the dividend.
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
    x = build.tensor(node.inputs[0])
    size = build.call(aten.add.Scalar, build.call(aten.abs.default, x), 1.0)
    return build.call(aten.div.Tensor, x, size)


@operators.add("Swish")
def _swish(build: GraphBuilder, node: OnnxNode) -> Value:
    x = build.tensor(node.inputs[0])
    gate = build.call(aten.sigmoid.default, build.call(aten.mul.Scalar, x, node.attributes.get("alpha", 1.0)))
    return build.call(aten.mul.Tensor, x, gate)


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
    x, dtype = node.inputs[0], node.attributes["to"]
    if dtype not in TYPES:
        raise node.error(f"torch has no equivalent of the ONNX element type {dtype}")
    if isinstance(x, Sizes) and TYPES[dtype] in (torch.int32, torch.int64):
        return x
    return build.call(aten.to.dtype, build.tensor(x), TYPES[dtype])


@operators.add("Where")
def _where(build: GraphBuilder, node: OnnxNode) -> Value:
    condition, left, right = node.inputs[0], build.sizes(node.inputs[1]), build.sizes(node.inputs[2])
    if isinstance(condition, Constant) and any(isinstance(value, Sizes) for value in node.inputs) and left and right:
        count = max(condition.array.size, len(left), len(right))
        flags = np.broadcast_to(condition.array.reshape(-1), count).tolist()
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
    x, slope = (build.tensor(value) for value in node.inputs)
    positive = build.call(aten.clamp.default, x, 0.0, None)
    negative = build.call(aten.clamp.default, x, None, 0.0)
    return build.call(aten.add.Tensor, positive, build.call(aten.mul.Tensor, negative, slope))


@operators.add("LayerNormalization")
def _layer_norm(build: GraphBuilder, node: OnnxNode) -> Value:
    weight = node.inputs[1]
    if not isinstance(weight, Constant):
        raise node.error("a computed weight is not supported; expected a constant")
    x, bias = build.tensor(node.inputs[0]), node.input(2)
    return build.call(
        aten.layer_norm.default,
        x,
        list(weight.array.shape),
        build.tensor(weight),
        None if bias is None else build.tensor(bias),
        node.attributes.get("epsilon", 1e-5),
    )


@operators.add("RMSNormalization")
def _rms_norm(build: GraphBuilder, node: OnnxNode) -> Value:
    weight = node.inputs[1]
    if not isinstance(weight, Constant):
        raise node.error("a computed weight is not supported; expected a constant")
    shape, epsilon = list(weight.array.shape), node.attributes.get("epsilon", 1e-5)
    return build.call(aten.rms_norm.default, build.tensor(node.inputs[0]), shape, build.tensor(weight), epsilon)


@operators.add("BatchNormalization")
def _batch_norm(build: GraphBuilder, node: OnnxNode) -> Value:
    x, weight, bias, mean, variance = (build.tensor(value) for value in node.inputs[:5])
    epsilon = node.attributes.get("epsilon", 1e-5)
    return build.call(aten.batch_norm.default, x, weight, bias, mean, variance, False, 0.0, epsilon, False)


@operators.add("GroupNormalization")
def _group_norm(build: GraphBuilder, node: OnnxNode) -> Value:
    x, weight, bias = node.inputs
    groups, epsilon = node.attributes["num_groups"], node.attributes.get("epsilon", 1e-5)
    weight, bias = (_per_channel(build, node, value, groups) for value in (weight, bias))
    return build.call(aten.group_norm.default, build.tensor(x), groups, weight, bias, epsilon)


def _per_channel(build: GraphBuilder, node: OnnxNode, value: Value | None, groups: int) -> Value:
    """Return one number per channel; until opset 20, files hold one per group."""
    shape = node.shapes[0]
    channels = shape[1] if shape is not None and len(shape) > 1 else None
    if not isinstance(value, Constant) or value.array.size != groups or channels == groups:
        return build.tensor(value)
    if not isinstance(channels, int):
        raise node.error("the number of channels is unknown; export the model at opset 21 or later")
    return build.buffer(value.name, as_tensor(value.array.repeat(channels // groups)))


@operators.add("InstanceNormalization")
def _instance_norm(build: GraphBuilder, node: OnnxNode) -> Value:
    x, weight, bias = (build.tensor(value) for value in node.inputs)
    epsilon = node.attributes.get("epsilon", 1e-5)
    return build.call(aten.instance_norm.default, x, weight, bias, None, None, True, 0.0, epsilon, False)


@operators.add("Softmax")
def _softmax(build: GraphBuilder, node: OnnxNode) -> Value:
    return build.call(aten.softmax.int, build.tensor(node.inputs[0]), node.attributes.get("axis", -1))


@operators.add("LogSoftmax")
def _log_softmax(build: GraphBuilder, node: OnnxNode) -> Value:
    return build.call(aten.log_softmax.int, build.tensor(node.inputs[0]), node.attributes.get("axis", -1))


_BOUNDS = {kind.storage_name: (kind.storage, kind.qmin, kind.qmax) for kind in (INT8, UINT8, FP8)}
_FP8 = FP8.storage_name


def _parameters(node: OnnxNode) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return scale and zero point; the zero point has the type of the quantized values."""
    scale, zero = node.inputs[1], node.input(2)
    if not isinstance(scale, Constant) or not (zero is None or isinstance(zero, Constant)):
        raise node.error("a computed scale or zero point is not supported; expected constants")
    if node.attributes.get("block_size", 0):
        raise node.error("block scales are not supported; use one scale per index of an axis")
    if isinstance(zero, Constant):
        points = zero.array
    else:
        codes = node.inputs[0]
        x = codes.array.dtype if isinstance(codes, Constant) and node.operator == "DequantizeLinear" else None
        points = np.zeros(scale.array.shape, x or ("uint8" if node.operator == "QuantizeLinear" else "int8"))
    return scale.array, points


def _bounds(build: GraphBuilder, node: OnnxNode, points: np.ndarray[Any, Any]) -> tuple[torch.dtype, Any, Any]:
    if not _is_kept(build, points):
        raise node.error(f"quantized values of type {points.dtype.name} are not supported; use INT8 or UINT8")
    return _BOUNDS[points.dtype.name]


def _is_kept(build: GraphBuilder, values: np.ndarray[Any, Any]) -> bool:
    """Return whether quantized values of this type stay quantized in the graph."""
    return values.dtype.name in _BOUNDS and (build.fp8 or values.dtype.name != _FP8)


@operators.add("QuantizeLinear")
def _quantize(build: GraphBuilder, node: OnnxNode) -> Value:
    scale, points = _parameters(node)
    dtype, least, most = _bounds(build, node, points)
    x = build.tensor(node.inputs[0])
    if scale.size == 1:
        target = torch.ops.quantized_decomposed.quantize_per_tensor.default
        return build.call(target, x, float(scale.item()), int(points.item()), least, most, dtype)
    target = torch.ops.quantized_decomposed.quantize_per_channel.default
    tensors = _vectors(build, node, scale, points)
    return build.call(target, x, *tensors, node.attributes.get("axis", 1), least, most, dtype)


@operators.add("DequantizeLinear")
def _dequantize(build: GraphBuilder, node: OnnxNode) -> Value:
    scale, points = _parameters(node)
    codes = node.inputs[0]
    if isinstance(codes, Constant) and not _is_kept(build, codes.array):
        # INT32 biases and INT4 weights become floats.
        return Constant(
            f"{codes.name}.float", _dequantized_constant(codes.array, scale, points, node.attributes.get("axis", 1))
        )
    if node.input(2) is None and isinstance(codes, torch.fx.Node):
        kept = next((kind for kind in (UINT8, FP8) if kind.storage in codes.args), INT8)
        dtype, least, most = _BOUNDS[kept.storage_name]
    else:
        dtype, least, most = _bounds(build, node, points)
    x = build.tensor(codes)
    if scale.size == 1:
        target = torch.ops.quantized_decomposed.dequantize_per_tensor.default
        return build.call(target, x, float(scale.item()), int(points.item()), least, most, dtype)
    target = torch.ops.quantized_decomposed.dequantize_per_channel.default
    tensors = _vectors(build, node, scale, points)
    return build.call(target, x, *tensors, node.attributes.get("axis", 1), least, most, dtype)


def _vectors(build: GraphBuilder, node: OnnxNode, scale: Any, points: Any) -> tuple[torch.fx.Node, torch.fx.Node]:
    return (
        build.buffer(f"{node.name}.scales", as_tensor(scale.reshape(-1))),
        build.buffer(f"{node.name}.zero_points", as_tensor(points.reshape(-1).astype("int32"))),
    )


def _dequantized_constant(integers: Any, scale: Any, points: Any, axis: int) -> np.ndarray[Any, Any]:
    if scale.size > 1:
        shape = [1] * integers.ndim
        shape[axis] = -1
        scale, points = scale.reshape(shape), points.reshape(shape)
    # Values of FP8 are no integers.
    wide = "float32" if integers.dtype.name == _FP8 else "int64"
    values: np.ndarray[Any, Any] = ((integers.astype(wide) - points.astype(wide)) * scale).astype(scale.dtype)
    return values


_REDUCTIONS = {
    "ReduceMax": aten.amax.default,
    "ReduceMean": aten.mean.dim,
    "ReduceMin": aten.amin.default,
    "ReduceSum": aten.sum.dim_IntList,
}


def _axes(build: GraphBuilder, node: OnnxNode) -> list[int] | None:
    if node.input(1) is not None:
        return build.needed_sizes(node, 1)
    axes: list[int] | None = node.attributes.get("axes")
    return axes


def _axes_to_reduce(build: GraphBuilder, node: OnnxNode) -> list[int] | None:
    """Return the axes of a reduction other than a plain sum; None for all axes."""
    axes = _axes(build, node) or None
    if node.attributes.get("noop_with_empty_axes", 0) and axes is None:
        raise node.error("a reduction over no axes is not supported")
    return axes


def _reduction(target: Any) -> Callable[[GraphBuilder, OnnxNode], Value]:
    def translate(build: GraphBuilder, node: OnnxNode) -> Value:
        axes = _axes(build, node)
        x, keepdims = build.tensor(node.inputs[0]), bool(node.attributes.get("keepdims", 1))
        if node.attributes.get("noop_with_empty_axes", 0) and not axes:
            return x
        return build.call(target, x, list(axes or ()), keepdims)

    return translate


for _name, _target in _REDUCTIONS.items():
    operators.add(_name)(_reduction(_target))


def _norm(order: int) -> Callable[[GraphBuilder, OnnxNode], Value]:
    def translate(build: GraphBuilder, node: OnnxNode) -> Value:
        axes, keepdims = _axes_to_reduce(build, node), bool(node.attributes.get("keepdims", 1))
        return build.call(aten.linalg_vector_norm.default, build.tensor(node.inputs[0]), order, axes, keepdims)

    return translate


operators.add("ReduceL1")(_norm(1))
operators.add("ReduceL2")(_norm(2))


@operators.add("ReduceSumSquare")
def _reduce_sum_square(build: GraphBuilder, node: OnnxNode) -> Value:
    squares = build.call(aten.square.default, build.tensor(node.inputs[0]))
    axes, keepdims = _axes_to_reduce(build, node), bool(node.attributes.get("keepdims", 1))
    return build.call(aten.sum.dim_IntList, squares, axes, keepdims)


@operators.add("ReduceLogSumExp")
def _reduce_log_sum_exp(build: GraphBuilder, node: OnnxNode) -> Value:
    axes, keepdims = _axes_to_reduce(build, node), bool(node.attributes.get("keepdims", 1))
    if axes is None:
        raise node.error("a reduction without axes is not supported; specify its axes")
    return build.call(aten.logsumexp.default, build.tensor(node.inputs[0]), axes, keepdims)


@operators.add("ReduceProd")
def _reduce_prod(build: GraphBuilder, node: OnnxNode) -> Value:
    x, axes = node.inputs[0], _axes_to_reduce(build, node)
    if isinstance(x, Sizes):
        return _product_of_sizes(build, x, bool(node.attributes.get("keepdims", 1)))
    if axes is None or len(axes) != 1:
        raise node.error("a product over several axes is not supported")
    return build.call(aten.prod.dim_int, build.tensor(x), axes[0], bool(node.attributes.get("keepdims", 1)))


def _product_of_sizes(build: GraphBuilder, x: Sizes, keepdims: bool) -> Sizes:
    import operator

    product: Any = 1
    for item in x.items:
        is_static = isinstance(product, int) and isinstance(item, int)
        product = product * item if is_static else build.call(operator.mul, product, item)
    return Sizes((product,), is_scalar=not keepdims)


def _arg_reduction(target: Any) -> Callable[[GraphBuilder, OnnxNode], Value]:
    def translate(build: GraphBuilder, node: OnnxNode) -> Value:
        axis, keepdims = node.attributes.get("axis", 0), bool(node.attributes.get("keepdims", 1))
        return build.call(target, build.tensor(node.inputs[0]), axis, keepdims)

    return translate


operators.add("ArgMax")(_arg_reduction(aten.argmax.default))
operators.add("ArgMin")(_arg_reduction(aten.argmin.default))


@operators.add("CumSum")
def _cumsum(build: GraphBuilder, node: OnnxNode) -> Value:
    if node.attributes.get("exclusive", 0) or node.attributes.get("reverse", 0):
        raise node.error("an exclusive or reversed sum is not supported")
    return build.call(aten.cumsum.default, build.tensor(node.inputs[0]), build.needed_sizes(node, 1)[0])


def _global_pool(target: Any) -> Callable[[GraphBuilder, OnnxNode], Value]:
    def translate(build: GraphBuilder, node: OnnxNode) -> Value:
        rank = node.ranks[0]
        if rank is None:
            raise node.error("the rank of its input is unknown; export the model again")
        return build.call(target, build.tensor(node.inputs[0]), list(range(2, rank)), True)

    return translate


operators.add("GlobalAveragePool")(_global_pool(aten.mean.dim))
operators.add("GlobalMaxPool")(_global_pool(aten.amax.default))
