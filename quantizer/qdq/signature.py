"""Names, types and shapes of the inputs and outputs of an ONNX file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
