"""The element types that ONNX wants of a node: inputs that share a type, and the outputs that have it."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple


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
