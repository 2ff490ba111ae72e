"""A float ONNX file, read with its weights; a file that cannot be quantized from is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantizer.engines.engine_file import checked_onnx
from quantizer.engines.optional_import import import_library
from quantizer.errors import EngineError, TaskError
from quantizer.qdq.structure import files_of, structural_fault

_QUANTIZED = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger")
_QUANTIZED_STARTS = ("QLinear", "QGemm", "QAttention", "DynamicQuantize", "MatMulNBits")


def read_model(path: Path) -> Any:
    """Return the ``onnx.ModelProto`` of a float model; its external data stays in its file.

    Axes of unknown length that a tool wrote as -1 are left open, as ONNX says it.
    """
    checked_onnx(path)
    onnx = import_library("onnx", "onnx")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:
        # The class of protobuf's error depends on the implementation that is installed.
        raise EngineError(f"{path} is not an ONNX file, or is damaged: {error}; export it again") from error
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.HasField("dim_value") and size.dim_value < 0:
                size.Clear()
    fault = structural_fault(onnx, model)
    if fault is not None:
        raise EngineError(f"{path} is damaged, or was written wrongly: {fault}; export it again")
    for node in _nodes(model.graph):
        if node.op_type in _QUANTIZED or node.op_type.startswith(_QUANTIZED_STARTS):
            raise TaskError(
                f"{path} is quantized already: node {node.name or node.output[0]!r} is a {node.op_type}; give the "
                "float file that it was made of"
            )
    for held in model.graph.initializer:
        if held.data_location == onnx.TensorProto.EXTERNAL:
            _require_data(path, held)
    return model


def fix_inputs(model: Any, fixed: Mapping[str, Any]) -> None:
    """Make inputs of a model constants, and give named axes of inputs their lengths."""
    onnx = import_library("onnx", "onnx")
    inputs = {given.name: given.type.tensor_type for given in model.graph.input}
    axes = {size.dim_param for tensor in inputs.values() for size in tensor.shape.dim if size.dim_param}
    unknown = sorted(set(fixed) - set(inputs) - axes)
    if unknown:
        raise TaskError(
            f"fixed names {', '.join(map(repr, unknown))}; the model has the inputs {', '.join(inputs)}, and the named "
            f"axes {', '.join(sorted(axes)) or '(none)'}"
        )
    for name, value in fixed.items():
        if name in inputs:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(inputs[name].elem_type)
            array = np.asarray(value, dtype)
            if array.ndim != len(inputs[name].shape.dim):
                raise TaskError(
                    f"fixed: {name!r} has {len(inputs[name].shape.dim)} axes in the model, and the value {array.ndim}"
                )
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        elif not isinstance(value, int) or value < 1:
            raise TaskError(f"fixed: {name!r} is an axis, and its length is {value!r}; expected a whole number from 1")
    for tensor in inputs.values():
        for size in tensor.shape.dim:
            if size.dim_param in fixed:
                size.dim_value = fixed[size.dim_param]


def _nodes(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a graph and of the graphs in it."""
    for node in graph.node:
        yield node
        for held in node.attribute:
            if held.g.node:
                yield from _nodes(held.g)


def _require_data(path: Path, held: Any) -> None:
    location = next(iter(files_of([held])), "")
    if not (path.parent / location).is_file():
        raise TaskError(
            f"{path} keeps its weights in a file beside it, {location!r}, which is missing ({held.name!r} is there): "
            "copy both into one folder, under the names that they had"
        )
