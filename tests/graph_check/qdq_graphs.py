"""Small Q/DQ graphs for the rules: good ones, which an argument spoils in one respect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="checking needs enginequant[onnx]")
pytest.importorskip("onnx_ir", reason="checking needs enginequant[onnx]")
ml_dtypes = pytest.importorskip("ml_dtypes", reason="checking needs enginequant[onnx]")

FLOATS = {"float16": onnx.TensorProto.FLOAT16, "float32": onnx.TensorProto.FLOAT}
STEPS = {
    "int8": (onnx.TensorProto.INT8, np.int8),
    "uint8": (onnx.TensorProto.UINT8, np.uint8),
    "fp8": (onnx.TensorProto.FLOAT8E4M3FN, ml_dtypes.float8_e4m3fn),
    "int4": (onnx.TensorProto.INT4, ml_dtypes.int4),
    "int32": (onnx.TensorProto.INT32, np.int32),
    "int16": (onnx.TensorProto.INT16, np.int16),
}
SCALE = 0.5


class Graph:
    """A graph that is written node by node; each method gives the name of the value that it makes."""

    def __init__(self, width: str = "float16", opset: int = 20) -> None:
        self.width, self.opset = width, opset
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []

    @property
    def dtype(self) -> Any:
        return np.dtype(self.width)

    def input(self, name: str, shape: Sequence[int | str | None], width: str | None = None) -> str:
        kind = FLOATS.get(width or self.width) or STEPS[str(width)][0]
        self.inputs.append(onnx.helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, element: int | None = None) -> None:
        self.outputs.append(onnx.helper.make_tensor_value_info(name, element or FLOATS[self.width], None))

    def constant(self, array: Any, name: str | None = None) -> str:
        name = name or f"c{len(self.initializers)}"
        self.initializers.append(onnx.numpy_helper.from_array(np.asarray(array), name))
        return name

    def number(self, value: float, width: str | None = None) -> str:
        return self.constant(np.array(value, np.dtype(width or self.width)))

    def node(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(kind, list(inputs), [f"{name}_out"], name, domain=domain, **attributes))
        return f"{name}_out"

    def quantize(self, value: str, scale: Any = SCALE, kind: str = "int8", zero: int = 0) -> str:
        scale = scale if isinstance(scale, str) else self.number(scale)
        return self.node("QuantizeLinear", value, scale, self.constant(np.array(zero, STEPS[kind][1])))

    def dequantize(self, value: str, scale: Any = SCALE, kind: str = "int8", zero: int = 0) -> str:
        scale = scale if isinstance(scale, str) else self.number(scale)
        return self.node("DequantizeLinear", value, scale, self.constant(np.array(zero, STEPS[kind][1])))

    def rounded(self, value: str, scale: Any = SCALE, kind: str = "int8", zero: int = 0) -> str:
        """A Q/DQ pair."""
        return self.dequantize(self.quantize(value, scale, kind, zero), scale, kind, zero)

    def weight(self, shape: Sequence[int], axis: int | None = None, kind: str = "int8", step: int = 3) -> str:
        """Stored steps and their DQ."""
        steps = self.constant(np.full(shape, step).astype(STEPS[kind][1]))
        if axis is None:
            return self.node("DequantizeLinear", steps, self.number(SCALE))
        scales = self.constant(np.full(shape[axis], SCALE, self.dtype))
        return self.node("DequantizeLinear", steps, scales, axis=axis)

    def floats(self, *shape: int) -> str:
        return self.constant(np.full(shape, 0.25, self.dtype))

    def proto(self) -> Any:
        graph = onnx.helper.make_graph(self.nodes, "g", self.inputs, self.outputs, self.initializers)
        domains = {"": self.opset, **{node.domain: 1 for node in self.nodes if node.domain}}
        imports = [onnx.helper.make_opsetid(domain, version) for domain, version in domains.items()]
        # Inference fills in the shapes of the outputs, which the checker asks for.
        made = onnx.shape_inference.infer_shapes(onnx.helper.make_model(graph, opset_imports=imports, ir_version=10))
        del made.graph.value_info[:]
        for value in made.graph.output:
            value.type.tensor_type.shape.SetInParent()
        return made

    def save(self, path: Path) -> Path:
        onnx.save(self.proto(), path)
        return path


def linear(
    width: str = "float16",
    opset: int = 20,
    kind: str = "int8",
    zero: int = 0,
    scale: float = SCALE,
    k: int = 32,
    n: int = 32,
    axis: int | None = 1,
    shape: Sequence[int | str | None] = ("batch", "sequence", 32),
    step: int = 3,
) -> Graph:
    """x [batch, sequence, K] times a weight [K, N], and a float bias."""
    g = Graph(width, opset)
    x = g.rounded(g.input("x", [*shape[:-1], k]), scale, kind, zero)
    weight = g.weight((k, n), axis, "int8" if kind in ("uint8", "int16") else kind, step)
    g.output(g.node("Add", g.node("MatMul", x, weight), g.floats(n)))
    return g


def attention(
    width: str = "float16",
    kinds: Sequence[str | None] = ("int8",) * 4,
    probabilities: float = SCALE,
    head: int = 32,
    sequence: int | str = "sequence",
    mask: float | None = -1000,
    opset: int = 20,
) -> Graph:
    """Queries times keys, plus a mask, softmax, times values: each operand with the format of its place, or float."""
    g = Graph(width, opset)
    queries, values = (g.input(name, ["batch", 2, sequence, head]) for name in ("queries", "values"))
    keys = g.input("keys", ["batch", 2, head, sequence])
    query, key, probability, value = kinds
    scores = g.node(
        "MatMul",
        g.rounded(queries, kind=query) if query else queries,
        g.rounded(keys, kind=key) if key else keys,
    )
    if mask is not None:
        scores = g.node("Add", scores, g.node("Mul", g.input("mask", ["batch", 1, 1, sequence]), g.number(mask)))
    softmax = g.node("Softmax", scores, axis=-1)
    if probability:
        softmax = g.rounded(softmax, probabilities, probability)
    g.output(g.node("MatMul", softmax, g.rounded(values, kind=value) if value else values))
    return g
