"""Facts of an ONNX graph without an engine: precision and work of its operations, their names, and error hints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from quantizer.engines.base import USUAL_SIZES, InputSizes
from quantizer.engines.inspection import inspection_from_layers
from quantizer.errors import EngineError, QuantizerError
from quantizer.export.qdq.onnx_file import input_dimensions, read_graph, unreadable_is
from quantizer.export.qdq.operand import MATMULS, MOVES, PRODUCTS
from quantizer.utils.lazy import import_library
from quantizer.utils.records import LOW_PRECISIONS, Inspection, Layer, convolution_work, matmul_work

# Larger constants do not determine shapes; only their shape is stored.
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


def graph_inspection(path: Path, why: str, *, sizes: InputSizes = USUAL_SIZES) -> Inspection:
    """Return the matrix multiplications and convolutions of an ONNX file.

    They count as low precision if both operands are dequantized.

    Args:
        path: the file.
        why: reason why no engine was observed.
        sizes: sizes of the dynamic dimensions of the inputs.

    Raises:
        EngineError: the file is missing, broken, or not an ONNX file.
        MissingDependencyError: onnx is not installed.
    """
    with unreadable_is(EngineError, path):
        return _inspected(path, why, sizes)


def _inspected(path: Path, why: str, sizes: InputSizes) -> Inspection:
    graph = SizedGraph(read_graph(path), sizes)
    shape = sizes.words(input_dimensions(path).values())
    note = f"{why}; the figures show the precision that the ONNX file requests, at {shape}"
    return inspection_from_layers("onnx", list(graph.layers()), verified=False, note=note)


def precision_of(element_type: int) -> str:
    """Return the precision of an ONNX element type; ``index`` for integers and booleans."""
    onnx = import_library("onnx", "onnx")
    return _PRECISIONS.get(onnx.TensorProto.DataType.Name(element_type), "index") if element_type else "unknown"


class SizedGraph:
    """ONNX graph with shapes inferred at given sizes.

    Attributes:
        nodes: the nodes, in the file's order.
        precisions: precision of each tensor, if known.
        shapes: shape of each tensor, if known.
        made_by: node that writes a tensor.
    """

    def __init__(self, model: Any, sizes: InputSizes) -> None:
        self.nodes = list(model.graph.node)
        self.made_by = {name: node for node in self.nodes for name in node.output}
        self.precisions: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        shaped = _shaped(model, sizes).graph
        for tensor in shaped.initializer:
            self.precisions[tensor.name] = precision_of(tensor.data_type)
            self.shapes[tensor.name] = tuple(tensor.dims)
        for value in (*shaped.value_info, *shaped.input, *shaped.output):
            tensor_type = value.type.tensor_type
            self.precisions[value.name] = precision_of(tensor_type.elem_type)
            if tensor_type.HasField("shape") and all(size.HasField("dim_value") for size in tensor_type.shape.dim):
                self.shapes[value.name] = tuple(size.dim_value for size in tensor_type.shape.dim)

    def layers(self) -> Iterator[Layer]:
        """Yield the matrix multiplications and convolutions, and the quantizers, casts and softmaxes."""
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
        """Return the precision in which a matrix multiplication computes."""
        stored = [self._stored(name) for name in node.input[:2]]
        low = [precision for precision in stored if precision in LOW_PRECISIONS]
        # Operands of different widths multiply in the wider type.
        return max(low, key=("fp4", "int4", "fp8", "int8").index) if len(low) == 2 else self.type_of(node.output[0])

    def _stored(self, name: str) -> str:
        """Return the type before the DequantizeLinear of a tensor, also through moves; empty without one."""
        while (node := self.made_by.get(name)) is not None and node.op_type in MOVES:
            name = node.input[0]
        if node is None or node.op_type != "DequantizeLinear":
            return ""
        return self.type_of(node.input[0])

    def type_of(self, name: str) -> str:
        """Return the precision of a tensor."""
        return self.precisions.get(name, "unknown")

    def work(self, node: Any) -> int | None:
        """Return the multiply-adds of a matrix multiplication; None if unknown."""
        names = (*node.input[:2], node.output[0])
        if any(name not in self.shapes for name in names):
            return None
        left, right, output = (self.shapes[name] for name in names)
        if node.op_type in MATMULS:
            return matmul_work(left, output)
        if len(right) < 3:
            return None
        return convolution_work(right, right[0], left if node.op_type == "ConvTranspose" else output)


def _shaped(model: Any, sizes: InputSizes) -> Any:
    """Return a copy of the model with sized inputs, inferred shapes, and large constants without their values."""
    onnx = import_library("onnx", "onnx")
    small = onnx.ModelProto()
    small.CopyFrom(_without_data(model))
    graph = small.graph
    shapes = [value.type.tensor_type.shape.dim for value in graph.input[: len(model.graph.input)]]
    names = [[axis.dim_param for axis in shape] for shape in shapes]
    named = sizes.of(names)
    for shape in shapes:
        for axis_index, axis in enumerate(shape):
            if not axis.HasField("dim_value"):
                axis.dim_value = named.get(axis.dim_param, sizes.sequence if axis_index > 0 else sizes.batch)
    # Shapes in the file hold for other sizes.
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


_FUSED = frozenset(
    {
        "Add",
        "BatchNormalization",
        "Clip",
        "Elu",
        "Erf",
        "Gelu",
        "HardSigmoid",
        "HardSwish",
        "LeakyRelu",
        "Mul",
        "Relu",
        "Sigmoid",
        "Tanh",
    }
)
"""Operators that engines fuse into the matrix multiplication before them."""


def product_names(path: Path) -> dict[str, str]:
    """Return the name of the MatMul, Gemm or convolution that computes a node or tensor, by its name.

    Activations and constants may follow it: ``block/Clip`` belongs to ``block.conv/Conv``, because engines name a fused
    layer after its last node or output. Other nodes are left out.
    """
    graph = read_graph(path).graph
    behind: dict[str, str] = {}
    by_node: dict[str, str] = {}
    constants = {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        product = node.name if node.op_type in PRODUCTS else _product_read(node, behind, constants)
        if product is not None:
            behind.update(dict.fromkeys(node.output, product))
            by_node[node.name] = product
        elif all(name in constants for name in node.input):
            constants.update(node.output)
    return {**behind, **by_node}


def _product_read(node: Any, behind: dict[str, str], constants: set[str]) -> str | None:
    """Return the matrix multiplication behind the only non-constant input of a node; None for other nodes."""
    computed = [name for name in node.input if name and name not in constants]
    return behind.get(computed[0]) if node.op_type in _FUSED and len(computed) == 1 else None


_SHOWN = 3
# Fragments of libraries' messages, and advice for each; the first match counts.
_HINTS = (
    (
        r"plugin not found|no conversion rule|no op registered|neither an operator",
        "replace the call of this operator in the model (an operator patch), or leave that part out",
    ),
    (
        r"outside the base directory|escapes model directory|failed to import initializer",
        "put the weight file beside the model, under the name that the model states",
    ),
    (r"hw-specific datatypes", "quantize to int8, or build for a GPU generation that has this type"),
    (r"opset|ir_version|ir version", "export with an opset that the backend reads (export.opset)"),
    (r"data type|type error|datatype", "export for this backend (quantizer.backend), which does not support this type"),
    (r"out of memory|bad_alloc|failed to allocate", "free memory, or reduce the largest sizes (export.dynamic)"),
)


def named_node(name: str, operator: str) -> str:
    """Return a node with its operator and module, as text for messages.

    Exported node names begin with the module: ``encoder.layer.0.output.dense.site/MatMul``.
    """
    module = name.rpartition("/")[0]
    return f"node {name!r} ({operator})" + (f" of module {module!r}" if module else "")


def hint_for(text: str) -> str:
    """Return advice for a library's message, as ``; do this``; empty if unknown."""
    return next((f"; {hint}" for words, hint in _HINTS if re.search(words, text, re.IGNORECASE)), "")


def explain_error(onnx_path: Path, text: str) -> str:
    """Return ``text``, the nodes of the file that it names, and advice."""
    nodes = _named_nodes(onnx_path, text)
    more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
    where = f" [{', '.join(nodes[:_SHOWN])}{more}]" if nodes else ""
    return f"{text}{where}{hint_for(text)}"


def _named_nodes(onnx_path: Path, text: str) -> list[str]:
    """Return the nodes whose names occur in ``text``, else the nodes whose operators occur."""
    try:
        nodes = list(read_graph(onnx_path).graph.node)
    except QuantizerError:
        # The file is damaged or onnx is missing: the library's message must do.
        return []
    by_name = [node for node in nodes if node.name and _occurs_in(text, node.name)]
    operators = {node.op_type for node in nodes if _occurs_in(text, node.op_type)}
    return [named_node(node.name, node.op_type) for node in by_name or nodes if by_name or node.op_type in operators]


def _occurs_in(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w./]){re.escape(word)}(?![\w./])", text) is not None
