"""Files that parse and do not fit together: one clear error, wherever they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantizer.check import check_file
from quantizer.engines import inspect_file
from quantizer.errors import EngineError, ExportError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")


def _model() -> Any:
    helper, kinds = onnx.helper, onnx.TensorProto
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["steps"], "quantize"),
        helper.make_node("DequantizeLinear", ["steps", "scale", "zero"], ["rounded"], "dequantize"),
        helper.make_node("DequantizeLinear", ["weight", "scale"], ["held"], "weight"),
        helper.make_node("MatMul", ["rounded", "held"], ["scores"], "product"),
        helper.make_node("Softmax", ["scores"], ["y"], "softmax", axis=-1),
    ]
    tensors = [
        helper.make_tensor("scale", kinds.FLOAT, [], [0.5]),
        helper.make_tensor("zero", kinds.INT8, [], [0]),
        helper.make_tensor("weight", kinds.INT8, [4, 4], bytes(range(16)), raw=True),
    ]
    values = [helper.make_tensor_value_info(name, kinds.FLOAT, ["batch", 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def _cut(graph: Any) -> None:
    graph.initializer[2].raw_data = graph.initializer[2].raw_data[:5]


def _typed(graph: Any) -> None:
    graph.initializer[0].data_type = 99


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda graph: graph.node[0].input.pop(), None),
        (lambda graph: [graph.node[0].input.pop() for _ in "12"], r"\(QuantizeLinear 'quantize'\) has 1 inputs; Q"),
        (lambda graph: graph.node[3].input.pop(), r"\(MatMul 'product'\) has 1 inputs; MatMul expects 2 to 2"),
        (lambda graph: graph.node[4].output.pop(), r"\(Softmax 'softmax'\) has 0 outputs"),
        (lambda graph: graph.node[4].input.__setitem__(0, ""), r"\(Softmax 'softmax'\) lacks the input 'input'"),
        (lambda graph: setattr(graph.node[4].attribute[0], "type", 1), "its attribute 'axis' does not have the type"),
        (lambda graph: setattr(graph.node[4], "op_type", ""), r"node 4 \(without operator 'softmax'\) has no operator"),
        (lambda graph: graph.node.append(graph.node[4]), "writes 'y', which another node already writes"),
        (_cut, r"the tensor 'weight' has 5 bytes, but its shape \[4, 4\] of INT8 needs 16"),
        (_typed, "the tensor 'scale' has the element type 99, which does not exist in ONNX"),
        (lambda graph: graph.initializer[2].dims.__setitem__(0, -4), r"the tensor 'weight' has the shape \[-4, 4\]"),
        (
            lambda graph: setattr(graph.input[0].type.tensor_type, "elem_type", 77),
            "the value 'x' has the element type 77",
        ),
    ],
)
def test_a_graph_that_does_not_fit_together(
    damage: Callable[[Any], object], message: str | None, tmp_path: Path
) -> None:
    model, path = _model(), tmp_path / "model.onnx"
    damage(model.graph)
    path.write_bytes(model.SerializeToString())
    if message is None:  # a zero point may be left out
        assert inspect_file(path).backend == "onnx"
        assert isinstance(check_file(path, "tensorrt"), list)
        return
    with pytest.raises(ExportError, match=message):
        check_file(path, "tensorrt")
    with pytest.raises(EngineError, match=message):
        inspect_file(path)
