"""An ONNX file as a graph of torch's operators that computes the same, Q/DQ pairs included.

Models of older opsets are converted first. What is computed from constants alone is computed here, once and for all.
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

_KNOWN = 13
"""The first opset in whose form the operators here are known: since then axes are inputs, and Softmax has one axis."""
_LATER = 18
_FIRST = 7
"""The first opset with the broadcasting of today; ONNX Runtime begins with it, too."""


def in_known_opset(onnx: Any, model: Any) -> Any:
    """Return a model in a known opset: the model itself, or one that ONNX converted."""
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    latest = onnx.defs.onnx_opset_version()
    if opset > latest:
        raise EngineError(
            f"opset {opset} is newer than the installed onnx {onnx.__version__} knows, which is {latest}: install a "
            "newer onnx, or export the model again at an older opset"
        )
    if opset < _FIRST:
        raise EngineError(f"opset {opset} is older than {_FIRST}, the first that is known: export the model again")
    if opset >= _KNOWN:
        return model
    import onnx.version_converter as converter  # type: ignore[import-not-found,import-untyped,unused-ignore]

    try:
        return converter.convert_version(model, _LATER)
    except (RuntimeError, converter.ConvertError) as error:
        raise EngineError(
            f"opset {opset} cannot be brought to opset {_LATER}: {error}; export the model again at opset {_KNOWN} or "
            "later"
        ) from error


def simplified(
    onnx: Any, model: Any, known: Mapping[str, np.ndarray[Any, Any]], chosen: Mapping[str, Any]
) -> Any | None:
    """Return a model with fewer nodes that computes the same; None if nothing was found out."""
    made = [list(_in_place_of(onnx, node, known, chosen)) for node in model.graph.node]
    if all(nodes == [node] for nodes, node in zip(made, model.graph.node, strict=True)):
        return None
    found = onnx.ModelProto()
    found.CopyFrom(model)
    del found.graph.node[:]
    found.graph.node.extend(node for nodes in made for node in nodes)
    held = {tensor.name for tensor in found.graph.initializer}
    for node in model.graph.node:
        for name in node.output:
            if name in known and name not in held:
                found.graph.initializer.append(onnx.numpy_helper.from_array(known[name], name))
        branch = chosen.get(node.output[0])
        if branch is not None:
            found.graph.initializer.extend(branch.initializer)
            found.graph.value_info.extend(branch.value_info)
    return found


def _in_place_of(
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


_LEFT = frozenset({"QuantizeLinear", "DequantizeLinear"})
"""A lowering finds these in the graph."""


def folded(node: OnnxNode) -> tuple[Value, ...] | None:
    """Return the outputs of a node, made of constants; None where it reads what is computed."""
    read = [value for value in node.inputs if value is not None]
    if not read or node.operator in _LEFT or not all(isinstance(value, Constant) for value in read):
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
    """Return sizes that are all known as the constant that they are, and any other value as it is."""
    if not isinstance(value, Sizes) or not all(isinstance(item, int) for item in value.items):
        return value
    return Constant(name, np.array(value.items[0] if value.alone else value.items))


@dataclass(frozen=True, slots=True)
class Imported:
    """A graph, and what goes in and comes out.

    Attributes:
        module: takes the inputs by position and returns a tuple of the outputs.
        inputs: in the order of the file, without constants.
        outputs: their names, in the order of the file.
    """

    module: OperatorGraph
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]


def import_onnx(path: Path) -> Imported:
    """Return the graph of an ONNX file in aten operators; QuantizeLinear and DequantizeLinear stay what they are.

    Dynamic axes stay dynamic. The operators are those that the exporter of this package writes, and others.
    """
    checked_onnx(path)
    return import_graph(read_graph(path), path.parent)


def import_graph(model: Any, folder: Path) -> Imported:
    """Return the graph of an ONNX model, as ``import_onnx``."""
    onnx = import_library("onnx", "onnx")
    model = in_known_opset(onnx, model)
    while True:
        reader = _Reader(onnx, model, folder)
        try:
            return reader.read()
        except EngineError:
            # More shapes may be known with what was found out before.
            model = simplified(onnx, model, reader.known, reader.chosen)
            if model is None:
                raise


class _Reader:
    """Reader of one model."""

    def __init__(self, onnx: Any, model: Any, folder: Path) -> None:
        self.onnx = onnx
        self.build = GraphBuilder()
        self.values: dict[str, Value | None] = {"": None}
        self.known: dict[str, np.ndarray[Any, Any]] = {}
        self.chosen: dict[str, Any] = {}
        self._graph = model.graph
        self._folder = folder
        self._shapes = inferred_shapes(onnx, model)

    def read(self) -> Imported:
        """Return the graph of the whole model."""
        graph, build = self._graph, self.build
        for held in graph.initializer:
            self.values[held.name] = Constant(held.name, self.array(held))
        specs = tuple(_spec(self.onnx, given) for given in graph.input if given.name not in self.values)
        for spec in specs:
            self.values[spec.name] = build.graph.placeholder(f"input_{len(self.values)}")
        for node in graph.node:
            self.add(node)
        build.graph.output(tuple(build.tensor(self.values[made.name]) for made in graph.output))
        build.graph.eliminate_dead_code()
        module = OperatorGraph(build.graph, build.constants)
        return Imported(module, specs, tuple(made.name for made in graph.output))

    def array(self, held: Any) -> np.ndarray[Any, Any]:
        """Return the array of an initializer."""
        found: np.ndarray[Any, Any] = self.onnx.numpy_helper.to_array(held, str(self._folder))
        return found

    def add(self, node: Any) -> None:
        """Add what a node computes."""
        name = node.name or node.output[0]
        self.build.origin = name
        if node.op_type == "If" and not node.domain:
            self._add_branch(name, node)
            return
        if node.domain not in ("", "ai.onnx") or node.op_type not in operators.names():
            known = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
            raise EngineError(f"node {name!r}: the operator {known} has no counterpart in torch here")
        found = OnnxNode(
            name,
            node.op_type,
            tuple(self.values[read] for read in node.input),
            Attributes({held.name: _attribute(self.onnx, held) for held in node.attribute}),
            tuple(node.output),
            tuple(self._shapes.get(read) for read in node.input),
        )
        made = folded(found)
        if made is None:
            made = translated(self.build, found)
        values = dict(zip(node.output, map(as_constant, node.output, made), strict=False))
        self.values.update(values)
        if node.op_type != "Constant":
            self.known |= {key: value.array for key, value in values.items() if isinstance(value, Constant)}

    def _add_branch(self, name: str, node: Any) -> None:
        """Add the nodes of that branch of an If that its condition, known without running, chooses."""
        chosen = self.build.known_truth(self.values[node.input[0]])
        if chosen is None:
            raise EngineError(
                f"node {name!r} (If): its condition is computed from the inputs, and a graph has one branch only; give "
                "what decides it, an input or the length of an axis, as a constant"
            )
        branches = {held.name: held.g for held in node.attribute}
        branch = branches["then_branch" if chosen else "else_branch"]
        self.chosen[node.output[0]] = branch
        for held in branch.initializer:
            self.values[held.name] = Constant(held.name, self.array(held))
        for inner in branch.node:
            self.add(inner)
        outer = [self.values[made.name] for made in branch.output]
        self.values.update(zip(node.output, outer, strict=False))


def _attribute(onnx: Any, held: Any) -> Any:
    value = onnx.helper.get_attribute_value(held)
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    return value.decode() if isinstance(value, bytes) else value


def _spec(onnx: Any, given: Any) -> TensorSpec:
    tensor = given.type.tensor_type
    sizes = tensor.shape.dim
    shape = tuple(size.dim_value if size.HasField("dim_value") else None for size in sizes)
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    try:
        torch.from_numpy(np.empty(0, dtype))
    except TypeError as error:
        raise EngineError(f"input {given.name!r} has type {dtype}, which torch does not have") from error
    return TensorSpec(given.name, dtype, shape, tuple(size.dim_param for size in sizes))
