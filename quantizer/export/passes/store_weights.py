"""Pass that stores weights in their format, and biases with their shifts: what is computed of constants alone.

A frozen proxy holds its weights as codes already, those of INT4 in a byte each; a proxy that trains holds them as
floats behind a Q/DQ pair. The shift of a bias (``calibration/bias_correction.py``) is a constant of its own in both;
the exporter itself adds up constants of at most 8192 numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quantizer.export.passes.base import add_constant, drop_unread
from quantizer.numerics import torch_operators as ops
from quantizer.numerics.qtype import QTYPES, QType
from quantizer.qdq.graph import block_size, floats


class StoreWeights:
    """``Q(w, s) -> DQ`` and ``Cast(w) -> DQ`` of a constant w become ``DQ`` of stored codes.

    ``Add(b, d)`` of two constants [C] becomes the constant b + d.
    """

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        import onnx_ir

        found = _constant_weights(model)
        for node, kind in found:
            element = onnx_ir.DataType[kind.onnx_type]
            # A code of at most 8 bits is exact in float32, and numpy converts float32 to every format.
            codes = _codes(node, kind).astype(np.float32).astype(element.numpy())
            name = "_".join([*(value.name for value in node.inputs[:2]), "stored"])
            node.outputs[0].replace_all_uses_with(add_constant(model, name, codes, element))
            _remove(model, node)
        shifted = _shifted_biases(model)
        for node, bias, shift in shifted:
            value = node.inputs[0]
            # Rounded once, like a sum of two numbers of the type.
            whole = (bias.astype(np.float64) + shift).astype(bias.dtype)
            node.outputs[0].replace_all_uses_with(add_constant(model, f"{value.name}_shifted", whole, value.dtype))
            _remove(model, node)
        return len(found) + len(shifted)

    def ensures(self, model: Any) -> str | None:
        left = [node.inputs[0].name for node, _ in _constant_weights(model)]
        apart = [node.inputs[0].name for node, _, _ in _shifted_biases(model)]
        if apart:
            return f"a bias is stored without its shift: {apart[0]}"
        return f"a weight is not stored in its format: {left[0]}" if left else None


def _constant_weights(model: Any) -> list[tuple[Any, QType]]:
    """Return the nodes that make codes of constants, and the formats of those codes."""
    formats = {kind.onnx_type: kind for kind in QTYPES.values()}
    found = []
    for node in model.graph:
        if node.op_type not in ("QuantizeLinear", "Cast") or any(
            v is None or v.const_value is None for v in node.inputs
        ):
            continue
        kind = formats.get(_element_of(node))
        if kind is not None and (node.op_type == "QuantizeLinear" or kind.is_packed):
            found.append((node, kind))
    return found


def _shifted_biases(model: Any) -> list[tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Return the nodes that add up two constants [C], and these."""
    found = []
    for node in model.graph:
        if node.op_type == "Add" and not node.outputs[0].is_graph_output():
            first, second = map(floats, node.inputs)
            if first is not None and second is not None and first.ndim == 1 and first.shape == second.shape:
                found.append((node, first, second))
    return found


def _element_of(node: Any) -> str:
    """Return the name of the element type that a Q or a Cast makes."""
    import onnx_ir

    if node.op_type == "Cast":
        return onnx_ir.DataType(node.attributes["to"].as_int()).name
    return str(node.inputs[2].const_value.dtype.name)


def _codes(node: Any, kind: QType) -> np.ndarray:
    """Return the codes that a Q or a Cast makes of its constant."""
    if node.op_type == "Cast":
        return np.asarray(node.inputs[0].const_value.numpy())
    weight, scale, zero = (torch.from_numpy(v.const_value.numpy().astype(np.float32)) for v in node.inputs)
    axis = node.attributes["axis"].as_int() if scale.dim() and "axis" in node.attributes else None
    zero_point = zero if kind.has_zero_point else None
    codes = ops.quantize(weight, scale, kind.name, axis, block_size(node), zero_point)
    return np.asarray(codes.float().numpy())


def _remove(model: Any, node: Any) -> None:
    """Remove the node, and the float weight and the zero point if nothing else reads them."""
    inputs = list(node.inputs)
    model.graph.remove(node, safe=True)
    for value in inputs:
        drop_unread(model, value)
