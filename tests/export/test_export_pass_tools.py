"""What the graph passes share: new constants and new nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quantizer.export.passes.base import add_constant, drop_unread, insert_before

ir = pytest.importorskip("onnx_ir", reason="exporting needs enginequant[onnx]")


def graph() -> Any:
    """x -> Relu -> y, with a scope on its node."""
    x = ir.Value(name="x", shape=ir.Shape([2]), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.Node("", "Relu", [x], name="r", metadata_props={"scope": "a.b"})
    made = ir.Graph([x], [node.outputs[0]], nodes=[node], opset_imports={"": 20}, name="g")
    return ir.Model(made, ir_version=10)


def test_a_constant_whose_name_is_taken_gets_a_number() -> None:
    model = graph()
    made = [add_constant(model, "c", np.full((), number, np.float32), ir.DataType.FLOAT) for number in range(3)]
    assert [value.name for value in made] == ["c", "c_2", "c_3"]
    held = {name: float(value.const_value.numpy()) for name, value in model.graph.initializers.items()}
    assert held == {"c": 0.0, "c_2": 1.0, "c_3": 2.0}
    assert [value.const_value.name for value in made] == ["c", "c_2", "c_3"]
    drop_unread(model, made[1])
    assert add_constant(model, "c", np.zeros((), np.float32), ir.DataType.FLOAT).name == "c_2"


def test_a_new_node_stands_before_the_one_that_it_is_part_of() -> None:
    model = graph()
    (node,) = model.graph
    shape = ir.Shape([1, 2])
    made = insert_before(node, "Neg", [node.inputs[0]], like=node.inputs[0], shape=shape)
    node.replace_input_with(0, made)
    assert [entry.op_type for entry in model.graph] == ["Neg", "Relu"]
    assert made.producer().metadata_props == {"scope": "a.b"}
    assert made.shape == shape
    assert made.type == node.inputs[0].type == ir.TensorType(ir.DataType.FLOAT)
