"""Import of an ONNX file as a graph of torch operators with the same results, Q/DQ pairs included.

Models of older opsets are converted first. Constant expressions are computed at import.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx

from quantizer.errors import EngineError
from quantizer.export.onnx_import import elementwise as _elementwise
from quantizer.export.onnx_import import layout as _layout
from quantizer.export.onnx_import import products as _products
from quantizer.export.onnx_import.graph_builder import (
    Attributes,
    Constant,
    GraphBuilder,
    OnnxNode,
    OperatorGraph,
    Sizes,
    Value,
    inferred_shapes,
    operators,
    translated,
)
from quantizer.export.qdq.onnx_file import TensorSpec, checked_onnx, read_graph
from quantizer.utils.lazy import import_library

# Importing the files of operators registers them.
del _elementwise, _layout, _products

_SUPPORTED = 13
"""First supported opset: axes are inputs, and Softmax has one axis."""
_CONVERTED_TO = 18
_OLDEST = 7
"""First opset with today's broadcasting, which is also the first of ONNX Runtime."""


def in_known_opset(onnx: Any, model: Any) -> Any:
    """Return a model in a supported opset, converted by ONNX if necessary."""
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    latest = onnx.defs.onnx_opset_version()
    if opset > latest:
        raise EngineError(
            f"opset {opset} is newer than opset {latest}, the latest of the installed onnx {onnx.__version__}: install "
            "a newer onnx, or export the model at an older opset"
        )
    if opset < _OLDEST:
        raise EngineError(f"opset {opset} is not supported; export the model at opset {_SUPPORTED} or later")
    if opset >= _SUPPORTED:
        return model
    import onnx.version_converter as converter  # type: ignore[import-not-found,import-untyped,unused-ignore]

    try:
        return converter.convert_version(model, _CONVERTED_TO)
    except (RuntimeError, converter.ConvertError) as error:
        raise EngineError(
            f"opset {opset} cannot be converted to opset {_CONVERTED_TO}: {error}; export the model at opset "
            f"{_SUPPORTED} or later"
        ) from error


def simplified(
    onnx: Any, model: Any, known: Mapping[str, np.ndarray[Any, Any]], chosen: Mapping[str, Any]
) -> Any | None:
    """Return an equivalent model with known constants and chosen branches; None if it would not change."""
    replacements = [list(_replacements(onnx, node, known, chosen)) for node in model.graph.node]
    if all(nodes == [node] for nodes, node in zip(replacements, model.graph.node, strict=True)):
        return None
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.node[:]
    copy.graph.node.extend(node for nodes in replacements for node in nodes)
    stored = {tensor.name for tensor in copy.graph.initializer}
    for node in model.graph.node:
        for name in node.output:
            if name in known and name not in stored:
                copy.graph.initializer.append(onnx.numpy_helper.from_array(known[name], name))
        branch = chosen.get(node.output[0])
        if branch is not None:
            copy.graph.initializer.extend(branch.initializer)
            copy.graph.value_info.extend(branch.value_info)
    return copy


def _replacements(
    onnx: Any, node: Any, known: Mapping[str, np.ndarray[Any, Any]], chosen: Mapping[str, Any]
) -> Iterable[Any]:
    if all(name in known for name in node.output):
        return
    branch = chosen.get(node.output[0])
    if branch is None:
        yield node
        return
    yield from branch.node
    for inner, outer in zip(branch.output, node.output, strict=True):
        yield onnx.helper.make_node("Identity", [inner.name], [outer], name=outer)


_UNFOLDED = frozenset({"QuantizeLinear", "DequantizeLinear"})
"""Operators that a lowering looks for."""


def folded(node: OnnxNode) -> tuple[Value, ...] | None:
    """Return the outputs of a node with constant inputs as constants; None for any other node."""
    inputs = [value for value in node.inputs if value is not None]
    if not inputs or node.operator in _UNFOLDED or not all(isinstance(value, Constant) for value in inputs):
        return None
    build = GraphBuilder(origin=node.name)
    outputs = translated(build, node)
    build.graph.output(tuple(value for value in outputs if isinstance(value, fx.Node)))
    with torch.no_grad():
        computed = iter(fx.Interpreter(OperatorGraph(build.graph, build.constants)).run())
    return tuple(
        Constant(name, next(computed).numpy()) if isinstance(value, fx.Node) else value
        for name, value in zip(node.outputs, outputs, strict=False)
    )


def as_constant(name: str, value: Value) -> Value:
    """Return sizes as a constant if all are known; any other value unchanged."""
    if not isinstance(value, Sizes) or not all(isinstance(item, int) for item in value.items):
        return value
    return Constant(name, np.array(value.items[0] if value.is_scalar else value.items))


@dataclass(frozen=True, slots=True)
class Imported:
    """Imported graph with its inputs and outputs.

    Attributes:
        module: takes the inputs by position and returns a tuple of the outputs.
        inputs: in the order of the file, without constants.
        outputs: names in the order of the file.
    """

    module: OperatorGraph
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]


def import_onnx(path: Path, *, fp8: bool = False) -> Imported:
    """Return the graph of an ONNX file in aten operators; QuantizeLinear and DequantizeLinear are kept.

    Dynamic axes stay dynamic. ``fp8`` allows quantizers to FP8, which torch's operators round to integers: a lowering
    must replace them.
    """
    checked_onnx(path)
    return import_graph(read_graph(path), path.parent, fp8=fp8)


def import_graph(model: Any, folder: Path, *, fp8: bool = False) -> Imported:
    """Return the graph of an ONNX model, like ``import_onnx``."""
    onnx = import_library("onnx", "onnx")
    model = in_known_opset(onnx, model)
    while True:
        reader = _Reader(onnx, model, folder, fp8)
        try:
            return reader.read()
        except EngineError:
            # Known constants and branches may make more shapes known.
            model = simplified(onnx, model, reader.known, reader.chosen)
            if model is None:
                raise


class _Reader:
    """Reader of one model."""

    def __init__(self, onnx: Any, model: Any, folder: Path, fp8: bool) -> None:
        self.onnx = onnx
        self.build = GraphBuilder(fp8=fp8)
        self.values: dict[str, Value | None] = {"": None}
        self.known: dict[str, np.ndarray[Any, Any]] = {}
        self.chosen: dict[str, Any] = {}
        self._graph = model.graph
        self._folder = folder
        self._shapes = inferred_shapes(onnx, model)

    def read(self) -> Imported:
        """Return the imported graph of the model."""
        graph, build = self._graph, self.build
        for tensor in graph.initializer:
            self.values[tensor.name] = Constant(tensor.name, self.array(tensor))
        specs = tuple(
            _spec(self.onnx, graph_input) for graph_input in graph.input if graph_input.name not in self.values
        )
        for spec in specs:
            self.values[spec.name] = build.graph.placeholder(f"input_{len(self.values)}")
        for node in graph.node:
            self.add(node)
        build.graph.output(tuple(build.tensor(self.values[graph_output.name]) for graph_output in graph.output))
        build.graph.eliminate_dead_code()
        module = OperatorGraph(build.graph, build.constants)
        return Imported(module, specs, tuple(graph_output.name for graph_output in graph.output))

    def array(self, tensor: Any) -> np.ndarray[Any, Any]:
        array: np.ndarray[Any, Any] = self.onnx.numpy_helper.to_array(tensor, str(self._folder))
        return array

    def add(self, node: Any) -> None:
        """Add the translation of a node."""
        name = node.name or node.output[0]
        self.build.origin = name
        if node.op_type == "If" and not node.domain:
            self._add_branch(name, node)
            return
        if node.domain not in ("", "ai.onnx") or node.op_type not in operators.names():
            operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
            raise EngineError(f"node {name!r}: the operator {operator} is not supported")
        onnx_node = OnnxNode(
            name,
            node.op_type,
            tuple(self.values[input_name] for input_name in node.input),
            Attributes({attribute.name: _attribute(self.onnx, attribute) for attribute in node.attribute}),
            tuple(node.output),
            tuple(self._shapes.get(input_name) for input_name in node.input),
        )
        outputs = folded(onnx_node)
        if outputs is None:
            outputs = translated(self.build, onnx_node)
        values = dict(zip(node.output, map(as_constant, node.output, outputs), strict=False))
        self.values.update(values)
        if node.op_type != "Constant":
            self.known |= {key: value.array for key, value in values.items() if isinstance(value, Constant)}

    def _add_branch(self, name: str, node: Any) -> None:
        """Add the nodes of the branch of an If that its constant condition selects."""
        condition = self.build.known_truth(self.values[node.input[0]])
        if condition is None:
            raise EngineError(
                f"node {name!r} (If): its condition is computed from the inputs, but a graph can have only one branch; "
                "make the deciding input or axis length a constant"
            )
        branches = {entry.name: entry.g for entry in node.attribute}
        branch = branches["then_branch" if condition else "else_branch"]
        self.chosen[node.output[0]] = branch
        for entry in branch.initializer:
            self.values[entry.name] = Constant(entry.name, self.array(entry))
        for inner in branch.node:
            self.add(inner)
        outer = [self.values[branch_output.name] for branch_output in branch.output]
        self.values.update(zip(node.output, outer, strict=False))


def _attribute(onnx: Any, attribute: Any) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    return value.decode() if isinstance(value, bytes) else value


def _spec(onnx: Any, graph_input: Any) -> TensorSpec:
    tensor = graph_input.type.tensor_type
    sizes = tensor.shape.dim
    shape = tuple(size.dim_value if size.HasField("dim_value") else None for size in sizes)
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    try:
        torch.from_numpy(np.empty(0, dtype))
    except TypeError as error:
        raise EngineError(f"input {graph_input.name!r} has type {dtype}, which torch does not support") from error
    return TensorSpec(graph_input.name, dtype, shape, tuple(size.dim_param for size in sizes))
