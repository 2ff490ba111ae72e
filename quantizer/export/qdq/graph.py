"""A Q/DQ graph: its nodes, constants, readers, and the element types that ONNX wants.

Weights of 4 bits with an odd number of inputs, which an engine reads wrongly.

Two codes of INT4 share a byte. Measured with OpenVINO 2026.4: where a weight [N, K] has an odd K of 17 or more, its
kernel for float activations takes each second row of codes from the wrong half of the byte (5 to 30 dB, for more than
one row of the other operand). The same codes in INT8 are right.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from quantizer.numerics.formats import QTYPES


class TypeGroup(NamedTuple):
    """Inputs and outputs of a node that have one element type, by their places."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def type_groups(node: Any, opset: int) -> list[TypeGroup]:
    """Return the groups of a node; none for an operator that is not ONNX's own or that the opset lacks."""
    if node.domain not in ("", "ai.onnx"):
        return []
    return list(_groups(node.op_type, opset, len(node.inputs), len(node.outputs)))


@cache
def _groups(operator: str, opset: int, inputs: int, outputs: int) -> tuple[TypeGroup, ...]:
    import onnx

    try:
        schema = onnx.defs.get_schema(operator, opset, "")
    except onnx.defs.SchemaError:
        return ()
    constrained = {constraint.type_param_str for constraint in schema.type_constraints}
    takes, makes = _letters(schema.inputs, inputs), _letters(schema.outputs, outputs)
    return tuple(
        TypeGroup(
            tuple(place for place, letter in enumerate(takes) if letter == name),
            tuple(place for place, letter in enumerate(makes) if letter == name),
        )
        for name in dict.fromkeys(takes)
        if name in constrained
    )


def _letters(parameters: Any, count: int) -> list[str]:
    """Return the type variable of each of ``count`` values; empty for one that may have any type."""
    import onnx

    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    found = [parameter.type_str for parameter in parameters]
    if parameters and parameters[-1].option == variadic:
        last = parameters[-1].type_str if parameters[-1].is_homogeneous else ""
        found = [*found[:-1], *[last] * (count - len(found) + 1)]
    return (found + [""] * count)[:count]


_PAIRED = frozenset({"INT4", "UINT4"})

_MOVES = frozenset({"Transpose", "Reshape", "Expand", "Cast", "Identity"})
"""Operators between a weight and its product."""


def has_odd_pairs(node: Any) -> bool:
    """Return whether a node is the DequantizeLinear of such a weight, or of one whose inputs nobody counted."""
    codes = node.inputs[0] if is_dequantize(node) else None
    if codes is None or not codes.is_initializer() or codes.dtype is None or codes.dtype.name not in _PAIRED:
        return False
    return any(map(_is_odd, _inner_sizes(node.outputs[0])))


def _is_odd(size: Any) -> bool:
    return not isinstance(size, int) or size % 2 == 1


def _inner_sizes(value: Any) -> list[Any]:
    """Return the sizes of the axis over which the products that read a weight add up."""
    found = []
    for reader, place in value.uses():
        if reader.op_type in _MOVES:
            found += _inner_sizes(reader.outputs[0])
        elif reader.op_type == "MatMul" and value.shape is not None:
            found.append(value.shape[-1 if place == 0 else -2])
        elif reader.op_type == "Gemm" and value.shape is not None and place < 2:
            turned = attribute(reader, ("transA", "transB")[place], 0)
            found.append(value.shape[-2 if (place == 0) == bool(turned) else -1])
    return found


HALVES = ("FLOAT16", "BFLOAT16")
WIDTHS = {"FLOAT16": "float16", "BFLOAT16": "bfloat16", "FLOAT": "float32"}
"""ONNX's names of float types, and ours."""

_DEEPEST = 64


def name_of(node: Any) -> str:
    """Return the node's name; if it has none, its operator and its output."""
    return str(node.name or f"{node.op_type} that makes {node.outputs[0].name}")


def maker(value: Any) -> Any:
    """Return the node that makes a value; None for an input, a constant of the graph or None."""
    return None if value is None else value.producer()


def readers(value: Any) -> list[Any]:
    """Return the nodes that read a value, in order, each once."""
    return list(dict.fromkeys(node for node, _ in value.uses()))


def is_quantize(node: Any) -> bool:
    """Return whether a node is a QuantizeLinear."""
    return node is not None and node.op_type == "QuantizeLinear"


def is_dynamic_quantize(node: Any) -> bool:
    """Return whether a node is a DynamicQuantizeLinear, which takes its scale and zero point from its input."""
    return node is not None and node.op_type == "DynamicQuantizeLinear"


def is_dequantize(node: Any) -> bool:
    """Return whether a node is a DequantizeLinear."""
    return node is not None and node.op_type == "DequantizeLinear"


def is_dequantized(value: Any) -> bool:
    """Return whether a value comes from a DequantizeLinear."""
    return is_dequantize(maker(value))


def pair_before(value: Any) -> tuple[Any, Any] | None:
    """Return the Q, dynamic or not, and the DQ that make an activation; None if anything else does."""
    dequantize = maker(value)
    quantize = maker(dequantize.inputs[0]) if is_dequantize(dequantize) else None
    return (quantize, dequantize) if is_quantize(quantize) or is_dynamic_quantize(quantize) else None


def attribute(node: Any, name: str, default: int) -> int:
    """Return an integer attribute."""
    return int(node.attributes[name].as_int()) if name in node.attributes else default


def block_size(node: Any) -> int | None:
    """Return how many values share a scale of a Q or DQ; None if the scales are not those of blocks."""
    return attribute(node, "block_size", 0) or None


def floats(value: Any) -> np.ndarray[Any, Any] | None:
    """Return the array of a floating constant that the value itself holds, so that it can be replaced there.

    None for anything else, also for the output of an Identity or a Constant: ``constant`` reads through those.
    """
    held = None if value is None else value.const_value
    return held.numpy() if held is not None and held.dtype.is_floating_point() else None


def scalar(value: Any) -> float | None:
    """Return the number in a floating constant of one element that the value itself holds; None for anything else."""
    held = floats(value)
    return None if held is None or held.size != 1 else float(held.reshape(()))


def constant(value: Any) -> np.ndarray[Any, Any] | None:
    """Return the array of a constant value, however it is stored; None if it is computed, or not available."""
    for _ in range(_DEEPEST):
        if value is None:
            return None
        if value.const_value is not None:
            return _array(value.const_value)
        node = value.producer()
        if node is None or node.op_type != "Identity":
            break
        value = node.inputs[0]
    node = maker(value)
    if node is None or node.op_type != "Constant":
        return None
    for name, read in (("value", "as_tensor"), ("value_float", "as_float"), ("value_floats", "as_floats")):
        if name in node.attributes:
            held = getattr(node.attributes[name], read)()
            return _array(held) if name == "value" else np.asarray(held, dtype=np.float32)
    return None


def _array(tensor: Any) -> np.ndarray[Any, Any] | None:
    import onnx_ir

    if isinstance(tensor, onnx_ir.ExternalTensor) and not tensor.valid():
        return None  # its file must not be opened; the rule external-data reports why
    return np.asarray(tensor.numpy())


def is_constant(value: Any, depth: int = _DEEPEST) -> bool:
    """Return whether a value is independent of the model's inputs."""
    if value is None or depth == 0:
        return False
    node = value.producer()
    if node is None:
        return bool(value.is_initializer())
    return all(is_constant(read, depth - 1) for read in node.inputs if read is not None)


def element(value: Any) -> str:
    """Return the name of a value's element type; empty if unknown."""
    if value is None:
        return ""
    if value.dtype is not None:
        return str(value.dtype.name)
    return "" if value.const_value is None else str(value.const_value.dtype.name)


def shape(value: Any) -> tuple[int | None, ...] | None:
    """Return the sizes of a value's axes, None for one that varies; None if even their number is unknown."""
    if value is None:
        return None
    if value.const_value is not None:
        return tuple(int(size) for size in value.const_value.shape)
    return None if value.shape is None else tuple(size if isinstance(size, int) else None for size in value.shape)


def steps_type(node: Any) -> str:
    """Return the ONNX element type of the codes that a Q makes or a DQ reads."""
    if is_quantize(node):
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            return element(node.inputs[2])
        return element(node.outputs[0]) or "UINT8"
    return element(node.inputs[0]) or (steps_type(maker(node.inputs[0])) if is_quantize(maker(node.inputs[0])) else "")


def format_name(node: Any) -> str:
    """Return our name of the format of a Q or DQ; ONNX's name in lower case if we have none."""
    stored = steps_type(node)
    return next((kind.name for kind in QTYPES.values() if kind.onnx_type == stored), stored.lower())


def paired(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a Q with each DQ that reads its codes."""
    return ((node, reader) for reader in readers(node.outputs[0]) if is_dequantize(reader))


def varying_inputs(node: Any) -> list[Any]:
    """Return the inputs of a node that depend on the model's."""
    return [given for given in node.inputs if given is not None and not is_constant(given)]


class Step(NamedTuple):
    """A node that makes a value of one other value and of constants.

    Attributes:
        node: the node.
        read: the value that it reads.
        constants: its other inputs.
    """

    node: Any
    read: Any
    constants: list[Any]


def steps_before(value: Any, operators: Collection[str]) -> tuple[list[Step], Any | None]:
    """Return the steps of these operators that make a value, the last one first, and the node before them.

    That node is None where an input of the model is before them, or where one of these operators reads several values.
    """
    steps: list[Step] = []
    while (node := maker(value)) is not None and node.op_type in operators:
        varying = varying_inputs(node)
        if len(varying) != 1:
            return steps, None
        (value,) = varying
        steps.append(Step(node, value, [given for given in node.inputs if given not in (None, value)]))
    return steps, node


def has_several_numbers(value: Any) -> bool:
    """Return whether a constant has more than one number, or cannot be read."""
    array = constant(value)
    return array is None or array.size > 1
