"""Reductions whose result an engine multiplies by the factors of other channels.

OpenVINO 2026.4 fuses what is computed number by number into the reduction before it. Its kernel takes the channel of a
factor from axis 1 of what is reduced, where three axes [A, B, C] are [1, A, B, C] to it. The factor is right where axis
1 of the result is that same axis. Measured over reductions of two to five axes, with a QuantizeLinear behind and
without: without one only inputs of three axes are fused so.
"""

from __future__ import annotations

from typing import Any

from quantizer.qdq.graph import attribute
from quantizer.qdq.graph import constant
from quantizer.qdq.graph import is_constant
from quantizer.qdq.graph import is_quantize
from quantizer.qdq.graph import maker

__all__ = ["BY_NUMBER", "misreads_channels"]

BY_NUMBER = frozenset(
    [
        *("Abs", "Add", "BatchNormalization", "Clip", "Div", "Elu", "Gelu", "HardSwish", "LeakyRelu", "Mish", "Mul"),
        *("Neg", "PRelu", "Pow", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Tanh"),
    ]
)
"""Operators that OpenVINO fuses into a reduction before them, if their other inputs are constants."""


def misreads_channels(node: Any) -> bool:
    """Return whether the factors of channels behind a reduction would be those of another axis."""
    shape = node.inputs[0].shape
    by_channel, quantized = _followed(node.outputs[0])
    if not by_channel or shape is None:
        return by_channel
    axes, keeps = _axes(node, len(shape))
    if len(shape) < 3:
        return False
    if axes is None or _transposed(node.inputs[0]):
        return True
    if len(shape) == 3:
        return quantized and not keeps if axes == {1} else True
    return quantized and not keeps and not axes.isdisjoint({0, 1})


def _transposed(value: Any) -> bool:
    """Return whether a value comes from a Transpose, which OpenVINO moves behind the reduction of other axes."""
    while (node := maker(value)) is not None and node.op_type in BY_NUMBER:
        value = next((given for given in node.inputs if given is not None and not is_constant(given)), None)
    return node is not None and node.op_type == "Transpose"


def _followed(value: Any) -> tuple[bool, bool]:
    """Return whether a value meets a constant of several numbers before anything else reads it, and a Q behind it.

    A Q behind a Concat is one before it, too.
    """
    by_channel = False
    while len(uses := tuple(value.uses())) == 1:
        reader = uses[0][0]
        if is_quantize(reader):
            return by_channel, True
        if reader.op_type != "Concat":
            others = [given for given in reader.inputs if given is not None and given is not value]
            if reader.op_type not in BY_NUMBER or not all(map(is_constant, others)):
                break
            held = map(constant, others)
            by_channel = by_channel or any(array is None or array.size > 1 for array in held)
        value = reader.outputs[0]
    return by_channel, False


def _axes(node: Any, rank: int) -> tuple[set[int] | None, bool]:
    """Return the axes that are reduced, from 0 (None: they are computed), and whether they stay with a size of 1."""
    if node.op_type.startswith("Global"):
        return set(range(2, rank)), True
    keeps = attribute(node, "keepdims", 1) == 1
    if "axes" in node.attributes:
        given: Any = node.attributes["axes"].as_ints()
    elif len(node.inputs) > 1 and node.inputs[1] is not None:
        given = constant(node.inputs[1])
    else:
        given = range(rank)
    return None if given is None else {int(axis) % rank for axis in given}, keeps
