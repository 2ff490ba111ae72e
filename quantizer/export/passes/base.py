"""What a graph pass is: a change of the graph with a condition before and a promise after, both checked."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any
from typing import Protocol

import numpy as np

from quantizer.errors import ExportError

__all__ = [
    "GraphPass",
    "add_constant",
    "block_size",
    "drop_unread",
    "floats",
    "insert_before",
    "is_dequantized",
    "keeps_rank",
    "quantize_of",
    "replace_node",
    "run_passes",
    "scalar",
    "smallest_normal",
]

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


def replace_node(model: Any, node: Any, value: Any) -> None:
    """Let ``value`` stand for the one output of a node, under its name, and take the node out."""
    value.name = node.outputs[0].name
    node.outputs[0].replace_all_uses_with(value, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)


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


def floats(value: Any) -> np.ndarray[Any, Any] | None:
    """The value of a floating constant that the graph holds; None for anything else."""
    constant = None if value is None else value.const_value
    return constant.numpy() if constant is not None and constant.dtype.is_floating_point() else None


def smallest_normal(dtype: np.dtype[Any]) -> float:
    """The smallest number of a float type with its full precision; numpy itself does not know bfloat16."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).smallest_normal)  # type: ignore[no-untyped-call]


def is_dequantized(value: Any) -> bool:
    """Whether a value comes from a DequantizeLinear."""
    producer = None if value is None else value.producer()
    return producer is not None and producer.op_type == "DequantizeLinear"


def keeps_rank(value: Any, factor: Any) -> bool:
    """Whether a value times a constant has the value's own rank: a factor [1, 1] gives a scalar two axes."""
    held = floats(factor)
    return held is not None and (held.ndim == 0 or (value.shape is not None and held.ndim <= len(value.shape)))


def quantize_of(value: Any) -> tuple[Any, Any] | None:
    """The Q and the DQ that an activation comes through; None for what comes from anything else."""
    if not is_dequantized(value):
        return None
    dequantize = value.producer()
    quantize = dequantize.inputs[0].producer()
    return (quantize, dequantize) if quantize is not None and quantize.op_type == "QuantizeLinear" else None
