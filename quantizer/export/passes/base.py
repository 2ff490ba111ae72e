"""Interface of a graph pass: a change of the graph with a precondition and a postcondition, both checked."""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from quantizer.errors import ExportError

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
    """Run passes in order.

    Raises:
        ExportError: the precondition or postcondition of a pass does not hold; the message names the pass.
    """
    for entry in passes:
        name = type(entry).__name__
        before = entry.requires(model)
        if before is not None:
            raise ExportError(f"pass {name} cannot start: {before}")
        changed = entry.run(model)
        logger.info("pass %s changed %d places", name, changed)
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
    """Redirect the readers of a node's output to ``value``; remove the node, and constants that nothing else reads."""
    inputs = [given for given in node.inputs if given is not None]
    node.outputs[0].replace_all_uses_with(value)
    model.graph.remove(node, safe=True)
    for given in inputs:
        drop_unread(model, given)


def replace_node(model: Any, node: Any, value: Any) -> None:
    """Replace the only output of a node by ``value``, under the same name, and remove the node."""
    value.name = node.outputs[0].name
    node.outputs[0].replace_all_uses_with(value, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)


def largest_number(dtype: np.dtype[Any]) -> float:
    """Return the largest finite number of a float type; numpy itself does not know bfloat16."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def smallest_normal(dtype: np.dtype[Any]) -> float:
    """Return the smallest number of a float type with full precision; numpy itself does not know bfloat16."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).smallest_normal)  # type: ignore[no-untyped-call]
