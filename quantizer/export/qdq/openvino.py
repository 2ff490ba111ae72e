"""Places of a Q/DQ file that OpenVINO computes wrongly.

``scales_flat_product``, ``scales_by_negatives``: factors of channels between a product and a QuantizeLinear.

OpenVINO 2026.4 makes one kernel of a network with products of two axes where its sizes are fixed and small (``Linear,
ReLU, * factors, Linear`` of 64 channels, or with a batch norm), and no digit of what that computes is right. With three
axes, with Tanh, Sigmoid or Gelu between, or with ReLU and no factors, all are. The scales of a weight are such factors,
too, where neither a bias nor an activation keeps them from the Q: ``Linear, Linear`` without a bias. Factors that are
not all positive are another case, see ``scales_by_negatives``.

``moved_product``: products whose scales OpenVINO can still move behind what reads them.

OpenVINO 2026.4 scales a quantized product behind its sums, and moves the scales on behind operators that keep numbers
apart. Scales of channels [1, 1, N] then meet a result with other axes: behind an index or a mean over tokens they are
those of another axis. A bias of the product, or anything that is not linear, keeps them in the product's own kernel.

``misreads_channels``: reductions whose result is multiplied by the factors of other channels.

OpenVINO 2026.4 fuses what is computed number by number into the reduction before it. Its kernel takes the channel of a
factor from axis 1 of what is reduced, where three axes [A, B, C] are [1, A, B, C] to it. The factor is right where axis
1 of the result is that same axis. Measured over reductions of two to five axes, with a QuantizeLinear behind and
without: without one only inputs of three axes are fused so. In files with Q/DQ it moves factors before a reduction
behind it first.

``misplaces_numbers``: constants that differ along an axis, and are applied to a matrix product along another one.

OpenVINO 2026.4 makes what is computed number by number behind a matrix product a part of its kernel. There, numbers
that differ along one axis are those of the second axis, whichever they belong to, and factors of a product of two
activations are those of other samples. It refuses the file, reads beyond the numbers, or no digit is right. Measured
over products of a weight and of two activations, of two to four axes, with a QuantizeLinear behind and without. Right
are numbers along the last axis, except for factors of two activations, and a table that is added.

``is_read_both_ways``: a square weight that one product reads transposed and another one as it is. OpenVINO gives both
products the same one of the two.

``gathers_axis``, ``gathers_zero_points``: an index behind a product, computed with another number of axes.

OpenVINO 2026.4 moves the scales of a quantized convolution [1, C, 1, 1], or of a linear layer [1, 1, N] without a bias
(``x = self.linear(x)[:, 0]``), behind a Gather. Where the index is one number, the result has one axis less than the
scales, and the product of both has one axis too many: OpenVINO refuses the file, ends the process, or adds an axis to
an output. An index of one element keeps the axis, and a Squeeze behind it takes it out. Where the layer reads bytes
with a zero point, any Gather behind it ends the process.

``is_shared_product``: a quantized product whose result several nodes read, scaled twice or not at all.

OpenVINO 2026.4 computes a convolution or a product of two activations on integers, and multiplies the result by the
scales behind it. Where several nodes read the result, some of them can take the multiplication into themselves: a
QuantizeLinear, a reduction, a pooling, a ReLU, another factor. They read the integers then. Its graph optimizer moves
the multiplication that is left into the product without a look at them, and they read what is scaled already: no digit
is right. With fixed sizes the multiplication often becomes part of another kernel before that, and all is right; with
``SNIPPETS_MODE=DISABLE`` it does not. Right are a linear layer, and a product with a bias other than 0.
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

_BETWEEN = frozenset(
    ["Add", "BatchNormalization", "Cast", "Clip", "Div", "Identity", "LeakyRelu", "Mul", "PRelu", "Relu", "Sub"]
)

_LINEAR = frozenset(["Add", "Cast", "Clip", "Div", "Identity", "Mul", "Sub"])
"""What leaves the scales of a weight where a Q takes them into itself, but for a bias that differs between channels. A
Clip may be wider than the range of the Q."""
_SUMS = frozenset(["Add", "Sub"])
_FACTORS = {"BatchNormalization": 1, "Div": 1, "Mul": 1}
"""How many of the constants of an operator are factors: the first ones."""


def scales_by_negatives(quantize: Any) -> bool:
    """Return whether a Q rounds a value that factors of channels multiply, of which some are not positive.

    OpenVINO takes factors into a Q before it plans memory if all are positive. It does so later with others, and in a
    model for all sizes it then gives all channels the factor of the first.
    """
    if not is_quantize(quantize):
        return False
    steps, _ = steps_before(quantize.inputs[0], _BETWEEN)
    factors = [factor for step in steps for factor in step.constants[: _FACTORS.get(step.node.op_type, 0)]]
    return any(has_several_numbers(factor) and not _positive(factor) for factor in factors)


def _positive(value: Any) -> bool:
    array = constant(value)
    return array is not None and bool((array > 0).all())


def scales_flat_product(quantize: Any) -> bool:
    """Return whether a Q rounds a product of two axes multiplied by factors of channels, but for its bias."""
    if not is_quantize(quantize):
        return False
    steps, node = steps_before(quantize.inputs[0], _BETWEEN)
    if node is None or node.op_type not in MATMULS:
        return False
    if node.outputs[0].shape is None or len(node.outputs[0].shape) != 2:
        return False
    if all(map(_leaves_scales, steps)):
        return True
    scaling = steps[:-1] if steps[-1].node.op_type == "Add" else steps
    return any(has_several_numbers(one) for step in scaling for one in step.constants)


def _leaves_scales(step: Step) -> bool:
    """Return whether a step leaves the scales of a weight where a Q takes them into itself."""
    kind = step.node.op_type
    return kind in _LINEAR and not (kind in _SUMS and any(map(_differ, step.constants)))


def _differ(value: Any) -> bool:
    array = constant(value)
    return array is None or bool((array != array.flat[0]).any())


_MOVING = frozenset(["Add", "Cast", "Div", "Identity", "Mul", "Neg", "Slice", "Sub", "Unsqueeze"])


def moved_product(value: Any) -> tuple[Operand, ...]:
    """Return the operands of the quantized product whose scales can be moved behind what reads a value; empty: none."""
    steps, node = steps_before(value, _MOVING)
    if node is None or node.op_type not in MATMULS or [step.node.op_type for step in steps] == ["Add"]:
        return ()
    found = operands(node)
    return found if all(one.quantized for one in found) else ()


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

_SCALING = frozenset(
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
    steps, _ = steps_before(value, _SCALING)
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


_BY_NUMBER_OR_CAST = BY_NUMBER | {"Cast", "Identity"}
_SCALES = frozenset(["Div", "Mul"])


def misplaces_numbers(node: Any) -> bool:
    """Return whether a node applies numbers to a matrix product that would be those of another axis of it."""
    if node.op_type not in _SCALES | _SUMS:
        return False
    steps, product = steps_before(node.outputs[0], _BY_NUMBER_OR_CAST)
    if product is None or product.op_type not in MATMULS:
        return False
    scales = node.op_type in _SCALES
    for one in filter(has_several_numbers, steps[0].constants):
        # Counted from the last axis, as constants have fewer than what they are applied to.
        axes = [axis for axis, size in enumerate(reversed(list(one.shape or ()))) if size != 1]
        if axes == [0]:
            found = operands(product)
            if scales and all(read.quantized and not read.is_weight for read in found):
                return True
        elif axes and (scales or len(axes) == 1):
            return True
    return False


def is_read_both_ways(transpose: Any) -> bool:
    """Return whether a node transposes a square weight that something else reads as it is."""
    if transpose.op_type != "Transpose":
        return False
    weight = transpose.inputs[0]
    if weight.shape is None or len(weight.shape) != 2 or weight.shape[0] != weight.shape[1] or not is_constant(weight):
        return False
    return any(reader.op_type in MATMULS for reader, _ in weight.uses())


_CHANNELS = 1
_KEEPS_AXES = frozenset([*MOVES, "Add", "Cast", "Clip", "Concat", "Div", "Gather", "MaxPool", "Mul", "Relu", "Sub"])
"""Operators behind which scales can be moved, or which keep the axes of their first input in any case."""
_JOINED = frozenset(["Add", "Cast", "Clip", "Div", "Identity", "LeakyRelu", "Mul", "Relu", "Sub"])
"""Operators before which a Q can be moved, with those that it takes into itself."""


def gathers_axis(node: Any) -> bool:
    """Return whether a Gather by one constant number reads an axis of a quantized product, but that of its channels."""
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
    before = maker(node.inputs[0])
    while before is not None and before.op_type in _KEEPS_AXES:
        before = maker(before.inputs[0])
    is_convolution = before is not None and before.op_type in ("Conv", "ConvTranspose")
    return is_convolution and all(operand.quantized for operand in operands(before))


def gathers_zero_points(node: Any) -> bool:
    """Return whether a Gather reads a product without a bias whose operands have a zero point."""
    return node.op_type == "Gather" and any(_has_zero_point(one.dequantize) for one in moved_product(node.inputs[0]))


def joins_before(quantize: Any) -> bool:
    """Return whether a Q with a zero point rounds what a concatenation of places has joined.

    OpenVINO rounds the parts and joins their zero points along the places, where a product can subtract none: it
    refuses the file. ``self.linear(torch.cat((token, x), 1))`` is enough.
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
    # A convolution subtracts zero points of its channels, and a matrix product those of the axis that it sums over.
    subtracted = {_CHANNELS if kind in ("Conv", "ConvTranspose") else axes - 1 for kind in _products(quantize)}
    return bool(subtracted - {axis})


def _products(quantize: Any) -> Iterator[str]:
    """Yield the operators of the products that read the codes of a Q."""
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
"""Operators with which a file computes with the sizes of its tensors."""


def is_shared_product(node: Any) -> bool:
    """Return whether a node is a quantized product without a bias whose result is read more than once."""
    if node.op_type not in PRODUCTS or not all(operand.quantized for operand in operands(node)):
        return False
    if node.op_type == "Gemm" or (node.op_type == "MatMul" and any(map(is_constant, node.inputs))):
        return False
    if any(not _is_zero(bias) for bias in node.inputs[2:] if bias is not None):
        return False
    value = node.outputs[0]
    while len(readers := [reader for reader, _ in value.uses()]) == 1 and not value.is_graph_output():
        if not _scales(readers[0]):
            return False
        value = readers[0].outputs[0]
    return bool(len(readers) + value.is_graph_output() > 1)


def sized_biases(nodes: Iterable[Any]) -> list[Any]:
    """Return the convolutions of a graph whose bias the engine may lose, as the file computes with sizes and rounds.

    OpenVINO reads a convolution with a bias as a convolution, its shape, and an addition of the bias in that shape.
    Where the file itself computes with a size, it then takes the size from there, which makes a second reader of the
    convolution. The addition is no part of its kernel any more but of the Q behind it, where all channels get the bias
    of the first.
    """
    nodes = list(nodes)
    if not any(node.op_type in _SIZED for node in nodes) or not any(map(is_quantize, nodes)):
        return []
    convolutions = [node for node in nodes if node.op_type in ("Conv", "ConvTranspose")]
    return [node for node in convolutions if len(node.inputs) > 2 and is_constant(node.inputs[2])]


def _scales(node: Any) -> bool:
    """Return whether a node multiplies a value by constants, or adds zeros to it: the engine joins both with scales."""
    varying = varying_inputs(node)
    if len(varying) != 1 or node.op_type not in ("Add", "Cast", "Div", "Identity", "Mul", "Sub"):
        return False
    others = [given for given in node.inputs if given not in (None, varying[0])]
    return node.op_type not in ("Add", "Sub") or all(map(_is_zero, others))


def _is_zero(value: Any) -> bool:
    array = constant(value)
    return array is not None and not array.any()
