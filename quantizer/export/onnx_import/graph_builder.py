"""Builder of a ``torch.fx`` graph from an ONNX graph, and the registry of operators.

A value of the ONNX graph is a node of the new graph, a ``Constant`` of the file, or ``Sizes``. ONNX computes shapes
with tensors; torch uses numbers, so that dynamic axes stay symbolic during compilation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import fx

from quantizer.errors import EngineError
from quantizer.numerics.formats import FP8
from quantizer.utils.registry import Registry

Shape: TypeAlias = tuple[int | None, ...]
"""Sizes of the axes of a value; None for an unknown size."""

_SHAPED = {"Reshape": 1, "Expand": 1, "ConstantOfShape": 0}
"""Operators whose output rank is the length of an input, and the index of this input."""


def inferred_shapes(onnx: Any, model: Any) -> dict[str, Shape]:
    """Return the shapes of values by name.

    ONNX does not infer the rank of a tensor reshaped to computed sizes. The length of the list of sizes is that rank.
    """
    shapes = _inferred(onnx, model)
    ranks: dict[str, int] = {}
    while new := _ranks_from_sizes(model.graph, shapes, ranks):
        ranks |= new
        copied = onnx.ModelProto()
        copied.CopyFrom(model)
        for name, rank in ranks.items():
            copied.graph.value_info.append(_of_rank(onnx, name, rank, _type_of(model.graph, name, onnx)))
        shapes = _inferred(onnx, copied)
    return shapes


def _inferred(onnx: Any, model: Any) -> dict[str, Shape]:
    known = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    stored: dict[str, Shape] = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    return (
        stored
        | dict(_stated_shapes(known.input))
        | dict(_stated_shapes(known.value_info))
        | dict(_stated_shapes(known.output))
    )


def _ranks_from_sizes(graph: Any, shapes: dict[str, Shape], ranks: dict[str, int]) -> dict[str, int]:
    new = {}
    for node in graph.node:
        index = _SHAPED.get(node.op_type)
        if index is None or node.output[0] in shapes or node.output[0] in ranks:
            continue
        sizes = shapes.get(node.input[index])
        if sizes is not None and len(sizes) == 1 and sizes[0] is not None:
            new[node.output[0]] = sizes[0]
    return new


def _type_of(graph: Any, name: str, onnx: Any) -> int:
    stated = next((value.type.tensor_type.elem_type for value in graph.value_info if value.name == name), 0)
    return stated or onnx.TensorProto.FLOAT


def _of_rank(onnx: Any, name: str, rank: int, element_type: int) -> Any:
    return onnx.helper.make_tensor_value_info(name, element_type, [None] * rank)


def _stated_shapes(values: Iterable[Any]) -> Iterable[tuple[str, Shape]]:
    for value in values:
        tensor = value.type.tensor_type
        if tensor.HasField("shape"):
            sizes = tensor.shape.dim
            yield value.name, tuple(size.dim_value if size.HasField("dim_value") else None for size in sizes)


_MAX_SIZES = 64
_NON_WORD = re.compile(r"\W+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Integers that a graph computes from shapes: ``items``, a list or (``is_scalar``) one number of rank 0."""

    items: tuple[Any, ...]
    is_scalar: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """Array of the file, and its name."""

    name: str
    array: np.ndarray[Any, Any]


Value: TypeAlias = fx.Node | Constant | Sizes

_IGNORED = frozenset(
    [
        *("kernel_shape", "hidden_size", "num_outputs"),  # other parts of the node contain these sizes
        *("momentum", "seed"),  # used in training only
        *("saturate", "stash_type", "sorted", "activation_alpha", "activation_beta"),
    ]
)
"""Attributes without effect on an engine, or only on the last digits of its results."""
_IGNORED_IN_SOME_FORMS: dict[str, frozenset[str]] = {
    "Concat": frozenset({"axis"}),  # of sizes
    "Gemm": frozenset({"beta"}),  # without a bias
    "LayerNormalization": frozenset({"axis"}),  # follows from the shape of the scale
    "RMSNormalization": frozenset({"axis"}),
    "Reshape": frozenset({"allowzero"}),  # of sizes
    "Resize": frozenset({"nearest_mode", "cubic_coeff_a", "extrapolation_value"}),  # each used by one mode
    **dict.fromkeys(("AveragePool", "Conv", "ConvTranspose", "MaxPool"), frozenset({"pads"})),  # not with auto_pad
}
"""Attributes that only matter in some forms of an operator."""
_QUANTIZERS = frozenset({"DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear"})


class Attributes(dict[str, Any]):
    """Attributes of a node by name; ``read`` records each name on access."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value and record the access."""
        self.read.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """Node of the ONNX graph with its input values.

    Attributes:
        inputs: values; None for an omitted optional input.
        attributes: by name, as Python values; tensors as arrays.
        outputs: names of its outputs, empty for an unused one.
        shapes: shapes of its inputs, in order; None for an unknown rank.
    """

    name: str
    operator: str
    inputs: tuple[Value | None, ...]
    attributes: Attributes
    outputs: tuple[str, ...]
    shapes: tuple[Shape | None, ...]

    @property
    def ranks(self) -> tuple[int | None, ...]:
        """Ranks of the inputs, in order; None for an unknown rank."""
        return tuple(None if shape is None else len(shape) for shape in self.shapes)

    def input(self, index: int) -> Value | None:
        """Return an input; None for an omitted input."""
        return self.inputs[index] if index < len(self.inputs) else None

    def error(self, reason: str) -> EngineError:
        """Return an error for a node that cannot be imported."""
        return EngineError(f"node {self.name!r} ({self.operator}): {reason}")


Translation: TypeAlias = Callable[["GraphBuilder", OnnxNode], Value | tuple[Value, ...]]

operators: Registry[Translation] = Registry("ONNX operator")


def translated(build: GraphBuilder, node: OnnxNode) -> tuple[Value, ...]:
    """Return the outputs of a node from the translation of its operator."""
    result = operators[node.operator](build, node)
    known = node.attributes.read | _IGNORED | _IGNORED_IN_SOME_FORMS.get(node.operator, frozenset())
    for name, value in node.attributes.items() if node.operator not in _QUANTIZERS else ():
        if name not in known and value != _default(node.operator, name):
            raise node.error(f"its attribute {name} = {value!r} is not supported; only the default of ONNX is")
    return result if isinstance(result, tuple) else (result,)


@cache
def _default(operator: str, name: str) -> Any:
    """Return the default of an attribute in ONNX; None without a default."""
    import onnx

    attribute = onnx.defs.get_schema(operator).attributes.get(name)
    if attribute is None or not attribute.default_value.type:
        return None
    value = onnx.helper.get_attribute_value(attribute.default_value)
    return value.decode() if isinstance(value, bytes) else value


class OperatorGraph(torch.nn.Module):
    """Graph of operators; its ``get_attr`` nodes read buffers of this module."""

    def __init__(self, graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.graph = graph
        for name, tensor in constants.items():
            self.register_buffer(name, tensor)


@dataclass
class GraphBuilder:
    """Graph under construction.

    Attributes:
        graph: the nodes.
        constants: tensors that ``get_attr`` nodes read, by name.
        origin: name of the ONNX node that is being imported; every new node stores it in its ``meta``.
        fp8: whether quantized values may be FP8; only lowerings for GPUs replace its quantizers.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    origin: str = ""
    fp8: bool = False
    _buffers: dict[str, fx.Node] = field(default_factory=dict)

    def call(self, target: Any, *arguments: Any, **keywords: Any) -> fx.Node:
        """Add a call of an operator."""
        node = self.graph.call_function(target, arguments, keywords)
        node.meta["onnx"] = self.origin
        return node

    def tensor(self, value: Value | None) -> fx.Node:
        """Return the node that computes a value as a tensor."""
        if isinstance(value, fx.Node):
            return value
        if isinstance(value, Constant):
            if value.name not in self._buffers:
                self._buffers[value.name] = self.buffer(value.name, as_tensor(value.array))
            return self._buffers[value.name]
        if value is None:
            raise EngineError(f"node {self.origin!r}: a required input is missing")
        if all(isinstance(item, int) for item in value.items):
            return self.buffer("sizes", torch.tensor(value.items[0] if value.is_scalar else value.items))
        parts = [self.call(torch.ops.aten.scalar_tensor.default, item, dtype=torch.int64) for item in value.items]
        return parts[0] if value.is_scalar else self.call(torch.ops.aten.stack.default, parts)

    def buffer(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """Add a constant and return the node that reads it."""
        identifier = f"c{len(self.constants)}_{_NON_WORD.sub('_', name)}"
        self.constants[identifier] = tensor
        node = self.graph.get_attr(identifier)
        node.meta["onnx"] = name
        return node

    def sizes(self, value: Value | None) -> tuple[Any, ...] | None:
        """Return the integers of a constant or of sizes; None for any other value."""
        if isinstance(value, Sizes):
            return value.items
        if isinstance(value, Constant) and value.array.dtype.kind == "i" and value.array.ndim < 2:
            return tuple(value.array.reshape(-1).tolist()) if value.array.size <= _MAX_SIZES else None
        return None

    def known_truth(self, value: Value | None) -> bool | None:
        """Return the value of a constant condition; None for any other condition."""
        if isinstance(value, Constant) and value.array.size == 1:
            return bool(value.array.item())
        if isinstance(value, Sizes) and len(value.items) == 1 and isinstance(value.items[0], int):
            return bool(value.items[0])
        return None

    def needed_sizes(self, node: OnnxNode, index: int) -> list[Any]:
        """Return the integers of an input; raise if they are computed from data."""
        sizes = self.sizes(node.input(index))
        if sizes is None:
            raise node.error(f"input {index} is computed from data; expected constants or sizes")
        return list(sizes)

    def constant_number(self, node: OnnxNode, index: int, missing: float) -> float:
        """Return the number of a constant input; ``missing`` for an omitted input."""
        value = node.input(index)
        if value is None:
            return missing
        if not isinstance(value, Constant) or value.array.size != 1:
            raise node.error(f"input {index} is computed; expected a constant")
        return float(value.array.item())


def as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a copy of an array as a tensor."""
    copy = np.array(array, order="C")
    # numpy has no bfloat16 and no FP8.
    if copy.dtype.name == "bfloat16":
        return torch.from_numpy(copy.view(np.int16)).view(torch.bfloat16)
    if copy.dtype.name == FP8.storage_name:
        return torch.from_numpy(copy.view(np.uint8)).view(FP8.storage)
    return torch.from_numpy(copy)
