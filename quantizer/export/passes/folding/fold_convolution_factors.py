"""Pass that folds the factors of equalized convolutions into the convolution before.

Legend: f [C] the factors 1 / s (``calibration/rounding/equalize.py``), held as [C, 1, ..]; q [C, ..] the codes of a
convolution's weight with scales t [C], b its bias.

    relu(x (q t) + b) * f = relu(x (q (t f)) + b f)        min(relu(y), c) * f = min(relu(y f), c f)

A ReLU and a padding with zeros let positive factors through, a minimum with a constant takes them in, and a clip
between 0 and c becomes a ReLU and a minimum with a constant for each channel. If all scales t f come out alike but for
rounding, one scale takes their place. The multiplication stays where the value has other readers, or something else
made it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quantizer.export.passes.base import MatchPass, add_constant, drop_unread, insert_before, smallest_normal, take_out
from quantizer.qdq.graph import floats, is_dequantize, scalar

_ALIKE = 4.0
"""The relative difference between scales, in epsilons of their type, up to which they are one.

Each is a rounded product of two rounded numbers.
"""


@dataclass(kw_only=True, slots=True)
class _Folded:
    """The convolution that takes factors in, its new scales and bias, and the clips on the way with their bounds."""

    convolution: Any
    scales: np.ndarray[Any, Any]
    bias: np.ndarray[Any, Any] | None
    clips: list[tuple[Any, np.ndarray[Any, Any]]] = field(default_factory=list)


class FoldConvolutionFactors(MatchPass[_Folded]):
    """``Conv(x, DQ(q, t), b) -> Relu -> Mul(f) -> Q`` becomes ``Conv(x, DQ(q, t * f), b * f) -> Relu -> Q``."""

    left = "factors of an equalized convolution could still be folded"

    def match(self, node: Any) -> _Folded | None:
        """Return what takes a multiplication by factors in; None for a node that stays."""
        factors = _factors(node)
        if factors is None:
            return None
        clips: list[tuple[Any, np.ndarray[Any, Any]]] = []
        value = node.inputs[0]
        while (made := _only_reader(value)) is not None and made.op_type != "Conv":
            bound = _bound(made)
            if bound is not None:
                clips.append((made, bound))
            elif made.op_type != "Relu" and not _pads_zeros(made):
                return None
            value = made.inputs[0]
        return None if made is None else _folded(made, factors, clips)

    def apply(self, model: Any, node: Any, found: _Folded) -> None:
        """Give the convolution new constants: the present ones may have other readers."""
        factors = floats(node.inputs[1])
        assert factors is not None
        convolution, dequantize = found.convolution, found.convolution.inputs[1].producer()
        scale = dequantize.inputs[1]
        dequantize.replace_input_with(1, add_constant(model, f"{scale.name}_folded", found.scales, scale.dtype))
        if found.scales.ndim == 0:
            del dequantize.attributes["axis"]
        drop_unread(model, scale)
        if found.bias is not None:
            old = convolution.inputs[2]
            convolution.replace_input_with(2, add_constant(model, f"{old.name}_folded", found.bias, old.dtype))
            drop_unread(model, old)
        for clip, bound in found.clips:
            source, result = clip.inputs[0], clip.outputs[0]
            bounds = add_constant(model, f"{result.name}_bounds", (factors * bound).astype(factors.dtype), source.dtype)
            if clip.op_type == "Clip":
                source = insert_before(clip, "Relu", [source], like=result, shape=result.shape)
            take_out(model, clip, insert_before(clip, "Min", [source, bounds], like=result, shape=result.shape))
        take_out(model, node, node.inputs[0])


def _factors(node: Any) -> np.ndarray[Any, Any] | None:
    """Return f [C, 1, ..] of a Mul (x, f) that only quantizers read; None otherwise."""
    if node.op_type != "Mul" or node.inputs[1] is None or node.outputs[0].is_graph_output():
        return None
    array = floats(node.inputs[1])
    readers = list(node.outputs[0].uses())
    if array is None or not readers or any(reader.op_type != "QuantizeLinear" for reader, _ in readers):
        return None
    one_axis = array.ndim > 1 and array.size == array.shape[0]
    return array if one_axis and bool((array > 0).all()) else None


def _bound(node: Any) -> np.ndarray[Any, Any] | None:
    """Return c of a clip between 0 and c, or of a minimum with c, a number or one for each channel; None otherwise."""
    if node.op_type == "Clip" and len(node.inputs) > 2 and scalar(node.inputs[1]) == 0:
        return floats(node.inputs[2])
    if node.op_type != "Min" or len(node.inputs) != 2:
        return None
    bound = floats(node.inputs[1])
    return bound if bound is not None and (bound.ndim == 0 or bound.size == max(bound.shape)) else None


def _only_reader(value: Any) -> Any:
    """Return the node that made a value; None if the value has other readers too."""
    return None if value.is_graph_output() or len(list(value.uses())) != 1 else value.producer()


def _pads_zeros(node: Any) -> bool:
    mode = node.attributes["mode"].as_string() if "mode" in node.attributes else "constant"
    if node.op_type != "Pad" or mode != "constant":
        return False
    return len(node.inputs) <= 2 or node.inputs[2] is None or scalar(node.inputs[2]) == 0


def _folded(
    convolution: Any, factors: np.ndarray[Any, Any], clips: list[tuple[Any, np.ndarray[Any, Any]]]
) -> _Folded | None:
    """Return a convolution with the factors in its scales and its bias; None if it has no such constants."""
    node = convolution.inputs[1].producer()
    if not is_dequantize(node) or len(list(convolution.inputs[1].uses())) != 1 or "block_size" in node.attributes:
        return None
    codes, scales = node.inputs[0].const_value, floats(node.inputs[1])
    given = convolution.inputs[2] if len(convolution.inputs) > 2 else None
    bias = None if given is None else floats(given)
    if codes is None or scales is None or scales.shape != (factors.size,) or (given is not None and bias is None):
        return None
    if node.attributes["axis"].as_int() % len(codes.shape) != 0:
        return None
    row = factors.reshape(-1).astype(np.float64)
    wanted = scales.astype(np.float64) * row
    if (wanted < smallest_normal(scales.dtype)).any():
        return None
    if np.ptp(wanted) <= _ALIKE * np.finfo(scales.dtype).eps * wanted.max():
        wanted = np.asarray(np.median(wanted))
    held = None if bias is None else (bias.astype(np.float64) * row).astype(bias.dtype)
    return _Folded(convolution=convolution, scales=wanted.astype(scales.dtype), bias=held, clips=clips)
