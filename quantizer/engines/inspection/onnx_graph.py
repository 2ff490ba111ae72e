"""Products that the Q/DQ of an ONNX file asks for, each with its precision and its multiply-adds.

This is what an engine should do; what it does only the engine itself can state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quantizer.engines.dimensions import dimension_sizes, input_dimensions, shape_words
from quantizer.engines.engine_file import checked_onnx
from quantizer.engines.inspection.from_layers import inspection_from_layers
from quantizer.engines.inspection.inspection import LOW_PRECISIONS, Inspection, Layer, convolution_work, matmul_work
from quantizer.engines.optional_import import import_library
from quantizer.errors import EngineError
from quantizer.qdq.operand import MATMULS, MOVES, PRODUCTS
from quantizer.qdq.structure import structural_fault
from quantizer.qdq.unreadable import unreadable_is

# Larger constants do not determine shapes: only their own shape is kept.
_SMALL = 1024
_PRECISIONS = {
    "FLOAT": "fp32",
    "FLOAT16": "fp16",
    "BFLOAT16": "bf16",
    "DOUBLE": "fp64",
    "INT8": "int8",
    "UINT8": "int8",
    "INT4": "int4",
    "UINT4": "int4",
    "FLOAT4E2M1": "fp4",
    "FLOAT8E4M3FN": "fp8",
    "FLOAT8E5M2": "fp8",
}


def graph_inspection(
    path: Path, why: str, *, batch: int = 8, sequence: int = 128, sizes: Mapping[str, int] = MappingProxyType({})
) -> Inspection:
    """Return the products of an ONNX file; one is in low precision if all its operands are dequantized.

    Args:
        path: the file.
        why: why no engine was observed.
        batch: size of the first dimension of an input, where it is dynamic.
        sequence: size of its other dynamic dimensions.
        sizes: sizes of dynamic dimensions by name, where they are known; they come before the two.

    Raises:
        EngineError: the file is missing, broken, or no ONNX file.
        MissingDependencyError: onnx is not installed.
    """
    with unreadable_is(EngineError, path):
        return _inspected(path, why, batch, sequence, sizes)


def _inspected(path: Path, why: str, batch: int, sequence: int, sizes: Mapping[str, int]) -> Inspection:
    graph = SizedGraph(read_graph(path), {"batch": batch, "sequence": sequence, **sizes})
    shape = shape_words(input_dimensions(path).values(), batch, sequence, sizes)
    note = f"{why}; what follows is what the ONNX file asks for, at {shape}"
    return inspection_from_layers("onnx", list(graph.layers()), verified=False, note=note)


def read_graph(path: Path) -> Any:
    """Read the ``onnx.ModelProto`` without its external data."""
    checked_onnx(path)
    onnx = import_library("onnx", "onnx")
    try:
        model = onnx.load(str(path), load_external_data=False)
        fault = structural_fault(onnx, model)
    except Exception as error:
        # The class of protobuf's error depends on the implementation that is installed.
        raise EngineError(f"{path} is damaged: {error}; export it again") from error
    if fault is not None:
        raise EngineError(f"{path} is damaged, or was written wrongly: {fault}; export it again")
    return model


def precision_of(element_type: int) -> str:
    """Return the precision of an ONNX element type; ``index`` for integers and booleans."""
    onnx = import_library("onnx", "onnx")
    return _PRECISIONS.get(onnx.TensorProto.DataType.Name(element_type), "index") if element_type else "unknown"


class SizedGraph:
    """ONNX graph with the shapes that it has at given sizes.

    Attributes:
        nodes: the nodes, in the file's order.
        precisions: precision of each tensor, if known.
        shapes: shape of each tensor, if known.
        made_by: the node that writes a tensor.
    """

    def __init__(self, model: Any, sizes: Mapping[str, int]) -> None:
        self.nodes = list(model.graph.node)
        self.made_by = {name: node for node in self.nodes for name in node.output}
        self.precisions: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        shaped = _shaped(model, sizes).graph
        for tensor in shaped.initializer:
            self.precisions[tensor.name] = precision_of(tensor.data_type)
            self.shapes[tensor.name] = tuple(tensor.dims)
        for value in (*shaped.value_info, *shaped.input, *shaped.output):
            told = value.type.tensor_type
            self.precisions[value.name] = precision_of(told.elem_type)
            if told.HasField("shape") and all(size.HasField("dim_value") for size in told.shape.dim):
                self.shapes[value.name] = tuple(size.dim_value for size in told.shape.dim)

    def layers(self) -> Iterator[Layer]:
        """Yield the products, and the nodes that only convert."""
        quantizers = ("QuantizeLinear", "DynamicQuantizeLinear", "DequantizeLinear")
        roles = {**dict.fromkeys(quantizers, "quantizer"), "Cast": "cast", "Softmax": "softmax"}
        for index, node in enumerate(self.nodes):
            name = node.name or f"{node.op_type} {index}"
            if node.op_type in PRODUCTS:
                yield Layer(
                    name=name,
                    type=node.op_type,
                    role="product",
                    precision=self.precision(node),
                    nodes=(node.name,),
                    multiply_adds=self.work(node),
                )
            elif node.op_type in roles:
                role = roles[node.op_type]
                yield Layer(name=name, type=node.op_type, role=role, precision=self.type_of(node.output[0]))

    def precision(self, node: Any) -> str:
        """Return what a product computes in."""
        stored = [self._stored(name) for name in node.input[:2]]
        low = [precision for precision in stored if precision in LOW_PRECISIONS]
        # An operand of one byte and one of a nibble multiply in the wider.
        return max(low, key=("fp4", "int4", "fp8", "int8").index) if len(low) == 2 else self.type_of(node.output[0])

    def _stored(self, name: str) -> str:
        """Return the type before the DequantizeLinear that makes a tensor, also through moves; empty if none does."""
        while (node := self.made_by.get(name)) is not None and node.op_type in MOVES:
            name = node.input[0]
        if node is None or node.op_type != "DequantizeLinear":
            return ""
        return self.type_of(node.input[0])

    def type_of(self, name: str) -> str:
        """Return the precision of a tensor."""
        return self.precisions.get(name, "unknown")

    def work(self, node: Any) -> int | None:
        """Return the multiply-adds of a product; None if they cannot be told."""
        names = (*node.input[:2], node.output[0])
        if any(name not in self.shapes for name in names):
            return None
        left, right, output = (self.shapes[name] for name in names)
        if node.op_type in MATMULS:
            return matmul_work(left, output)
        if len(right) < 3:
            return None
        return convolution_work(right, right[0], left if node.op_type == "ConvTranspose" else output)


def _shaped(model: Any, sizes: Mapping[str, int]) -> Any:
    """Return a copy of the model with sized inputs, inferred shapes, and large constants without their values."""
    onnx = import_library("onnx", "onnx")
    small = onnx.ModelProto()
    small.CopyFrom(_without_data(model))
    graph = small.graph
    shapes = [value.type.tensor_type.shape.dim for value in graph.input[: len(model.graph.input)]]
    names = [[axis.dim_param for axis in shape] for shape in shapes]
    named = dimension_sizes(names, sizes["batch"], sizes["sequence"], sizes)
    for shape in shapes:
        for place, axis in enumerate(shape):
            if not axis.HasField("dim_value"):
                axis.dim_value = named.get(axis.dim_param, sizes["sequence"] if place > 0 else sizes["batch"])
    # Shapes that the file states hold for other sizes.
    del graph.value_info[:]
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(small, data_prop=True)


def _without_data(model: Any) -> Any:
    onnx = import_library("onnx", "onnx")
    graph = onnx.GraphProto(name=model.graph.name or "graph", node=model.graph.node, output=model.graph.output)
    constants = {tensor.name for tensor in model.graph.initializer}
    graph.input.extend(value for value in model.graph.input if value.name not in constants)
    for tensor in model.graph.initializer:
        if prod(tensor.dims) <= _SMALL and tensor.data_location != onnx.TensorProto.EXTERNAL:
            graph.initializer.append(tensor)
        else:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions, graph=graph
    )
