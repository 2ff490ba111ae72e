"""Interface of a graph pass: a change of the graph with a precondition and a postcondition, both checked.

Pass that names nodes and tensors by module and operation, and removes traces of the exporting machine.

The exporter calls nodes ``node_linear_7`` and their results ``val_7``, and keeps each node's stack trace, with its
paths, in the file.

Pass that removes unread nodes and constants: remains of other passes, and Q/DQ pairs without a consumer.
"""

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
    """Change of an ``onnx_ir.Model`` in place."""

    def requires(self, model: Any) -> str | None:
        """Return what is wrong with the graph before the pass; None if nothing is."""

    def run(self, model: Any) -> int:
        """Change the graph and return the number of changed places."""

    def ensures(self, model: Any) -> str | None:
        """Return what is still wrong after the pass; None if nothing is."""


class MatchPass(ABC, Generic[Match]):
    """Pass that changes each node that matches, and ensures that none is left.

    Attributes:
        left: message for a node that is left; its name follows.
        backwards: visit the nodes from the last to the first.
    """

    left: ClassVar[str]
    backwards: ClassVar[bool] = False

    @abstractmethod
    def match(self, node: Any) -> Match | None:
        """Return the data that ``apply`` needs to change a node; None for a node that stays."""

    @abstractmethod
    def apply(self, model: Any, node: Any, found: Match) -> None:
        """Change a node for which ``match`` returned ``found``."""

    def requires(self, model: Any) -> str | None:
        return None

    def run(self, model: Any) -> int:
        changed = 0
        nodes = list(model.graph)
        for node in reversed(nodes) if self.backwards else nodes:
            found = self.match(node)
            if found is not None:
                self.apply(model, node, found)
                changed += 1
        return changed

    def ensures(self, model: Any) -> str | None:
        left = next((node.name for node in model.graph if self.match(node) is not None), None)
        return None if left is None else f"{self.left}: {left}"


def run_passes(model: Any, passes: Sequence[GraphPass]) -> None:
    """Run passes in order."""
    for entry in passes:
        name = type(entry).__name__
        with named_in_errors(f"pass {name}"):
            before = entry.requires(model)
        if before is not None:
            raise ExportError(f"pass {name} cannot start: {before}")
        with named_in_errors(f"pass {name}"):
            changed = entry.run(model)
        if not isinstance(changed, int):
            raise ExportError(f"pass {name}: run() returned {changed!r}; expected the number of places it changed")
        logger.info("pass %s changed %d places", name, changed)
        with named_in_errors(f"pass {name}"):
            after = entry.ensures(model)
        if after is not None:
            raise ExportError(f"pass {name} did not do its work: {after}")


def add_constant(model: Any, name: str, array: np.ndarray[Any, Any], element: Any) -> Any:
    """Add a constant to the graph, with elements of the ``onnx_ir.DataType`` ``element``, and return its value.

    A number is appended to a name that is taken.
    """
    import onnx_ir

    taken, wanted = model.graph.initializers, name
    for number in itertools.count(2):
        if name not in taken:
            break
        name = f"{wanted}_{number}"

    made = onnx_ir.Value(
        name=name,
        shape=onnx_ir.Shape(array.shape),
        type=onnx_ir.TensorType(element),
        const_value=onnx_ir.tensor(array, name=name),
    )
    model.graph.register_initializer(made)
    return made


def drop_unread(model: Any, value: Any) -> None:
    """Remove a constant from the graph if nothing reads it."""
    if value.is_initializer() and not value.uses():
        del model.graph.initializers[value.name]


def insert_before(
    node: Any, operator: str, inputs: Sequence[Any], *, like: Any, shape: Any, attributes: Any = ()
) -> Any:
    """Insert a node before ``node``, as a part of it; return its output, of the same type as the value ``like``."""
    import onnx_ir

    made = onnx_ir.Node("", operator, inputs, attributes)
    made.metadata_props.update(node.metadata_props)
    made.outputs[0].shape, made.outputs[0].type = shape, like.type
    node.graph.insert_before(node, made)
    return made.outputs[0]


def insert_transpose(node: Any, value: Any, perm: Sequence[int], *, like: Any) -> Any:
    """Return a value with its axes permuted by a new Transpose before ``node``; the value itself for the identity."""
    import onnx_ir

    if list(perm) == list(range(len(perm))):
        return value
    shape = None if value.shape is None else onnx_ir.Shape([value.shape[axis] for axis in perm])
    attributes = [onnx_ir.AttrInt64s("perm", perm)]
    return insert_before(node, "Transpose", [value], like=like, shape=shape, attributes=attributes)


def take_out(model: Any, node: Any, value: Any) -> None:
    """Redirect the readers of a node's output to ``value``; remove the node, and constants that nothing else reads.

    The output must not be one of the graph: ``replace_node`` takes those.
    """
    inputs = [given for given in node.inputs if given is not None]
    node.outputs[0].replace_all_uses_with(value)
    model.graph.remove(node, safe=True)
    for given in inputs:
        drop_unread(model, given)


def replace_node(model: Any, node: Any, value: Any) -> None:
    """Replace the only output of a node by ``value``, and remove the node.

    A new value gets the name of the output. Inputs and outputs of the graph keep theirs: where the output is one of the
    graph and the value another, or an input, an Identity stays between the two.
    """
    result = node.outputs[0]
    if (value.is_graph_input() or value.is_graph_output()) and result.is_graph_output():
        value = insert_before(node, "Identity", [value], like=value, shape=value.shape)
    if not value.is_graph_input() and not value.is_graph_output():
        value.name = result.name
    result.replace_all_uses_with(value, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)


def largest_number(dtype: np.dtype[Any]) -> float:
    """Return the largest finite number of a float type; numpy itself does not know bfloat16."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def smallest_normal(dtype: np.dtype[Any]) -> float:
    """Return the smallest number of a float type with full precision; numpy itself does not know bfloat16."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).smallest_normal)  # type: ignore[no-untyped-call]


_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_PARAMETER = "pkg.torch.export.graph_signature.InputSpec.kind"
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm")
"""The products into which the exporter folds a batch normalization."""
_STORED = ".stored"
"""The end of the name of a weight's steps: what is before it names the site and its operand."""


class NameNodes:
    """Names of the form ``path.of.module/OpType`` for nodes and their results, numbered within a module if need be.

    Those in the body of a loop are named after the loop: ``path.of.module/Scan/OpType_1``.

    Inputs and outputs of the graph keep their names, and so do parameters; any other constant is named after the first
    node that reads it: ``path.of.module/OpType.input_1``.
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
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            return f"two nodes are called {twice[0]}"
        other = [f"{value.name!r} and not {name!r}" for value, name in _result_names(model) if value.name != name]
        return f"a tensor is called {other[0]}" if other else None


def _name_inside(node: Any) -> int:
    """Name what is in the graphs of a node, such as the body of a loop, after the node; return how many nodes."""
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
        if not value.is_graph_output() and value.name != ""  # an output that is left out has an empty name
    ]


def _constant_names(model: Any) -> list[tuple[Any, str]]:
    """Return the constants that the exporter named, each with a name after the first node that reads it."""
    place = {node: number for number, node in enumerate(model.graph)}
    found = []
    for value in model.graph.initializers.values():
        if "." not in value.name and _PARAMETER not in value.metadata_props and not value.is_graph_output():
            reads = [(place[node], node.name, index) for node, index in value.uses() if node in place]
            if reads:
                _, name, index = min(reads)
                found.append((value, f"{name}.input_{index}"))
    return found


def _scope(node: Any) -> str:
    """Return the path of the module whose code made a node; for the DQ of a weight, the path of its site.

    A product into which a batch normalization was folded carries the scope of that: it is named after its weight.
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
    # Nodes that the exporter itself adds carry a scope of its own.
    return "" if len(scopes) < 2 or str(scopes[-2]).startswith("_empty_nn_module_stack") else str(scopes[-2])


class DropUnreadNodes:
    """Removal of everything that leads to no output."""

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
        left = [node.name for node in model.graph if _is_unread(node)] + _unread_constants(model)
        return f"nobody reads {left[0]}" if left else None


def _is_unread(node: Any) -> bool:
    return not any(value.uses() or value.is_graph_output() for value in node.outputs)


def _unread_constants(model: Any) -> list[str]:
    return [
        name
        for name, value in model.graph.initializers.items()
        if not value.uses() and not value.is_graph_output() and not value.is_graph_input()
    ]
