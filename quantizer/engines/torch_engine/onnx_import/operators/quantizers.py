"""QuantizeLinear and DequantizeLinear, as the operators of ``quantized_decomposed``.

With one scale for a whole tensor they are calls of their own, which a lowering finds. A constant in codes is given as
its codes and a dequantizer; with scales along an axis too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.ao.quantization.fx._decomposed as _decomposed  # registers the operators

from quantizer.engines.torch_engine.onnx_import.graph_builder import (
    Constant,
    GraphBuilder,
    OnnxNode,
    Value,
    as_tensor,
    operators,
)

_CODES = {"int8": (torch.int8, -128, 127), "uint8": (torch.uint8, 0, 255)}


def _parameters(node: OnnxNode) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return scale and zero point; the zero point has the type of the codes."""
    scale, zero = node.inputs[1], node.input(2)
    if not isinstance(scale, Constant) or not (zero is None or isinstance(zero, Constant)):
        raise node.fault("a scale or zero point that is computed is not supported")
    if node.attributes.get("block_size", 0):
        raise node.fault("scales of blocks are not supported; give an axis one scale each")
    if isinstance(zero, Constant):
        points = zero.array
    else:
        codes = node.inputs[0]
        given = codes.array.dtype if isinstance(codes, Constant) and node.operator == "DequantizeLinear" else None
        points = np.zeros(scale.array.shape, given or ("uint8" if node.operator == "QuantizeLinear" else "int8"))
    return scale.array, points


def _bounds(node: OnnxNode, points: np.ndarray[Any, Any]) -> tuple[torch.dtype, int, int]:
    if points.dtype.name not in _CODES:
        raise node.fault(f"codes of type {points.dtype.name} are not supported; INT8 is")
    return _CODES[points.dtype.name]


@operators.add("QuantizeLinear")
def _quantize(build: GraphBuilder, node: OnnxNode) -> Value:
    scale, points = _parameters(node)
    dtype, least, most = _bounds(node, points)
    given = build.tensor(node.inputs[0])
    if scale.size == 1:
        target = torch.ops.quantized_decomposed.quantize_per_tensor.default
        return build.call(target, given, float(scale.item()), int(points.item()), least, most, dtype)
    target = torch.ops.quantized_decomposed.quantize_per_channel.default
    tensors = _vectors(build, node, scale, points)
    return build.call(target, given, *tensors, node.attributes.get("axis", 1), least, most, dtype)


@operators.add("DequantizeLinear")
def _dequantize(build: GraphBuilder, node: OnnxNode) -> Value:
    scale, points = _parameters(node)
    codes = node.inputs[0]
    if isinstance(codes, Constant) and codes.array.dtype.name not in _CODES:
        # INT32 biases, and INT4 weights: floats from here on.
        return Constant(f"{codes.name}.float", _floats(codes.array, scale, points, node.attributes.get("axis", 1)))
    if node.input(2) is None and isinstance(codes, torch.fx.Node):
        points = points.astype("uint8" if torch.uint8 in codes.args else "int8")
    dtype, least, most = _bounds(node, points)
    given = build.tensor(codes)
    if scale.size == 1:
        target = torch.ops.quantized_decomposed.dequantize_per_tensor.default
        return build.call(target, given, float(scale.item()), int(points.item()), least, most, dtype)
    target = torch.ops.quantized_decomposed.dequantize_per_channel.default
    tensors = _vectors(build, node, scale, points)
    return build.call(target, given, *tensors, node.attributes.get("axis", 1), least, most, dtype)


def _vectors(build: GraphBuilder, node: OnnxNode, scale: Any, points: Any) -> tuple[torch.fx.Node, torch.fx.Node]:
    return (
        build.buffer(f"{node.name}.scales", as_tensor(scale.reshape(-1))),
        build.buffer(f"{node.name}.zero_points", as_tensor(points.reshape(-1).astype("int32"))),
    )


def _floats(codes: Any, scale: Any, points: Any, axis: int) -> np.ndarray[Any, Any]:
    if scale.size > 1:
        shape = [1] * codes.ndim
        shape[axis] = -1
        scale, points = scale.reshape(shape), points.reshape(shape)
    made: np.ndarray[Any, Any] = ((codes.astype("int64") - points.astype("int64")) * scale).astype(scale.dtype)
    return made


del _decomposed
