"""An ONNX file as a ``torch.fx.GraphModule`` that computes the same, Q/DQ pairs included."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx

from quantizer.engines.base import TensorSpec
from quantizer.engines.engine_file import checked_onnx
from quantizer.engines.inspection.onnx_graph import read_graph
from quantizer.engines.optional_import import import_library
from quantizer.engines.torch_engine.onnx_import import operators as _operators
from quantizer.engines.torch_engine.onnx_import.graph_builder import Constant
from quantizer.engines.torch_engine.onnx_import.graph_builder import GraphBuilder
from quantizer.engines.torch_engine.onnx_import.graph_builder import OnnxNode
from quantizer.engines.torch_engine.onnx_import.graph_builder import Value
from quantizer.engines.torch_engine.onnx_import.graph_builder import operators
from quantizer.errors import EngineError

__all__ = ["Imported", "import_onnx"]

del _operators


@dataclass(frozen=True, slots=True)
class Imported:
    """A graph, and what goes in and comes out.

    Attributes:
        module: takes the inputs by position and returns a tuple of the outputs.
        inputs: in the order of the file, without constants.
        outputs: their names, in the order of the file.
    """

    module: fx.GraphModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]


def import_onnx(path: Path) -> Imported:
    """Return the graph of an ONNX file in aten operators; QuantizeLinear and DequantizeLinear stay what they are.

    Dynamic axes stay dynamic. The operators are those that the exporter of this package writes.

    Raises:
        EngineError: the file is missing, damaged or no ONNX file, or has an operator, or a form of one, that is not
            known here; the message names the node.
        MissingDependencyError: onnx is not installed.
    """
    checked_onnx(path)
    model = read_graph(path)
    onnx = import_library("onnx", "onnx")
    graph = model.graph
    build = GraphBuilder()
    values: dict[str, Value | None] = {"": None}
    for held in graph.initializer:
        values[held.name] = Constant(held.name, _array(onnx, held, path))
    specs = tuple(_spec(onnx, given) for given in graph.input if given.name not in values)
    for spec in specs:
        values[spec.name] = build.graph.placeholder(f"input_{len(values)}")
    ranks = _ranks(onnx, model)
    for node in graph.node:
        _add(onnx, build, node, values, ranks)
    build.graph.output(tuple(build.tensor(values[made.name]) for made in graph.output))
    build.graph.eliminate_dead_code()
    module = fx.GraphModule(build.root, build.graph)
    module.delete_all_unused_submodules()
    return Imported(module, specs, tuple(made.name for made in graph.output))


def _add(
    onnx: Any, build: GraphBuilder, node: Any, values: dict[str, Value | None], ranks: dict[str, int | None]
) -> None:
    name = node.name or f"{node.op_type} that makes {node.output[0]}"
    if node.domain not in ("", "ai.onnx") or node.op_type not in operators.names():
        known = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        raise EngineError(
            f"node {name!r}: the torch engine has no operator {known}; leave this part of the model out of the export, "
            "or take another backend"
        )
    attributes = {held.name: _attribute(onnx, held) for held in node.attribute}
    inputs = tuple(values[read] for read in node.input)
    build.origin = name
    found = OnnxNode(
        name, node.op_type, inputs, attributes, tuple(node.output), tuple(ranks.get(read) for read in node.input)
    )
    made = operators[node.op_type](build, found)
    values.update(zip(node.output, made if isinstance(made, tuple) else (made,), strict=False))


def _attribute(onnx: Any, held: Any) -> Any:
    value = onnx.helper.get_attribute_value(held)
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    return value.decode() if isinstance(value, bytes) else value


def _array(onnx: Any, held: Any, path: Path) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = onnx.numpy_helper.to_array(held, str(path.parent))
    return found


def _spec(onnx: Any, given: Any) -> TensorSpec:
    tensor = given.type.tensor_type
    sizes = tensor.shape.dim
    shape = tuple(size.dim_value if size.HasField("dim_value") else None for size in sizes)
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    try:
        torch.from_numpy(np.empty(0, dtype))
    except TypeError as error:
        raise EngineError(f"input {given.name!r} has type {dtype}, which the torch engine cannot take") from error
    return TensorSpec(given.name, dtype, shape, tuple(size.dim_param for size in sizes))


def _ranks(onnx: Any, model: Any) -> dict[str, int | None]:
    """Return the rank of each value, as far as ONNX can tell."""
    known = onnx.shape_inference.infer_shapes(model).graph
    stored: dict[str, int | None] = {held.name: len(held.dims) for held in model.graph.initializer}
    return stored | dict(_told(known.input)) | dict(_told(known.value_info)) | dict(_told(known.output))


def _told(values: Iterable[Any]) -> Iterable[tuple[str, int | None]]:
    for value in values:
        tensor = value.type.tensor_type
        yield value.name, len(tensor.shape.dim) if tensor.HasField("shape") else None
