"""Patterns of Q/DQ files that OpenVINO 2026.4 computes wrongly or refuses, with the measurements.

"Scales" are those of a quantized MatMul, Gemm or convolution. OpenVINO computes integers, and multiplies the result by
the scales later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from quantizer.export.qdq.graph import (
    Step,
    attribute,
    constant,
    has_several_numbers,
    is_constant,
    is_quantize,
    maker,
    steps_before,
    varying_inputs,
)
from quantizer.export.qdq.operand import MATMULS, MOVES, PRODUCTS, Operand, operands

_FUSED = frozenset(
    ["Add", "BatchNormalization", "Cast", "Clip", "Div", "Identity", "LeakyRelu", "Mul", "PRelu", "Relu", "Sub"]
)

_LINEAR = frozenset(["Add", "Cast", "Clip", "Div", "Identity", "Mul", "Sub"])
"""Operators that let a Q merge the scales of a weight, except for a bias that differs between channels.

A Clip may be wider than the range of the Q.
"""
_SUMS = frozenset(["Add", "Sub"])
_FACTORS = {"BatchNormalization": 1, "Div": 1, "Mul": 1}
"""Number of constants of an operator, from the first, that are factors."""


def scales_by_negatives(quantize: Any) -> bool:
    """Return whether a Q quantizes a value with per-channel factors, not all of them positive.

    OpenVINO merges positive factors into a Q before it plans memory. It merges others later; a model for all sizes then
    uses the factor of the first channel for all channels.
    """
    if not is_quantize(quantize):
        return False
    steps, _ = steps_before(quantize.inputs[0], _FUSED)
    factors = [factor for step in steps for factor in step.constants[: _FACTORS.get(step.node.op_type, 0)]]
    return any(has_several_numbers(factor) and not _positive(factor) for factor in factors)


def _positive(value: Any) -> bool:
    array = constant(value)
    return array is not None and bool((array > 0).all())


def scales_flat_product(quantize: Any) -> bool:
    """Return whether a Q quantizes a 2-D matrix multiplication with per-channel factors, except for its bias.

    With small fixed sizes, such as ``Linear, ReLU, * factors, Linear`` with 64 channels or a batch normalization,
    OpenVINO makes one kernel with wrong results. Three axes, Tanh, Sigmoid or Gelu between, or ReLU without factors are
    correct. The scales of a weight count as factors if no bias or activation separates them from the Q: ``Linear,
    Linear`` without bias.
    """
    if not is_quantize(quantize):
        return False
    steps, node = steps_before(quantize.inputs[0], _FUSED)
    if node is None or node.op_type not in MATMULS:
        return False
    if node.outputs[0].shape is None or len(node.outputs[0].shape) != 2:
        return False
    if all(map(_leaves_scales, steps)):
        return True
    scaling = steps[:-1] if steps[-1].node.op_type == "Add" else steps
    return any(has_several_numbers(value) for step in scaling for value in step.constants)


def _leaves_scales(step: Step) -> bool:
    """Return whether a Q can merge the scales of a weight before this step."""
    kind = step.node.op_type
    return kind in _LINEAR and not (kind in _SUMS and any(map(_differs, step.constants)))


def _differs(value: Any) -> bool:
    array = constant(value)
    return array is None or bool((array != array.flat[0]).any())


_MOVING = frozenset(["Add", "Cast", "Div", "Identity", "Mul", "Neg", "Slice", "Sub", "Unsqueeze"])


def moved_product(value: Any) -> tuple[Operand, ...]:
    """Return the operands of a quantized matrix multiplication whose scales can be moved behind readers of a value.

    OpenVINO moves the scales [1, 1, N] behind operators that keep channels apart. Behind an index or a mean over tokens
    they meet another axis. A bias or a nonlinear operator keeps them in the kernel. The tuple is empty without such
    scales.
    """
    steps, node = steps_before(value, _MOVING)
    if node is None or node.op_type not in MATMULS or [step.node.op_type for step in steps] == ["Add"]:
        return ()
    read = operands(node)
    return read if all(operand.quantized for operand in read) else ()


BY_NUMBER = frozenset(
    [
        *("Abs", "Add", "BatchNormalization", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish"),
        *("LeakyRelu", "Min", "Mish", "Mul", "Neg", "PRelu", "Pow", "Relu", "Sigmoid", "Softplus", "Sqrt"),
        *("Sub", "Tanh"),
    ]
)
"""Operators that OpenVINO fuses into a reduction before them, if their other inputs are constants."""

_UNCHANGED = frozenset(
    ["Cast", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"]
)
"""Operators that do not change values."""

_SCALING = frozenset(
    [
        *("Add", "BatchNormalization", "Cast", "Div", "GroupNormalization", "Identity", "InstanceNormalization", "Mul"),
        *("RMSNormalization", "Reshape", "Squeeze", "Sub", "Transpose", "Unsqueeze"),
    ]
)
"""Operators that a factor can be moved behind, and operators with factors."""


def misreads_channels(node: Any) -> bool:
    """Return whether OpenVINO applies per-channel factors behind a reduction along another axis.

    OpenVINO fuses elementwise operators into the reduction before them. The kernel takes the channel of a factor from
    axis 1 of the input, where [A, B, C] counts as [1, A, B, C]; this is correct if axis 1 of the output is the same
    axis. Measured with reductions of two to five axes: without a Q behind it, only inputs with three axes are fused.
    """
    by_channel, quantized = _followers(node.outputs[0])
    return by_channel and _misreads_factors(node, quantized)


def misreads_channels_before(node: Any) -> bool:
    """Return whether per-channel factors before a reduction are misread; Q/DQ files move them behind it."""
    return _misreads_factors(node, True) and _scaled_by_channel(node.inputs[0])


def _misreads_factors(node: Any, quantized: bool) -> bool:
    """Return whether factors behind a reduction meet another axis; ``quantized``: a Q follows them."""
    shape = node.inputs[0].shape
    if node.op_type == "Einsum":
        return len(node.inputs) == 1
    if shape is None:
        return True
    axes, keeps_axes = _axes(node, len(shape))
    if len(shape) < 3:
        return False
    if axes is None or _transposed(node.inputs[0]) or any(size == 1 for size in shape):
        # The kernel drops axes of size 1, so it sees fewer axes.
        return True
    if len(shape) == 3:
        return quantized and not keeps_axes if axes == {1} else True
    return quantized and not keeps_axes and not axes.isdisjoint({0, 1})


def _transposed(value: Any) -> bool:
    """Return whether a value comes from a Transpose, which OpenVINO moves behind the reduction of other axes."""
    while (node := maker(value)) is not None and node.op_type in BY_NUMBER:
        value = next(iter(varying_inputs(node)), None)
    return node is not None and node.op_type == "Transpose"


def _scaled_by_channel(value: Any) -> bool:
    """Return whether a value has per-channel factors or addends other than a bias.

    The scales of a weight count if nothing keeps them in the kernel.
    """
    if any(has_several_numbers(operand.dequantize.inputs[1]) for operand in moved_product(value)):
        return True
    steps, _ = steps_before(value, _SCALING)
    scaling = [step for step in steps if step.node.op_type not in _UNCHANGED and not _adds_bias(step)]
    return any(has_several_numbers(number) for step in scaling for number in step.constants)


def _adds_bias(step: Step) -> bool:
    return step.node.op_type == "Add" and getattr(maker(step.read), "op_type", "") in PRODUCTS


def _followers(value: Any) -> tuple[bool, bool]:
    """Return whether operators of this value alone reach a constant with several numbers, and whether they reach a Q.

    A Q behind a Concat also counts.
    """
    derived, pending = {value}, [node for node, _ in value.uses()]
    visited: set[Any] = set()
    by_channel = quantized = False
    while pending:
        node = pending.pop()
        varying = varying_inputs(node)
        is_derived = all(value_read in derived for value_read in varying)
        if node in visited or not (is_derived or node.op_type == "Concat"):
            continue
        visited.add(node)
        if is_quantize(node):
            by_channel, quantized = by_channel or has_several_numbers(node.inputs[1]), True
        elif node.op_type in BY_NUMBER or node.op_type in _UNCHANGED:
            constants = [
                value_read for value_read in node.inputs if value_read is not None and value_read not in varying
            ]
            by_channel = by_channel or (node.op_type in BY_NUMBER and any(map(has_several_numbers, constants)))
            derived.add(node.outputs[0])
            pending += [reader for reader, _ in node.outputs[0].uses()]
    return by_channel, quantized


def _axes(node: Any, rank: int) -> tuple[set[int] | None, bool]:
    """Return the reduced axes, None if computed, and whether the output keeps them with size 1."""
    if node.op_type.startswith("Global"):
        return set(range(2, rank)), True
    keeps_axes = attribute(node, "keepdims", 1) == 1
    if "axes" in node.attributes:
        axes: Any = node.attributes["axes"].as_ints()
    elif len(node.inputs) > 1 and node.inputs[1] is not None:
        axes = constant(node.inputs[1])
    else:
        axes = range(rank)
    return None if axes is None else {int(axis) % rank for axis in axes}, keeps_axes


_BY_NUMBER_OR_CAST = BY_NUMBER | {"Cast", "Identity"}
_SCALES = frozenset(["Div", "Mul"])


def misplaces_numbers(node: Any) -> bool:
    """Return whether a node applies a constant to a matrix multiplication along an axis that OpenVINO misreads.

    OpenVINO fuses elementwise operators into the kernel of a matrix multiplication. It reads constants along one axis
    as constants of the second axis, and factors of a MatMul of two activations as factors of other samples. It refuses
    the file, reads out of bounds, or returns wrong results. Constants along the last axis are correct, except for
    factors of two activations, and so is an added table. Measured with two to four axes, with and without a Q behind.
    """
    if node.op_type not in _SCALES | _SUMS:
        return False
    steps, product = steps_before(node.outputs[0], _BY_NUMBER_OR_CAST)
    if product is None or product.op_type not in MATMULS:
        return False
    scales = node.op_type in _SCALES
    for value in filter(has_several_numbers, steps[0].constants):
        # Count from the last axis, because constants may have fewer axes.
        axes = [axis for axis, size in enumerate(reversed(list(value.shape or ()))) if size != 1]
        if axes == [0]:
            pair = operands(product)
            if scales and all(operand.quantized and not operand.is_weight for operand in pair):
                return True
        elif axes and (scales or len(axes) == 1):
            return True
    return False


def is_read_both_ways(transpose: Any) -> bool:
    """Return whether a node transposes a square weight that another MatMul reads directly.

    OpenVINO uses the same orientation for both.
    """
    if transpose.op_type != "Transpose":
        return False
    weight = transpose.inputs[0]
    if weight.shape is None or len(weight.shape) != 2 or weight.shape[0] != weight.shape[1] or not is_constant(weight):
        return False
    return any(reader.op_type in MATMULS for reader, _ in weight.uses())


_CHANNELS = 1
_KEEPS_AXES = frozenset([*MOVES, "Add", "Cast", "Clip", "Concat", "Div", "Gather", "MaxPool", "Mul", "Relu", "Sub"])
"""Operators that scales can be moved behind, or that keep the axes of their first input."""
_JOINED = frozenset(["Add", "Cast", "Clip", "Div", "Identity", "LeakyRelu", "Mul", "Relu", "Sub"])
"""Operators that a Q can be moved before or can absorb."""


def gathers_axis(node: Any) -> bool:
    """Return whether a Gather with a scalar index removes an axis of a quantized result, other than its channels.

    OpenVINO moves the scales of a convolution [1, C, 1, 1], or of a linear layer [1, 1, N] without bias, behind the
    Gather (``x = self.linear(x)[:, 0]``). The result has one axis less than the scales, so the file is refused, the
    process crashes, or an output gains an axis. An index with one element keeps the axis for a Squeeze.
    """
    if node.op_type != "Gather" or node.inputs[0].shape is None:
        return False
    index, axes = constant(node.inputs[1]), len(node.inputs[0].shape)
    if index is None or index.ndim:
        return False
    axis = attribute(node, "axis", 0) % axes
    if axis < axes - 1 and moved_product(node.inputs[0]):
        return True
    if axis <= _CHANNELS:
        return False
    source = maker(node.inputs[0])
    while source is not None and source.op_type in _KEEPS_AXES:
        source = maker(source.inputs[0])
    is_convolution = source is not None and source.op_type in ("Conv", "ConvTranspose")
    return is_convolution and all(operand.quantized for operand in operands(source))


def gathers_zero_points(node: Any) -> bool:
    """Return whether a Gather reads a quantized linear layer without bias whose operand has a zero point.

    OpenVINO crashes on it.
    """
    return node.op_type == "Gather" and any(
        _has_zero_point(operand.dequantize) for operand in moved_product(node.inputs[0])
    )


def joins_before(quantize: Any) -> bool:
    """Return whether a Q with a zero point quantizes a Concat along an axis of positions.

    OpenVINO quantizes the parts and joins their zero points along this axis, where a matrix multiplication cannot
    subtract them. It refuses the file, for example for ``self.linear(torch.cat((token, x), 1))``.
    """
    if not is_quantize(quantize) or not _has_zero_point(quantize):
        return False
    _, node = steps_before(quantize.inputs[0], _JOINED)
    if node is None or node.op_type != "Concat":
        return False
    if node.outputs[0].shape is None:
        return True
    axes = len(node.outputs[0].shape)
    axis = attribute(node, "axis", 0) % axes
    # Zero points are subtracted along the channels of a convolution, and the summed axis of a MatMul.
    subtracted = {_CHANNELS if kind in ("Conv", "ConvTranspose") else axes - 1 for kind in _products(quantize)}
    return bool(subtracted - {axis})


def _products(quantize: Any) -> Iterator[str]:
    """Yield the operator types of the matrix multiplications and convolutions that read a Q."""
    waiting = [reader for reader, _ in quantize.outputs[0].uses()]
    while waiting:
        node = waiting.pop()
        if node.op_type in PRODUCTS:
            yield node.op_type
        elif node.op_type in (*MOVES, "DequantizeLinear"):
            waiting += [reader for reader, _ in node.outputs[0].uses()]


def _has_zero_point(quantize: Any) -> bool:
    point = constant(quantize.inputs[2]) if len(quantize.inputs) > 2 else None
    return point is not None and bool((point != 0).any())


_SIZED = frozenset({"Resize", "Shape", "Size"})
"""Operators that compute sizes of tensors."""


def is_shared_product(node: Any) -> bool:
    """Return whether a node is a quantized MatMul of activations or convolution without bias, with several readers.

    OpenVINO multiplies the integer result by the scales. Readers such as Q, reduction, pooling, ReLU or Mul can absorb
    the multiplication. Its graph optimizer then moves the remaining multiplication into the kernel, so these readers
    see scaled values: the result is wrong. Fixed sizes often hide this, not with ``SNIPPETS_MODE=DISABLE``. Linear
    layers, and a bias other than 0, are correct.
    """
    if node.op_type not in PRODUCTS or not all(operand.quantized for operand in operands(node)):
        return False
    if node.op_type == "Gemm" or (node.op_type == "MatMul" and any(map(is_constant, node.inputs))):
        return False
    if any(not _is_zero(bias) for bias in node.inputs[2:] if bias is not None):
        return False
    value = node.outputs[0]
    while len(readers := [reader for reader, _ in value.uses()]) == 1 and not value.is_graph_output():
        if not _only_scales(readers[0]):
            return False
        value = readers[0].outputs[0]
    return bool(len(readers) + value.is_graph_output() > 1)


def sized_biases(nodes: Iterable[Any]) -> list[Any]:
    """Return the convolutions whose bias OpenVINO may lose, because the file computes sizes and quantizes.

    OpenVINO reads a bias as an addition in the shape of the convolution. If the file computes a size, it reuses this
    shape, which becomes a second reader of the convolution. The addition moves into the Q behind it, where all channels
    get the bias of the first.
    """
    nodes = list(nodes)
    if not any(node.op_type in _SIZED for node in nodes) or not any(map(is_quantize, nodes)):
        return []
    convolutions = [node for node in nodes if node.op_type in ("Conv", "ConvTranspose")]
    return [node for node in convolutions if len(node.inputs) > 2 and is_constant(node.inputs[2])]


def _only_scales(node: Any) -> bool:
    """Return whether a node multiplies a value by constants or adds zeros, which OpenVINO merges with the scales."""
    varying = varying_inputs(node)
    if len(varying) != 1 or node.op_type not in ("Add", "Cast", "Div", "Identity", "Mul", "Sub"):
        return False
    constants = [value for value in node.inputs if value not in (None, varying[0])]
    return node.op_type not in ("Add", "Sub") or all(map(_is_zero, constants))


def _is_zero(value: Any) -> bool:
    array = constant(value)
    return array is not None and not array.any()
