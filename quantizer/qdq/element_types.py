"""The element types that ONNX wants of a node: inputs that share a type, and the outputs that have it.

Weights of 4 bits with an odd number of inputs, which an engine reads wrongly.

Two codes of INT4 share a byte. Measured with OpenVINO 2026.4: where a weight [N, K] has an odd K of 17 or more, its
kernel for float activations takes each second row of codes from the wrong half of the byte (5 to 30 dB, for more than
one row of the other operand). The same codes in INT8 are right.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from quantizer.qdq.graph import attribute, is_dequantize


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
