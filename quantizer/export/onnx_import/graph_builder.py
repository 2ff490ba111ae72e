"""A ``torch.fx`` graph while it is built from an ONNX graph: its values, its constants, and the registry of operators.

A value of the ONNX graph is one of three things here:

- a node of the new graph, which makes a tensor;
- a ``Constant``: an array of the file, which becomes a constant of the graph where a node reads it as a tensor;
- ``Sizes``: whole numbers in a list or alone, each a number or a node that makes one. ONNX computes shapes with
  tensors; in torch they are numbers, so that dynamic axes stay symbolic where the graph is compiled.
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
from quantizer.utils.registry import Registry

Shape: TypeAlias = tuple[int | None, ...]
"""The sizes of a value's axes; None where one is not known."""

_SHAPED = {"Reshape": 1, "Expand": 1, "ConstantOfShape": 0}
"""Operators whose output has as many axes as an input, a list of sizes, has entries; and the place of that input."""


def inferred_shapes(onnx: Any, model: Any) -> dict[str, Shape]:
    """Return the shapes by name of the value.

    ONNX itself does not tell the rank of what is reshaped to computed sizes, and nothing of what follows; how many
    sizes there are tells it.
    """
    found = _inferred(onnx, model)
    told: dict[str, int] = {}
    while new := _told_by_sizes(model.graph, found, told):
        told |= new
        copied = onnx.ModelProto()
        copied.CopyFrom(model)
        for name, rank in told.items():
            copied.graph.value_info.append(_of_rank(onnx, name, rank, _type_of(model.graph, name, onnx)))
        found = _inferred(onnx, copied)
    return found


def _inferred(onnx: Any, model: Any) -> dict[str, Shape]:
    known = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    stored: dict[str, Shape] = {held.name: tuple(held.dims) for held in model.graph.initializer}
    return stored | dict(_told(known.input)) | dict(_told(known.value_info)) | dict(_told(known.output))


def _told_by_sizes(graph: Any, found: dict[str, Shape], told: dict[str, int]) -> dict[str, int]:
    new = {}
    for node in graph.node:
        place = _SHAPED.get(node.op_type)
        if place is None or node.output[0] in found or node.output[0] in told:
            continue
        sizes = found.get(node.input[place])
        if sizes is not None and len(sizes) == 1 and sizes[0] is not None:
            new[node.output[0]] = sizes[0]
    return new


def _type_of(graph: Any, name: str, onnx: Any) -> int:
    told = next((value.type.tensor_type.elem_type for value in graph.value_info if value.name == name), 0)
    return told or onnx.TensorProto.FLOAT


def _of_rank(onnx: Any, name: str, rank: int, element_type: int) -> Any:
    return onnx.helper.make_tensor_value_info(name, element_type, [None] * rank)


def _told(values: Iterable[Any]) -> Iterable[tuple[str, Shape]]:
    for value in values:
        tensor = value.type.tensor_type
        if tensor.HasField("shape"):
            sizes = tensor.shape.dim
            yield value.name, tuple(size.dim_value if size.HasField("dim_value") else None for size in sizes)


_MOST_SIZES = 64
_NO_LETTERS = re.compile(r"\W+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Whole numbers that a graph computes from shapes: ``items``, a list or (``alone``) one number of rank 0."""

    items: tuple[Any, ...]
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """Array of the file, and its name there."""

    name: str
    array: np.ndarray[Any, Any]


Value: TypeAlias = fx.Node | Constant | Sizes

_WITHOUT_EFFECT = frozenset(
    [
        *("kernel_shape", "hidden_size", "num_outputs"),  # sizes that other parts of the node tell as well
        *("momentum", "seed"),  # of training
        *("saturate", "stash_type", "sorted", "activation_alpha", "activation_beta"),
    ]
)
"""Attributes that need not be read: what an engine computes does not depend on them, or only in its last digits."""
_IN_SOME_FORMS: dict[str, frozenset[str]] = {
    "Concat": frozenset({"axis"}),  # of sizes
    "Gemm": frozenset({"beta"}),  # without a bias
    "LayerNormalization": frozenset({"axis"}),  # the shape of the scale tells it
    "RMSNormalization": frozenset({"axis"}),
    "Reshape": frozenset({"allowzero"}),  # of sizes
    "Resize": frozenset({"nearest_mode", "cubic_coeff_a", "extrapolation_value"}),  # of one mode each
    **dict.fromkeys(("AveragePool", "Conv", "ConvTranspose", "MaxPool"), frozenset({"pads"})),  # not with auto_pad
}
"""Attributes that count in some forms of an operator alone."""
_QUANTIZERS = frozenset({"DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear"})


class Attributes(dict[str, Any]):
    """Attributes of a node by name, which remember those that were asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, and remember the question."""
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
    """Node of the ONNX graph, with the values that it reads.

    Attributes:
        inputs: None for an optional input that is left out.
        attributes: by name, as Python values; tensors as arrays.
        outputs: the names of its outputs, empty for one that nothing reads.
        shapes: of its inputs, in order; None where not even the rank is known.
    """

    name: str
    operator: str
    inputs: tuple[Value | None, ...]
    attributes: Attributes
    outputs: tuple[str, ...]
    shapes: tuple[Shape | None, ...]

    @property
    def ranks(self) -> tuple[int | None, ...]:
        """The ranks of its inputs, in order; None where one is not known."""
        return tuple(None if shape is None else len(shape) for shape in self.shapes)

    def input(self, place: int) -> Value | None:
        """Return an input; None where it is left out."""
        return self.inputs[place] if place < len(self.inputs) else None

    def fault(self, why: str) -> EngineError:
        """Return the error of a node that cannot be imported."""
        return EngineError(f"node {self.name!r} ({self.operator}): {why}")


Translation: TypeAlias = Callable[["GraphBuilder", OnnxNode], Value | tuple[Value, ...]]

operators: Registry[Translation] = Registry("ONNX operator")


def translated(build: GraphBuilder, node: OnnxNode) -> tuple[Value, ...]:
    """Return what a node computes, by the function that is registered for its operator."""
    made = operators[node.operator](build, node)
    known = node.attributes.read | _WITHOUT_EFFECT | _IN_SOME_FORMS.get(node.operator, frozenset())
    for name, value in node.attributes.items() if node.operator not in _QUANTIZERS else ():
        if name not in known and value != _default(node.operator, name):
            raise node.fault(f"its attribute {name} = {value!r} is not supported, only the default of ONNX")
    return made if isinstance(made, tuple) else (made,)


@cache
def _default(operator: str, name: str) -> Any:
    """Return the default of an attribute in ONNX; None if there is none."""
    import onnx

    known = onnx.defs.get_schema(operator).attributes.get(name)
    if known is None or not known.default_value.type:
        return None
    value = onnx.helper.get_attribute_value(known.default_value)
    return value.decode() if isinstance(value, bytes) else value


class OperatorGraph(torch.nn.Module):
    """Graph of operators, whose ``get_attr`` nodes read the module's buffers."""

    def __init__(self, graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.graph = graph
        for name, tensor in constants.items():
            self.register_buffer(name, tensor)


@dataclass
class GraphBuilder:
    """The graph so far.

    Attributes:
        graph: the nodes.
        constants: the tensors that ``get_attr`` nodes read, by name.
        origin: the ONNX node that is being imported; its name is kept in the ``meta`` of every new node.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    origin: str = ""
    _buffers: dict[str, fx.Node] = field(default_factory=dict)

    def call(self, target: Any, *arguments: Any, **keywords: Any) -> fx.Node:
        """Add a call of an operator."""
        node = self.graph.call_function(target, arguments, keywords)
        node.meta["onnx"] = self.origin
        return node

    def tensor(self, value: Value | None) -> fx.Node:
        """Return the node that makes a value as a tensor."""
        if isinstance(value, fx.Node):
            return value
        if isinstance(value, Constant):
            if value.name not in self._buffers:
                self._buffers[value.name] = self.buffer(value.name, as_tensor(value.array))
            return self._buffers[value.name]
        if value is None:
            raise EngineError(f"node {self.origin!r}: a required input is left out")
        if all(isinstance(item, int) for item in value.items):
            return self.buffer("sizes", torch.tensor(value.items[0] if value.alone else value.items))
        parts = [self.call(torch.ops.aten.scalar_tensor.default, item, dtype=torch.int64) for item in value.items]
        return parts[0] if value.alone else self.call(torch.ops.aten.stack.default, parts)

    def buffer(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """Add a constant and return the node that reads it."""
        plain = f"c{len(self.constants)}_{_NO_LETTERS.sub('_', name)}"
        self.constants[plain] = tensor
        node = self.graph.get_attr(plain)
        node.meta["onnx"] = name
        return node

    def sizes(self, value: Value | None) -> tuple[Any, ...] | None:
        """Return the whole numbers of a value that is known without running; None for anything else."""
        if isinstance(value, Sizes):
            return value.items
        if isinstance(value, Constant) and value.array.dtype.kind == "i" and value.array.ndim < 2:
            return tuple(value.array.reshape(-1).tolist()) if value.array.size <= _MOST_SIZES else None
        return None

    def known_truth(self, value: Value | None) -> bool | None:
        """Return a condition that is known without running; None for any other."""
        if isinstance(value, Constant) and value.array.size == 1:
            return bool(value.array.item())
        if isinstance(value, Sizes) and len(value.items) == 1 and isinstance(value.items[0], int):
            return bool(value.items[0])
        return None

    def needed_sizes(self, node: OnnxNode, place: int) -> list[Any]:
        """Return the whole numbers of an input."""
        found = self.sizes(node.input(place))
        if found is None:
            raise node.fault(f"input {place} is computed from data; it is needed as constants or sizes")
        return list(found)

    def constant_number(self, node: OnnxNode, place: int, missing: float) -> float:
        """Return the number of an input; ``missing`` where it is left out."""
        value = node.input(place)
        if value is None:
            return missing
        if not isinstance(value, Constant) or value.array.size != 1:
            raise node.fault(f"input {place} is computed; it is needed as a constant")
        return float(value.array.item())


def as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return an array of a file as a tensor of its own memory."""
    own = np.array(array, order="C")
    # numpy has no bfloat16 of its own.
    return (
        torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
        if own.dtype.name == "bfloat16"
        else torch.from_numpy(own)
    )
