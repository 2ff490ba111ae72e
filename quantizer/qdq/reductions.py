"""Reductions whose result an engine multiplies by the factors of other channels.

OpenVINO 2026.4 fuses what is computed number by number into the reduction before it. Its kernel takes the channel of a
factor from axis 1 of what is reduced, where three axes [A, B, C] are [1, A, B, C] to it. The factor is right where axis
1 of the result is that same axis. Measured over reductions of two to five axes, with a QuantizeLinear behind and
without: without one only inputs of three axes are fused so. In files with Q/DQ it moves factors before a reduction
behind it first.
"""

from __future__ import annotations

from typing import Any

from quantizer.qdq.graph import (
    Step,
    attribute,
    constant,
    has_several_numbers,
    is_quantize,
    maker,
    steps_before,
    varying_inputs,
)
from quantizer.qdq.moved_scales import moved_product
from quantizer.qdq.operand import PRODUCTS

BY_NUMBER = frozenset(
    [
        *("Abs", "Add", "BatchNormalization", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish"),
        *("LeakyRelu", "Min", "Mish", "Mul", "Neg", "PRelu", "Pow", "Relu", "Sigmoid", "Softplus", "Sqrt"),
        *("Sub", "Tanh"),
    ]
)
"""Operators that OpenVINO fuses into a reduction before them, if their other inputs are constants."""

_PASSED = frozenset(["Cast", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"])
"""Operators that keep numbers as they are."""

_LINEAR = frozenset(
    [
        *("Add", "BatchNormalization", "Cast", "Div", "GroupNormalization", "Identity", "InstanceNormalization", "Mul"),
        *("RMSNormalization", "Reshape", "Squeeze", "Sub", "Transpose", "Unsqueeze"),
    ]
)
"""Operators behind which a factor can be moved, and such as have one themselves."""


def misreads_channels(node: Any) -> bool:
    """Return whether the factors of channels behind a reduction would be those of another axis."""
    by_channel, quantized = _followed(node.outputs[0])
    return by_channel and _turns_channels(node, quantized)


def misreads_channels_before(node: Any) -> bool:
    """Return whether factors of channels before a reduction would be: they are moved behind it in files with Q/DQ."""
    return _turns_channels(node, True) and _scaled_by_channel(node.inputs[0])


def _turns_channels(node: Any, quantized: bool) -> bool:
    """Return whether factors behind a reduction are read at another axis; ``quantized``: a Q follows them."""
    shape = node.inputs[0].shape
    if node.op_type == "Einsum":
        return len(node.inputs) == 1
    if shape is None:
        return True
    axes, keeps = _axes(node, len(shape))
    if len(shape) < 3:
        return False
    if axes is None or _transposed(node.inputs[0]) or any(size == 1 for size in shape):
        # A size of 1 is dropped, or was added, and the kernel sees fewer axes.
        return True
    if len(shape) == 3:
        return quantized and not keeps if axes == {1} else True
    return quantized and not keeps and not axes.isdisjoint({0, 1})


def _transposed(value: Any) -> bool:
    """Return whether a value comes from a Transpose, which OpenVINO moves behind the reduction of other axes."""
    while (node := maker(value)) is not None and node.op_type in BY_NUMBER:
        value = next(iter(varying_inputs(node)), None)
    return node is not None and node.op_type == "Transpose"


def _scaled_by_channel(value: Any) -> bool:
    """Return whether a value is multiplied by constants of several numbers, or added to such other than a bias.

    The scales of a weight are such constants where nothing keeps them in the product.
    """
    if any(has_several_numbers(one.dequantize.inputs[1]) for one in moved_product(value)):
        return True
    steps, _ = steps_before(value, _LINEAR)
    scaling = [step for step in steps if step.node.op_type not in _PASSED and not _adds_bias(step)]
    return any(has_several_numbers(one) for step in scaling for one in step.constants)


def _adds_bias(step: Step) -> bool:
    return step.node.op_type == "Add" and getattr(maker(step.read), "op_type", "") in PRODUCTS


def _followed(value: Any) -> tuple[bool, bool]:
    """Return whether what is computed of a value alone meets a constant of several numbers, and whether a Q.

    A Q behind a Concat is one before it, too.
    """
    of_value, waiting = {value}, [node for node, _ in value.uses()]
    seen: set[Any] = set()
    by_channel = quantized = False
    while waiting:
        node = waiting.pop()
        varying = varying_inputs(node)
        alone = all(given in of_value for given in varying)
        if node in seen or not (alone or node.op_type == "Concat"):
            continue
        seen.add(node)
        if is_quantize(node):
            by_channel, quantized = by_channel or has_several_numbers(node.inputs[1]), True
        elif node.op_type in BY_NUMBER or node.op_type in _PASSED:
            others = [given for given in node.inputs if given is not None and given not in varying]
            by_channel = by_channel or (node.op_type in BY_NUMBER and any(map(has_several_numbers, others)))
            of_value.add(node.outputs[0])
            waiting += [reader for reader, _ in node.outputs[0].uses()]
    return by_channel, quantized


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
