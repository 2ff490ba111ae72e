"""Structural check of an ONNX file, so that its readers can rely on what ONNX promises.

Each node of ONNX's own operators has the inputs, outputs and attributes of its schema, and each tensor the data that
its shape and type require. Large files take no longer: no data is read.

Names, types and shapes of the inputs and outputs of an ONNX file.

Files beside an ONNX file that hold its weights.
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
"""Read as ONNX's whatever their domain."""
_BITS = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2}
"""Types of which a byte holds several, and the bits of one."""


def structural_fault(onnx: Any, model: Any, held: Mapping[str, int] | None = None) -> str | None:
    """Return the first structural fault; None if there is none.

    Args:
        onnx: the module.
        model: an ``onnx.ModelProto``.
        held: the bytes of data of the initializers that were read without it, by name.
    """
    opsets = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    schema = partial(_schema, onnx, opsets, {})
    return next(_graph_faults(onnx, schema, model.graph, held or {}), None)


def _graph_faults(onnx: Any, schema: Any, graph: Any, held: Mapping[str, int]) -> Iterator[str]:
    for tensor in graph.initializer:
        yield from _tensor_faults(onnx, tensor, f"the tensor {tensor.name!r}", held.get(tensor.name))
    for value in (*graph.input, *graph.output, *graph.value_info):
        told = value.type.tensor_type
        if told.elem_type and told.elem_type not in onnx.TensorProto.DataType.values():
            yield f"the value {value.name!r} is of the type {told.elem_type}, which ONNX does not have"
        if any(size.HasField("dim_value") and size.dim_value < 0 for size in told.shape.dim):
            yield f"the value {value.name!r} has a size below 0"
    made = set()
    for number, node in enumerate(graph.node):
        place = f"node {number} ({node.op_type or 'of no operator'} {node.name!r})"
        for name in filter(None, node.output):
            if name in made:
                yield f"{place} makes {name!r}, which another node makes"
            made.add(name)
        yield from _node_faults(schema, node, place)
        for entry in node.attribute:
            if entry.type == onnx.AttributeProto.TENSOR:
                yield from _tensor_faults(onnx, entry.t, f"{place}: its attribute {entry.name!r}")
            for below in (entry.g, *entry.graphs):
                if below.node:
                    yield from _graph_faults(onnx, schema, below, {})


def _node_faults(schema: Any, node: Any, place: str) -> Iterator[str]:
    # A string that is not UTF-8 comes as bytes.
    if not all(isinstance(name, str) for name in (node.op_type, node.name, node.domain, *node.input, *node.output)):
        yield f"{place} has a name that is no text"
        return
    if not node.op_type:
        yield f"{place} has no operator"
        return
    wanted = schema(node)
    if wanted is None:
        if not any(node.output):
            yield f"{place} makes nothing"
        return
    for what, names, least, most in (
        ("inputs", node.input, wanted.min_input, wanted.max_input),
        ("outputs", node.output, wanted.min_output, wanted.max_output),
    ):
        if not least <= len(names) <= most:
            yield f"{place} has {len(names)} {what}, where {wanted.name} has {least} to {most}"
    for formal, name in zip(wanted.inputs, node.input, strict=False):
        if not name and formal.option.name == "Single":
            yield f"{place} has no {formal.name}"
    if node.output and not any(node.output):
        yield f"{place} makes nothing"
    given = {entry.name: entry for entry in node.attribute}
    for name, attribute in wanted.attributes.items():
        if name not in given:
            if attribute.required:
                yield f"{place} has no attribute {name!r}"
        # The two enumerations are the same in C++ and in the file.
        elif given[name].type != int(attribute.type.value) and not given[name].ref_attr_name:
            yield f"{place}: its attribute {name!r} is of another type than {wanted.name}'s"
    # ONNX's own inference of shapes ends the process there.
    parts = given["num_outputs"].i if node.op_type == "Split" and "num_outputs" in given else len(node.output)
    if parts != len(node.output):
        yield f"{place} has {len(node.output)} outputs, and its attribute 'num_outputs' is {parts}"


def _schema(onnx: Any, opsets: dict[str, int], known: dict[tuple[str, str], Any], node: Any) -> Any:
    domain = "" if node.domain == "ai.onnx" or node.op_type in _QUANTIZERS else node.domain
    key = (domain, node.op_type)
    if key not in known:
        latest = onnx.defs.onnx_opset_version()
        known[key] = None
        # An operator newer than the file's opset is checked against its newest schema: a rule reports the opset.
        for version in (latest, min(opsets.get(domain or "ai.onnx", latest), latest)):
            with suppress(onnx.defs.SchemaError):
                known[key] = onnx.defs.get_schema(node.op_type, version, domain)
    return known[key]


def _tensor_faults(onnx: Any, tensor: Any, place: str, held: int | None = None) -> Iterator[str]:
    if tensor.data_type not in onnx.TensorProto.DataType.values() or not tensor.data_type:
        yield f"{place} is of the type {tensor.data_type}, which ONNX does not have"
        return
    if any(size < 0 for size in tensor.dims):
        yield f"{place} has the shape {list(tensor.dims)}"
        return
    if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.data_type == onnx.TensorProto.STRING:
        return
    name, count = onnx.TensorProto.DataType.Name(tensor.data_type), prod(tensor.dims)
    bits = _BITS.get(name) or 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    if held is not None or tensor.HasField("raw_data"):
        got, wanted, unit = len(tensor.raw_data) if held is None else held, -(-count * bits // 8), "bytes"
    else:
        field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
        got, unit = len(getattr(tensor, field)), "numbers"
        packed = 8 // bits if bits < 8 else 1
        wanted = -(-count // packed) * (2 if name.startswith("COMPLEX") else 1)
    if got != wanted:
        yield f"{place} has {got} {unit}, and its shape {list(tensor.dims)} of {name} has {wanted}"


@dataclass(frozen=True)
class Value:
    """Input or output of a graph.

    Attributes:
        dtype: its NumPy name.
        shape: a size, or the name of a dynamic dimension; None if the file states neither.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a graph, in its own order."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


def read_signature(path: Path) -> Signature:
    """Read an ONNX file without its external weights."""
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
    """Return the names of the files beside an ONNX file in which its initializers lie; empty if it holds them all."""
    import onnx

    return files_of(onnx.load(str(path), load_external_data=False).graph.initializer)


def files_of(tensors: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of the files in which ``onnx.TensorProto`` lie; empty if they hold their values themselves."""
    told = (entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location")
    return tuple(dict.fromkeys(told))
