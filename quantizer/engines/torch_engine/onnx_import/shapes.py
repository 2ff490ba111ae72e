"""Shapes of the values of an ONNX graph, as far as they are known without running it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

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
