"""What a graph pass is: a change of the graph with a condition before and a promise after, both checked."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from typing import Protocol

import numpy as np

from quantizer.errors import ExportError

__all__ = ["GraphPass", "add_constant", "block_size", "drop_unread", "run_passes", "scalar"]

logger = logging.getLogger(__name__)


class GraphPass(Protocol):
    """One change. ``model`` is an ``onnx_ir.Model``, changed in place."""

    def requires(self, model: Any) -> str | None:
        """What is wrong with the graph before the pass; None: nothing."""

    def run(self, model: Any) -> int:
        """Change the graph; how many places were changed."""

    def ensures(self, model: Any) -> str | None:
        """What is still wrong after the pass; None: nothing."""


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
    """A new constant of the graph: its value, whose elements are of the ``onnx_ir.DataType`` ``element``."""
    import onnx_ir

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


def scalar(value: Any) -> float | None:
    """The number in a one-element floating constant; None for anything else."""
    constant = getattr(value, "const_value", None)
    if constant is None or constant.size != 1 or not constant.dtype.is_floating_point():
        return None
    return float(constant.numpy().reshape(()))


def block_size(node: Any) -> int | None:
    """How many values share a scale of a Q or DQ; None where its scale is not one of blocks."""
    size = node.attributes["block_size"].as_int() if "block_size" in node.attributes else 0
    return size or None
