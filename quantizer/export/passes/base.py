"""Interface of graph passes, helpers to edit a graph, and the passes ``NameNodes`` and ``DropUnreadNodes``."""

from __future__ import annotations

import ast
import itertools
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from quantizer.errors import ExportError
from quantizer.utils.registry import named_in_errors

Match = TypeVar("Match")

logger = logging.getLogger(__name__)


class GraphPass(Protocol):
    """Change of an ``onnx_ir.Model`` in place, with a precondition and a postcondition."""

    def requires(self, model: Any) -> str | None:
        """Return why the pass cannot start on this graph; None if it can."""

    def run(self, model: Any) -> int:
        """Change the graph and return the number of changes."""

    def ensures(self, model: Any) -> str | None:
        """Return why the pass did not finish its work; None if it did."""


class MatchPass(ABC, Generic[Match]):
    """Pass that changes each matching node, and ensures that no match remains.

    Attributes:
        left: message for a remaining match, followed by its name.
        backwards: visit the nodes from last to first.
    """

    left: ClassVar[str]
    backwards: ClassVar[bool] = False

    @abstractmethod
    def match(self, node: Any) -> Match | None:
        """Return the data that ``apply`` needs to change a node; None if the node does not match."""

    @abstractmethod
    def apply(self, model: Any, node: Any, matched: Match) -> None:
        """Change a node for which ``match`` returned ``matched``."""

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        changed = 0
        nodes = list(model.graph)
        for node in reversed(nodes) if self.backwards else nodes:
            matched = self.match(node)
            if matched is not None:
                self.apply(model, node, matched)
                changed += 1
        return changed

    def ensures(self, model: Any) -> str | None:
        remaining = next((node.name for node in model.graph if self.match(node) is not None), None)
        return None if remaining is None else f"{self.left}: {remaining}"


def run_passes(model: Any, passes: Sequence[GraphPass]) -> None:
    """Run graph passes in order; raise ExportError if a precondition or postcondition fails."""
    for entry in passes:
        name = type(entry).__name__
        with named_in_errors(f"pass {name}"):
            before = entry.requires(model)
        if before is not None:
            raise ExportError(f"pass {name} cannot start: {before}")
        with named_in_errors(f"pass {name}"):
            changed = entry.run(model)
        if not isinstance(changed, int):
            raise ExportError(f"pass {name}: run() returned {changed!r}; expected the number of changes")
        logger.info("pass %s: %d changes", name, changed)
        with named_in_errors(f"pass {name}"):
            after = entry.ensures(model)
        if after is not None:
            raise ExportError(f"pass {name} did not finish: {after}")


def add_constant(model: Any, name: str, array: np.ndarray[Any, Any], element: Any) -> Any:
    """Add a constant with elements of the ``onnx_ir.DataType`` ``element`` to the graph, and return its value.

    A number is appended if the name exists.
    """
    import onnx_ir

    initializers, base = model.graph.initializers, name
    for number in itertools.count(2):
        if name not in initializers:
            break
        name = f"{base}_{number}"

    constant = onnx_ir.Value(
        name=name,
        shape=onnx_ir.Shape(array.shape),
        type=onnx_ir.TensorType(element),
        const_value=onnx_ir.tensor(array, name=name),
    )
    model.graph.register_initializer(constant)
    return constant


def drop_unread(model: Any, value: Any) -> None:
    """Remove a constant from the graph if nothing reads it."""
    if value.is_initializer() and not value.uses():
        del model.graph.initializers[value.name]


def insert_before(
    node: Any, operator: str, inputs: Sequence[Any], *, like: Any, shape: Any, attributes: Any = ()
) -> Any:
    """Insert a node before ``node``, with its metadata; return its output, of the type of the value ``like``."""
    import onnx_ir

    inserted = onnx_ir.Node("", operator, inputs, attributes)
    inserted.metadata_props.update(node.metadata_props)
    inserted.outputs[0].shape, inserted.outputs[0].type = shape, like.type
    node.graph.insert_before(node, inserted)
    return inserted.outputs[0]


def insert_transpose(node: Any, value: Any, perm: Sequence[int], *, like: Any) -> Any:
    """Return a value behind a new Transpose before ``node``; the value itself for the identity."""
    import onnx_ir

    if list(perm) == list(range(len(perm))):
        return value
    shape = None if value.shape is None else onnx_ir.Shape([value.shape[axis] for axis in perm])
    attributes = [onnx_ir.AttrInt64s("perm", perm)]
    return insert_before(node, "Transpose", [value], like=like, shape=shape, attributes=attributes)


def take_out(model: Any, node: Any, value: Any) -> None:
    """Redirect the readers of a node's output to ``value``; remove the node, and its unread constants.

    The output must not be a graph output; see ``replace_node``.
    """
    inputs = [read for read in node.inputs if read is not None]
    node.outputs[0].replace_all_uses_with(value)
    model.graph.remove(node, safe=True)
    for read in inputs:
        drop_unread(model, read)


def replace_node(model: Any, node: Any, value: Any) -> None:
    """Replace the only output of a node by ``value``, and remove the node.

    A new value takes the name of the output. Graph inputs and outputs keep their names: an Identity is added where
    needed.
    """
    result = node.outputs[0]
    if (value.is_graph_input() or value.is_graph_output()) and result.is_graph_output():
        value = insert_before(node, "Identity", [value], like=value, shape=value.shape)
    if not value.is_graph_input() and not value.is_graph_output():
        value.name = result.name
    result.replace_all_uses_with(value, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)


def largest_number(dtype: np.dtype[Any]) -> float:
    """Return the largest finite number of a float type, bfloat16 included."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def smallest_normal(dtype: np.dtype[Any]) -> float:
    """Return the smallest normal number of a float type, bfloat16 included."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).smallest_normal)  # type: ignore[no-untyped-call]


_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_PARAMETER = "pkg.torch.export.graph_signature.InputSpec.kind"
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm")
"""Operators into which the exporter folds a batch normalization."""
_STORED = ".stored"
"""Suffix of the names of quantized weights; the text before it names the site and the operand."""


class NameNodes:
    """Pass that names nodes and results ``path.of.module/OpType``, numbered within a module if needed.

    Nodes in the body of a loop are named after the loop: ``path.of.module/Scan/OpType_1``. Graph inputs, outputs and
    parameters keep their names. Other constants are named after their first reader: ``path.of.module/OpType.input_1``.
    Metadata is removed: the exporter stores stack traces with paths of the exporting machine.
    """

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        used: Counter[str] = Counter()
        count = 0
        for node in model.graph:
            name = f"{_scope(node) or 'graph'}/{node.op_type}"
            used[name] += 1
            node.name = name if used[name] == 1 else f"{name}_{used[name]}"
            node.metadata_props.clear()
            count += 1 + _name_inside(node)
        for value, name in [*_result_names(model), *_constant_names(model)]:
            value.name = name
        for value in [*model.graph.initializers.values(), *model.graph.inputs, *model.graph.outputs]:
            value.metadata_props.clear()
        model.metadata_props.clear()
        model.graph.metadata_props.clear()
        return count

    def ensures(self, model: Any) -> str | None:
        names = Counter(node.name for node in model.graph)
        duplicates = [name for name, count in names.items() if count > 1]
        if duplicates:
            return f"two nodes have the name {duplicates[0]}"
        wrong = [f"{value.name!r}, expected {name!r}" for value, name in _result_names(model) if value.name != name]
        return f"a tensor has the name {wrong[0]}" if wrong else None


def _name_inside(node: Any) -> int:
    """Name the nodes of a node's subgraphs, such as the body of a loop; return their number."""
    used: Counter[str] = Counter()
    for attribute in node.attributes.values():
        if attribute.type.name != "GRAPH":
            continue
        for number, value in enumerate(attribute.as_graph().inputs):
            value.name = f"{node.name}/input_{number}"
        for inner in attribute.as_graph():
            used[inner.op_type] += 1
            inner.name = f"{node.name}/{inner.op_type}_{used[inner.op_type]}"
            inner.metadata_props.clear()
            for number, value in enumerate(inner.outputs):
                value.name = f"{inner.name}:{number}"
    return used.total()


def _result_names(model: Any) -> list[tuple[Any, str]]:
    """Return the results of nodes, each with its name."""
    return [
        (value, node.name if number == 0 else f"{node.name}:{number}")
        for node in model.graph
        for number, value in enumerate(node.outputs)
        if not value.is_graph_output() and value.name != ""  # an omitted output has an empty name
    ]


def _constant_names(model: Any) -> list[tuple[Any, str]]:
    """Return the constants that the exporter named, each with a name after its first reader."""
    position = {node: number for number, node in enumerate(model.graph)}
    names = []
    for value in model.graph.initializers.values():
        if "." not in value.name and _PARAMETER not in value.metadata_props and not value.is_graph_output():
            reads = [(position[node], node.name, index) for node, index in value.uses() if node in position]
            if reads:
                _, name, index = min(reads)
                names.append((value, f"{name}.input_{index}"))
    return names


def _scope(node: Any) -> str:
    """Return the path of the module that created a node; for the DQ of a weight, the path of its site.

    A convolution with a folded batch normalization carries the scope of the latter, so its weight names it.
    """
    if node.op_type == "DequantizeLinear" and _STORED in node.inputs[0].name:
        return str(node.inputs[0].name.partition(_STORED)[0])
    text = node.metadata_props.get(_SCOPES)
    if not text:
        return ""
    folded = node.op_type in _PRODUCTS and "_batch_norm" in node.metadata_props.get(_CLASSES, "")
    if folded and (owner := node.inputs[1].name.rpartition(".")[0]):
        return str(owner)
    scopes = ast.literal_eval(text)
    # Nodes that the exporter adds carry a scope of the exporter.
    return "" if len(scopes) < 2 or str(scopes[-2]).startswith("_empty_nn_module_stack") else str(scopes[-2])


class DropUnreadNodes:
    """Pass that removes nodes and constants that no output depends on."""

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        changed = 0
        for node in reversed(list(model.graph)):
            if _is_unread(node):
                model.graph.remove(node, safe=True)
                changed += 1
        for name in _unread_constants(model):
            del model.graph.initializers[name]
            changed += 1
        return changed

    def ensures(self, model: Any) -> str | None:
        unread = [node.name for node in model.graph if _is_unread(node)] + _unread_constants(model)
        return f"{unread[0]} is not read" if unread else None


def _is_unread(node: Any) -> bool:
    return not any(value.uses() or value.is_graph_output() for value in node.outputs)


def _unread_constants(model: Any) -> list[str]:
    return [
        name
        for name, value in model.graph.initializers.items()
        if not value.uses() and not value.is_graph_output() and not value.is_graph_input()
    ]
