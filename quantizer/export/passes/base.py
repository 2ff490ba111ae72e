"""What a graph pass is: a change of the graph with a condition before and a promise after, both checked."""

from __future__ import annotations

import itertools
import logging
from abc import ABC
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any
from typing import ClassVar
from typing import Generic
from typing import Protocol
from typing import TypeVar

import numpy as np

from quantizer.errors import ExportError

__all__ = [
    "GraphPass",
    "MatchPass",
    "add_constant",
    "drop_unread",
    "insert_before",
    "insert_transpose",
    "replace_node",
    "run_passes",
    "smallest_normal",
    "take_out",
]

Match = TypeVar("Match")

logger = logging.getLogger(__name__)


class GraphPass(Protocol):
    """One change. ``model`` is an ``onnx_ir.Model``, changed in place."""

    def requires(self, model: Any) -> str | None:
        """What is wrong with the graph before the pass; None: nothing."""

    def run(self, model: Any) -> int:
        """Change the graph; how many places were changed."""

    def ensures(self, model: Any) -> str | None:
        """What is still wrong after the pass; None: nothing."""


class MatchPass(ABC, Generic[Match]):
    """A pass that asks each node whether it is to be changed, and promises that no node is left that is.

    Attributes:
        left: what is wrong with a node that is left; its name stands behind it.
        backwards: from the last node to the first.
    """

    left: ClassVar[str]
    backwards: ClassVar[bool] = False

    @abstractmethod
    def match(self, node: Any) -> Match | None:
        """Return what the change of a node needs to know; None for a node that stays as it is."""

    @abstractmethod
    def apply(self, model: Any, node: Any, found: Match) -> None:
        """Change a node for which ``match`` gave ``found``."""

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
        ExportError: a pass found its condition or its promise broken; the message names it.
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
    """A new constant of the graph: its value, whose elements are of the ``onnx_ir.DataType`` ``element``.

    A number stands behind the name where it is taken.
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
    """Take a constant out of the graph that nobody reads any more."""
    if value.is_initializer() and not value.uses():
        del model.graph.initializers[value.name]


def insert_before(
    model: Any, node: Any, operator: str, inputs: Sequence[Any], *, like: Any, shape: Any, attributes: Any = ()
) -> Any:
    """The output of a new node before ``node``, which stands for part of it; its type is that of the value ``like``."""
    import onnx_ir

    made = onnx_ir.Node("", operator, inputs, attributes)
    made.metadata_props.update(node.metadata_props)
    made.outputs[0].shape, made.outputs[0].type = shape, like.type
    model.graph.insert_before(node, made)
    return made.outputs[0]


def insert_transpose(model: Any, node: Any, value: Any, perm: Sequence[int], *, like: Any) -> Any:
    """Return a value with its axes in another order, by a new Transpose before ``node``; itself for its own order."""
    import onnx_ir

    if list(perm) == list(range(len(perm))):
        return value
    shape = None if value.shape is None else onnx_ir.Shape([value.shape[axis] for axis in perm])
    attributes = [onnx_ir.AttrInt64s("perm", perm)]
    return insert_before(model, node, "Transpose", [value], like=like, shape=shape, attributes=attributes)


def take_out(model: Any, node: Any, value: Any) -> None:
    """Let those who read a node's output read ``value``; take the node out, and constants that nobody else reads."""
    inputs = [given for given in node.inputs if given is not None]
    node.outputs[0].replace_all_uses_with(value)
    model.graph.remove(node, safe=True)
    for given in inputs:
        drop_unread(model, given)


def replace_node(model: Any, node: Any, value: Any) -> None:
    """Let ``value`` stand for the one output of a node, under its name, and take the node out."""
    value.name = node.outputs[0].name
    node.outputs[0].replace_all_uses_with(value, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)


def smallest_normal(dtype: np.dtype[Any]) -> float:
    """The smallest number of a float type with its full precision; numpy itself does not know bfloat16."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).smallest_normal)  # type: ignore[no-untyped-call]
