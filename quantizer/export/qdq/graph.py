"""Queries of Q/DQ graphs: nodes, constants, readers, and the element types that ONNX requires."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from quantizer.numerics.formats import QTYPES


class TypeGroup(NamedTuple):
    """Indices of the inputs and outputs of a node that share one element type."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def type_groups(node: Any, opset: int) -> list[TypeGroup]:
    """Return the type groups of a node; empty for operators of other domains or newer opsets."""
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
    input_variables, output_variables = _type_variables(schema.inputs, inputs), _type_variables(schema.outputs, outputs)
    return tuple(
        TypeGroup(
            tuple(index for index, variable in enumerate(input_variables) if variable == name),
            tuple(index for index, variable in enumerate(output_variables) if variable == name),
        )
        for name in dict.fromkeys(input_variables)
        if name in constrained
    )


def _type_variables(parameters: Any, count: int) -> list[str]:
    """Return the type variable of each of ``count`` values; empty for a value of any type."""
    import onnx

    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    variables = [parameter.type_str for parameter in parameters]
    if parameters and parameters[-1].option == variadic:
        last = parameters[-1].type_str if parameters[-1].is_homogeneous else ""
        variables = [*variables[:-1], *[last] * (count - len(variables) + 1)]
    return (variables + [""] * count)[:count]


_PAIRED = frozenset({"INT4", "UINT4"})

_MOVES = frozenset({"Transpose", "Reshape", "Expand", "Cast", "Identity"})
"""Operators between a weight and its matrix multiplication."""


def has_odd_pairs(node: Any) -> bool:
    """Return whether a node dequantizes a 4-bit weight with an odd or unknown number of inputs.

    Two INT4 values share a byte. For a weight [N, K] with an odd K of 17 or more, OpenVINO 2026.4 reads every second
    row from the wrong half of the byte, with float activations of several rows: 5 to 30 dB SQNR. INT8 is correct.
    """
    stored = node.inputs[0] if is_dequantize(node) else None
    if stored is None or not stored.is_initializer() or stored.dtype is None or stored.dtype.name not in _PAIRED:
        return False
    return any(map(_is_odd, _inner_sizes(node.outputs[0])))


def _is_odd(size: Any) -> bool:
    return not isinstance(size, int) or size % 2 == 1


def _inner_sizes(value: Any) -> list[Any]:
    """Return the sizes of the summed axis of each matrix multiplication that reads a weight."""
    sizes = []
    for reader, index in value.uses():
        if reader.op_type in _MOVES:
            sizes += _inner_sizes(reader.outputs[0])
        elif reader.op_type == "MatMul" and value.shape is not None:
            sizes.append(value.shape[-1 if index == 0 else -2])
        elif reader.op_type == "Gemm" and value.shape is not None and index < 2:
            is_transposed = attribute(reader, ("transA", "transB")[index], 0)
            sizes.append(value.shape[-2 if (index == 0) == bool(is_transposed) else -1])
    return sizes


HALVES = ("FLOAT16", "BFLOAT16")
WIDTHS = {"FLOAT16": "float16", "BFLOAT16": "bfloat16", "FLOAT": "float32"}
"""Names of float types in ONNX and in torch."""

_MAX_DEPTH = 64


def name_of(node: Any) -> str:
    """Return the name of a node, or its operator and output for a node without a name."""
    return str(node.name or f"{node.op_type} with output {node.outputs[0].name}")


def maker(value: Any) -> Any:
    """Return the node that computes a value; None for inputs, constants and None."""
    return None if value is None else value.producer()


def readers(value: Any) -> list[Any]:
    """Return the nodes that read a value, each once, in order."""
    return list(dict.fromkeys(node for node, _ in value.uses()))


def is_quantize(node: Any) -> bool:
    """Return whether a node is a QuantizeLinear."""
    return node is not None and node.op_type == "QuantizeLinear"


def is_dynamic_quantize(node: Any) -> bool:
    """Return whether a node is a DynamicQuantizeLinear, which computes scale and zero point."""
    return node is not None and node.op_type == "DynamicQuantizeLinear"


def is_dequantize(node: Any) -> bool:
    """Return whether a node is a DequantizeLinear."""
    return node is not None and node.op_type == "DequantizeLinear"


def is_dequantized(value: Any) -> bool:
    """Return whether a value comes from a DequantizeLinear."""
    return is_dequantize(maker(value))


def pair_before(value: Any) -> tuple[Any, Any] | None:
    """Return the Q or dynamic Q and the DQ that compute an activation; None for any other value."""
    dequantize = maker(value)
    quantize = maker(dequantize.inputs[0]) if is_dequantize(dequantize) else None
    return (quantize, dequantize) if is_quantize(quantize) or is_dynamic_quantize(quantize) else None


def attribute(node: Any, name: str, default: int) -> int:
    """Return an integer attribute of a node."""
    return int(node.attributes[name].as_int()) if name in node.attributes else default


def block_size(node: Any) -> int | None:
    """Return the block size of a Q or DQ; None without blocks."""
    return attribute(node, "block_size", 0) or None


def floats(value: Any) -> np.ndarray[Any, Any] | None:
    """Return the array of a floating-point constant stored in the value, where it can be replaced.

    None for any other value, also for the output of an Identity or Constant node: ``constant`` reads those.
    """
    tensor = None if value is None else value.const_value
    return tensor.numpy() if tensor is not None and tensor.dtype.is_floating_point() else None


def scalar(value: Any) -> float | None:
    """Return the number of a floating-point constant with one element; None for any other value."""
    array = floats(value)
    return None if array is None or array.size != 1 else float(array.reshape(()))


def constant(value: Any) -> np.ndarray[Any, Any] | None:
    """Return the array of a constant in any form; None if the value is computed or not available."""
    for _ in range(_MAX_DEPTH):
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
    for name, getter in (("value", "as_tensor"), ("value_float", "as_float"), ("value_floats", "as_floats")):
        if name in node.attributes:
            stored = getattr(node.attributes[name], getter)()
            return _array(stored) if name == "value" else np.asarray(stored, dtype=np.float32)
    return None


def _array(tensor: Any) -> np.ndarray[Any, Any] | None:
    import onnx_ir

    if isinstance(tensor, onnx_ir.ExternalTensor) and not tensor.valid():
        return None  # the file must not be opened; the rule external-data reports the reason
    return np.asarray(tensor.numpy())


def is_constant(value: Any, depth: int = _MAX_DEPTH) -> bool:
    """Return whether a value is independent of the model's inputs."""
    if value is None or depth == 0:
        return False
    node = value.producer()
    if node is None:
        return bool(value.is_initializer())
    return all(is_constant(value_read, depth - 1) for value_read in node.inputs if value_read is not None)


def element(value: Any) -> str:
    """Return the name of a value's element type; empty if unknown."""
    if value is None:
        return ""
    if value.dtype is not None:
        return str(value.dtype.name)
    return "" if value.const_value is None else str(value.const_value.dtype.name)


def shape(value: Any) -> tuple[int | None, ...] | None:
    """Return the sizes of a value, None for a dynamic size; None if the rank is unknown."""
    if value is None:
        return None
    if value.const_value is not None:
        return tuple(int(size) for size in value.const_value.shape)
    return None if value.shape is None else tuple(size if isinstance(size, int) else None for size in value.shape)


def quantized_type(node: Any) -> str:
    """Return the ONNX element type of the quantized values of a Q or DQ."""
    if is_quantize(node):
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            return element(node.inputs[2])
        return element(node.outputs[0]) or "UINT8"
    return element(node.inputs[0]) or (
        quantized_type(maker(node.inputs[0])) if is_quantize(maker(node.inputs[0])) else ""
    )


def format_name(node: Any) -> str:
    """Return the package's name of the format of a Q or DQ; ONNX's name in lower case for other formats."""
    stored = quantized_type(node)
    return next((kind.name for kind in QTYPES.values() if kind.onnx_type == stored), stored.lower())


def paired(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a Q with each of its DequantizeLinear nodes."""
    return ((node, reader) for reader in readers(node.outputs[0]) if is_dequantize(reader))


def varying_inputs(node: Any) -> list[Any]:
    """Return the inputs of a node that depend on the model's inputs."""
    return [value for value in node.inputs if value is not None and not is_constant(value)]


class Step(NamedTuple):
    """Node that computes a value from another value and constants.

    Attributes:
        node: the node.
        read: the value that it reads.
        constants: its other inputs.
    """

    node: Any
    read: Any
    constants: list[Any]


def steps_before(value: Any, operators: Collection[str]) -> tuple[list[Step], Any | None]:
    """Return the steps of these operators before a value, the last first, and the node before the steps.

    That node is None if a model input precedes the steps, or if one of the operators reads several values.
    """
    steps: list[Step] = []
    while (node := maker(value)) is not None and node.op_type in operators:
        varying = varying_inputs(node)
        if len(varying) != 1:
            return steps, None
        (value,) = varying
        steps.append(Step(node, value, [other for other in node.inputs if other not in (None, value)]))
    return steps, node


def has_several_numbers(value: Any) -> bool:
    """Return whether a constant has more than one number, or is not available."""
    array = constant(value)
    return array is None or array.size > 1
