"""Structural check of an ONNX file, its inputs and outputs, and the files with its external weights.

The check compares nodes with the schemas of ONNX's operators, and the data size of tensors with shape and type. It
reads no data, so large files take no longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
"""Operators that count as ONNX's in every domain."""
_BITS = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2}
"""Bits of the types that share bytes."""


def structural_fault(onnx: Any, model: Any, unread: Mapping[str, int] | None = None) -> str | None:
    """Return the first structural fault; None without faults.

    Args:
        onnx: the module.
        model: an ``onnx.ModelProto``.
        unread: number of data bytes of each initializer without its data, by name.
    """
    opsets = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    schema = partial(_schema, onnx, opsets, {})
    return next(_graph_faults(onnx, schema, model.graph, unread or {}), None)


def _graph_faults(onnx: Any, schema: Any, graph: Any, unread: Mapping[str, int]) -> Iterator[str]:
    for tensor in graph.initializer:
        yield from _tensor_faults(onnx, tensor, f"the tensor {tensor.name!r}", unread.get(tensor.name))
    for value in (*graph.input, *graph.output, *graph.value_info):
        tensor_type = value.type.tensor_type
        if tensor_type.elem_type and tensor_type.elem_type not in onnx.TensorProto.DataType.values():
            yield f"the value {value.name!r} has the element type {tensor_type.elem_type}, which does not exist in ONNX"
        if any(size.HasField("dim_value") and size.dim_value < 0 for size in tensor_type.shape.dim):
            yield f"the value {value.name!r} has a negative size"
    outputs = set()
    for number, node in enumerate(graph.node):
        place = f"node {number} ({node.op_type or 'without operator'} {node.name!r})"
        for name in filter(None, node.output):
            if name in outputs:
                yield f"{place} writes {name!r}, which another node already writes"
            outputs.add(name)
        yield from _node_faults(schema, node, place)
        for entry in node.attribute:
            if entry.type == onnx.AttributeProto.TENSOR:
                yield from _tensor_faults(onnx, entry.t, f"{place}: its attribute {entry.name!r}")
            for subgraph in (entry.g, *entry.graphs):
                if subgraph.node:
                    yield from _graph_faults(onnx, schema, subgraph, {})


def _node_faults(schema: Any, node: Any, place: str) -> Iterator[str]:
    # A string that is not UTF-8 comes as bytes.
    if not all(isinstance(name, str) for name in (node.op_type, node.name, node.domain, *node.input, *node.output)):
        yield f"{place} has a name that is not valid UTF-8"
        return
    if not node.op_type:
        yield f"{place} has no operator"
        return
    expected = schema(node)
    if expected is None:
        if not any(node.output):
            yield f"{place} has no outputs"
        return
    for kind, names, least, most in (
        ("inputs", node.input, expected.min_input, expected.max_input),
        ("outputs", node.output, expected.min_output, expected.max_output),
    ):
        if not least <= len(names) <= most:
            yield f"{place} has {len(names)} {kind}; {expected.name} expects {least} to {most}"
    for formal, name in zip(expected.inputs, node.input, strict=False):
        if not name and formal.option.name == "Single":
            yield f"{place} lacks the input {formal.name!r}"
    if node.output and not any(node.output):
        yield f"{place} has no outputs"
    attributes = {entry.name: entry for entry in node.attribute}
    for name, attribute in expected.attributes.items():
        if name not in attributes:
            if attribute.required:
                yield f"{place} lacks the attribute {name!r}"
        # The enumerations in C++ and in the file are equal.
        elif attributes[name].type != int(attribute.type.value) and not attributes[name].ref_attr_name:
            yield f"{place}: its attribute {name!r} does not have the type that {expected.name} expects"
    # ONNX's shape inference crashes on this mismatch.
    parts = attributes["num_outputs"].i if node.op_type == "Split" and "num_outputs" in attributes else len(node.output)
    if parts != len(node.output):
        yield f"{place} has {len(node.output)} outputs, but its attribute 'num_outputs' is {parts}"


def _schema(onnx: Any, opsets: dict[str, int], cache: dict[tuple[str, str], Any], node: Any) -> Any:
    domain = "" if node.domain == "ai.onnx" or node.op_type in _QUANTIZERS else node.domain
    key = (domain, node.op_type)
    if key not in cache:
        latest = onnx.defs.onnx_opset_version()
        cache[key] = None
        # An operator newer than the file's opset is checked against its newest schema: a rule reports the opset.
        for version in (latest, min(opsets.get(domain or "ai.onnx", latest), latest)):
            with suppress(onnx.defs.SchemaError):
                cache[key] = onnx.defs.get_schema(node.op_type, version, domain)
    return cache[key]


def _tensor_faults(onnx: Any, tensor: Any, place: str, unread_bytes: int | None = None) -> Iterator[str]:
    if tensor.data_type not in onnx.TensorProto.DataType.values() or not tensor.data_type:
        yield f"{place} has the element type {tensor.data_type}, which does not exist in ONNX"
        return
    if any(size < 0 for size in tensor.dims):
        yield f"{place} has the shape {list(tensor.dims)}"
        return
    if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.data_type == onnx.TensorProto.STRING:
        return
    name, count = onnx.TensorProto.DataType.Name(tensor.data_type), prod(tensor.dims)
    bits = _BITS.get(name) or 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    if unread_bytes is not None or tensor.HasField("raw_data"):
        actual, expected, unit = (
            len(tensor.raw_data) if unread_bytes is None else unread_bytes,
            -(-count * bits // 8),
            "bytes",
        )
    else:
        field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
        actual, unit = len(getattr(tensor, field)), "numbers"
        packed = 8 // bits if bits < 8 else 1
        expected = -(-count // packed) * (2 if name.startswith("COMPLEX") else 1)
    if actual != expected:
        yield f"{place} has {actual} {unit}, but its shape {list(tensor.dims)} of {name} needs {expected}"


@dataclass(frozen=True)
class Value:
    """Input or output of a graph.

    Attributes:
        dtype: NumPy name of the type.
        shape: sizes, or names of dynamic dimensions; None for a size without both.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a graph, in its order."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


def read_signature(path: Path) -> Signature:
    """Read the inputs and outputs of an ONNX file without its external weights."""
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    return Signature(tuple(map(_value, graph.input)), tuple(map(_value, graph.output)))


def _value(info: Any) -> Value:
    import onnx

    tensor = info.type.tensor_type
    dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    sizes = (d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim)
    return Value(info.name, dtype, tuple(sizes))


def external_files(path: Path) -> tuple[str, ...]:
    """Return the names of the external data files of an ONNX file; empty without external data."""
    import onnx

    return files_of(onnx.load(str(path), load_external_data=False).graph.initializer)


def files_of(tensors: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of the external data files of ``onnx.TensorProto`` messages."""
    locations = (entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location")
    return tuple(dict.fromkeys(locations))
