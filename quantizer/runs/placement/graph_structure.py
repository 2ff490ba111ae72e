"""A checksum of all in an ONNX file that decides how long its engine takes: operators, shapes and types, no weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from quantizer.common.optional_import import import_library
from quantizer.qdq.onnx_file import read_graph

_SMALL = 64
"""Whole numbers up to so many are axes and shapes, whose values count."""


def structure_digest(path: Path) -> str:
    """Return a checksum that two files share if they differ in the values of weights and scales alone.

    Which scales are equal counts, since engines fuse what has one scale; so does whether a zero point is zero.
    """
    onnx, model = import_library("onnx", "onnx"), read_graph(path)
    found, known = hashlib.sha256(), dict[float, int]()
    for tensor in _tensors(onnx, model.graph):
        found.update(f"{tensor.name} {_values(onnx, tensor, known)}\n".encode())
        for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
            tensor.ClearField(field)
        # Where data lies in a second file is no matter of time.
        tensor.ClearField("external_data")
    found.update(model.SerializeToString(deterministic=True))
    return found.hexdigest()


def _tensors(onnx: Any, graph: Any) -> Iterator[Any]:
    """Yield the constants of a graph, with those in attributes and inner graphs."""
    yield from graph.initializer
    for node in graph.node:
        for entry in node.attribute:
            if entry.type == onnx.AttributeProto.TENSOR:
                yield entry.t
            for below in (entry.g, *entry.graphs):
                yield from _tensors(onnx, below)


def _values(onnx: Any, tensor: Any, known: dict[float, int]) -> str:
    """Return as much of the values of a constant as time may depend on."""
    kind, size = onnx.TensorProto.DataType.Name(tensor.data_type), prod(tensor.dims)
    if size > _SMALL or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return ""
    if kind in ("INT32", "INT64", "BOOL"):
        return str(onnx.numpy_helper.to_array(tensor).tolist())
    if size == 1 and kind in ("INT8", "UINT8"):
        return str(bool(onnx.numpy_helper.to_array(tensor).any()))
    if size == 1 and kind in ("FLOAT", "FLOAT16"):
        return str(known.setdefault(float(onnx.numpy_helper.to_array(tensor).reshape(-1)[0]), len(known)))
    return ""
