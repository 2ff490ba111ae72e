"""Each graph pass on small graphs: a match, no match, and a condition or promise that does not hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx_graphs import computed, graph, node_by_node, operators

from quantizer.errors import ExportError
from quantizer.export.passes import PASSES, FoldChannelFactors, UnsignedActivations, run_passes
from quantizer.export.passes.base import NameNodes, replace_node
from quantizer.export.passes.float_types import ClampMasks
from quantizer.export.passes.weights import StoreWeights, WeightsAsRead
from quantizer.export.qdq.graph import scalar
from quantizer.numerics.formats import FLOAT16_MASK

ir = pytest.importorskip("onnx_ir", reason="exporting needs enginequant[onnx]")

SCOPES = "pkg.torch.onnx.name_scopes"
WEIGHT = np.arange(-6, 6, dtype=np.int8).reshape(3, 4)
SCALE = np.array([0.5, 1.0, 2.0], dtype=np.float32)


def constant(name: str, array: np.ndarray) -> Any:
    return ir.Value(
        name=name,
        shape=ir.Shape(array.shape),
        type=ir.TensorType(ir.tensor(array).dtype),
        const_value=ir.tensor(array, name=name),
    )


def linear(
    scale: np.ndarray = SCALE,
    *,
    perm: tuple[int, ...] = (1, 0),
    readers: int = 1,
    calls: int = 1,
    float_weight: bool = False,
) -> Any:
    """x [2, 4] times the transpose of a stored weight [3, 4], as ``F.linear`` exports it."""
    source = "w" if float_weight else "d"
    axis = "<axis = 0>" if scale.size > 1 else ""
    nodes = "" if float_weight else f"d = DequantizeLinear {axis} (w, s) "
    for call in range(calls):
        nodes += f"t{call} = Transpose <perm = {list(perm)}> ({source}) y{call} = MatMul (x, t{call}) "
    outputs = [f"float[A,B] y{call}" for call in range(calls)]
    if readers > 1:
        nodes, outputs = f"{nodes} r = Relu ({source})", [*outputs, "float[3,4] r"]
    constants = {"w": WEIGHT.astype(np.float32)} if float_weight else {"w": WEIGHT, "s": scale}
    return graph("float[2,4] x", ", ".join(outputs), nodes, opset=20, **constants)


def values_of(model: Any) -> list[np.ndarray]:
    return computed(model, x=np.arange(8, dtype=np.float32).reshape(2, 4))


# -- weights as read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [SCALE, np.array(0.5, dtype=np.float32)], ids=["per channel", "per tensor"])
def test_a_weight_is_stored_as_its_product_reads_it(scale: np.ndarray) -> None:
    model, entry = linear(scale), WeightsAsRead()
    before = values_of(linear(scale))
    assert entry.requires(model) is None
    assert entry.run(model) == 1
    assert entry.ensures(model) is None
    assert operators(model) == ["DequantizeLinear", "MatMul"]
    stored = model.graph.initializers["w"]
    assert np.array_equal(stored.const_value.numpy(), WEIGHT.T)
    assert list(stored.shape) == [4, 3]
    dequantize = next(iter(model.graph))
    assert list(dequantize.outputs[0].shape) == [4, 3]
    if scale.size > 1:
        assert dequantize.attributes["axis"].as_int() == 1
    for old, new in zip(before, values_of(model), strict=True):
        assert np.array_equal(old, new)


def test_a_second_run_finds_nothing() -> None:
    model, entry = linear(), WeightsAsRead()
    entry.run(model)
    assert entry.run(model) == 0


def test_the_weight_of_a_module_that_is_called_twice_is_turned_once() -> None:
    model, entry = linear(calls=2), WeightsAsRead()
    before = values_of(linear(calls=2))
    assert entry.run(model) == 2
    assert entry.ensures(model) is None
    assert operators(model) == ["DequantizeLinear", "MatMul", "MatMul"]
    for old, new in zip(before, values_of(model), strict=True):
        assert np.array_equal(old, new)


@pytest.mark.parametrize("options", [{"readers": 2}, {"float_weight": True}], ids=["another reader", "float weight"])
def test_a_weight_that_is_left_alone(options: dict[str, Any]) -> None:
    model, entry = linear(**options), WeightsAsRead()
    before = operators(model)
    assert entry.run(model) == 0
    assert entry.ensures(model) is None
    assert operators(model) == before


def test_a_transpose_that_changes_nothing_is_no_match() -> None:
    # perm [0, 1] on a square weight would be turned all the same, and the product would be another.
    model = linear(perm=(0, 1))
    assert WeightsAsRead().run(model) == 0
    assert np.array_equal(model.graph.initializers["w"].const_value.numpy(), WEIGHT)


# -- masks ---------------------------------------------------------------------------------------------------------


def masked(values: dict[str, np.ndarray], node_value: np.ndarray | None = None) -> Any:
    x = ir.Value(name="x", shape=ir.Shape([2]), type=ir.TensorType(ir.DataType.FLOAT16))
    nodes, last = [], x
    initializers = [constant(name, value) for name, value in values.items()]
    sources = list(initializers)
    if node_value is not None:
        made = ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.tensor(node_value, name="made"))], name="c")
        made.outputs[0].type = ir.TensorType(made.attributes["value"].as_tensor().dtype)
        made.outputs[0].const_value = made.attributes["value"].as_tensor()
        nodes.append(made)
        sources.append(made.outputs[0])
    for source in sources:
        nodes.append(ir.Node("", "Add", [last, source], name=f"add{len(nodes)}"))
        last = nodes[-1].outputs[0]
    nodes.append(ir.Node("", "Softmax", [last], name="softmax"))
    return ir.Model(
        ir.Graph([x], [nodes[-1].outputs[0]], nodes=nodes, initializers=initializers, opset_imports={"": 20}, name="g"),
        ir_version=10,
    )


@pytest.mark.parametrize("value", [-65504.0, -np.inf, -40000.0])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1, 1)])
def test_a_low_half_constant_is_raised(value: float, shape: tuple[int, ...]) -> None:
    model, entry = masked({"m": np.full(shape, value, np.float16)}), ClampMasks()
    assert entry.ensures(model) is not None
    assert entry.run(model) == 1
    assert entry.ensures(model) is None
    after = model.graph.initializers["m"].const_value.numpy()
    assert after.dtype == np.float16
    assert after.shape == shape
    assert float(after.reshape(())) == FLOAT16_MASK


def test_a_constant_node_is_raised() -> None:
    model = masked({}, node_value=np.array(-65504, np.float16))
    assert ClampMasks().run(model) == 1
    assert float(next(iter(model.graph)).attributes["value"].as_tensor().numpy()) == FLOAT16_MASK


def test_half_values_that_stay() -> None:
    values = {
        "low enough": np.array(FLOAT16_MASK, np.float16),
        "zero": np.array(0, np.float16),
        "large": np.array(65504, np.float16),
        "weight": np.full((2,), -65504, np.float16),
    }
    model = masked(values)
    assert ClampMasks().run(model) == 0
    for name, value in values.items():
        assert np.array_equal(model.graph.initializers[name].const_value.numpy(), value)


def test_single_masks_stay() -> None:
    lowest = np.array(np.finfo(np.float32).min)
    model = masked({"m": lowest})
    assert ClampMasks().run(model) == 0
    assert model.graph.initializers["m"].const_value.numpy() == lowest


# -- names ---------------------------------------------------------------------------------------------------------


def scoped(*scopes: str | None) -> Any:
    x = ir.Value(name="x", shape=ir.Shape([2]), type=ir.TensorType(ir.DataType.FLOAT))
    nodes, last = [], x
    for scope in scopes:
        node = ir.Node("", "Relu", [last], name="node_relu")
        node.metadata_props["pkg.torch.onnx.stack_trace"] = "File '/home/me/model.py', line 3"
        if scope is not None:
            node.metadata_props[SCOPES] = scope
        nodes.append(node)
        last = node.outputs[0]
    model = ir.Model(ir.Graph([x], [last], nodes=nodes, opset_imports={"": 20}, name="g"), ir_version=10)
    model.metadata_props["where"] = "/home/me"
    return model


def test_names_are_module_and_operator_with_a_number_where_needed() -> None:
    model, entry = scoped("['', 'a.b', 'relu']", "['', 'a.b', 'relu_1']", "['', 'relu']", None, "['relu']"), NameNodes()
    assert entry.ensures(model) is not None
    assert entry.run(model) == 5
    assert entry.ensures(model) is None
    assert [node.name for node in model.graph] == [
        "a.b/Relu",
        "a.b/Relu_2",
        "graph/Relu",
        "graph/Relu_2",
        "graph/Relu_3",
    ]
    assert not any(node.metadata_props for node in model.graph)
    assert not model.metadata_props


def test_the_exporters_own_scope_is_no_module() -> None:
    model = scoped("['', '_empty_nn_module_stack_from_metadata_hook', 'sym_size']")
    NameNodes().run(model)
    assert [node.name for node in model.graph] == ["graph/Relu"]


def test_a_graph_without_nodes() -> None:
    model = scoped()
    run_passes(model, PASSES)
    assert operators(model) == []


# -- weights that were not stored yet --------------------------------------------------------------------------------


def float_weight_behind_qdq(*, per_channel: bool = True, reads_float_too: bool = False) -> Any:
    """A float weight [3, 4] through Q/DQ, the way a proxy that trains exports it."""
    axis = "<axis = 0>" if per_channel else ""
    pair = f"q = QuantizeLinear {axis} (w, s, z) d = DequantizeLinear {axis} (q, s)"
    nodes = f"{pair} t = Transpose <perm = [1, 0]> (d) y = MatMul (x, t) "
    nodes += "r = Identity (w)" if reads_float_too else ""
    step = SCALE if per_channel else np.array(0.5, np.float32)
    constants = {"w": (WEIGHT * np.float32(0.3)).astype(np.float32), "s": step, "z": np.zeros(step.shape, np.int8)}
    outputs = "float[2,3] y, float[3,4] r" if reads_float_too else "float[2,3] y"
    return graph("float[2,4] x", outputs, nodes, opset=20, **constants)


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_float_weight_behind_a_q_is_stored(per_channel: bool) -> None:
    model = float_weight_behind_qdq(per_channel=per_channel)
    assert StoreWeights().run(model) == 1
    assert operators(model) == ["DequantizeLinear", "Transpose", "MatMul"]
    stored = next(iter(model.graph)).inputs[0].const_value.numpy()
    scale = SCALE[:, None] if per_channel else np.float32(0.5)
    weight = (WEIGHT * np.float32(0.3)).astype(np.float32)
    assert stored.dtype == np.int8
    assert np.array_equal(stored, np.clip(np.rint(weight / scale), -128, 127))
    assert "w" not in model.graph.initializers
    assert StoreWeights().run(model) == 0


def test_a_weight_that_is_also_read_as_it_is_stays() -> None:
    model = float_weight_behind_qdq(reads_float_too=True)
    assert StoreWeights().run(model) == 1
    assert "w" in model.graph.initializers


def test_activations_are_not_stored() -> None:
    model = quantized_products()
    assert StoreWeights().run(model) == 0


# -- activations stored unsigned -----------------------------------------------------------------------------------


def quantized_products() -> Any:
    """x [2, 4] through Q/DQ times a stored weight [4, 3], and its Q/DQ again times x' [3, 2] through Q/DQ."""

    def through_qdq(value: str, name: str) -> str:
        return f"{name}q = QuantizeLinear ({value}, step, zero) {name} = DequantizeLinear ({name}q, step)"

    nodes = f"""{through_qdq("x", "weighted")} v = DequantizeLinear <axis = 1> (w, s) l = MatMul (weighted, v)
        t = Transpose <perm = [1, 0]> (l) {through_qdq("l", "left")} {through_qdq("t", "right")}
        y = MatMul (left, right)"""
    constants = {"step": np.array(0.5, np.float32), "zero": np.array(0, np.int8), "w": WEIGHT.T.copy(), "s": SCALE}
    return graph("float[2,4] x", "float[2,2] y", nodes, opset=20, **constants)


def storage(model: Any) -> dict[str, str]:
    """The type in which each Q stores, by the name of what it gives."""
    quantizers = [node for node in model.graph if node.op_type == "QuantizeLinear"]
    return {node.outputs[0].name: node.inputs[2].const_value.dtype.name for node in quantizers}


@pytest.mark.parametrize(
    ("where", "unsigned"), [("weighted", {"weightedq"}), ("all", {"weightedq", "leftq", "rightq"})]
)
def test_unsigned_storage_keeps_every_value(where: str, unsigned: set[str]) -> None:
    def run(model: Any) -> np.ndarray:
        values = np.random.default_rng(0).normal(0, 40, (2, 4)).astype(np.float32)
        return node_by_node(ir.to_proto(model).SerializeToString(), values)[0]

    model = quantized_products()
    before = run(model)
    run_passes(model, [UnsignedActivations(where)])
    assert {name for name, dtype in storage(model).items() if dtype == "UINT8"} == unsigned
    assert np.array_equal(run(model), before)
    assert UnsignedActivations(where).run(model) == 0


@pytest.mark.parametrize(
    ("reader", "outputs"),
    [
        ("", "float[2] y, int8[2] q"),
        ("c = Cast <to = 1> (q)", "float[2] y, float[2] c"),
        ("c = Identity (q)", "float[2] y, int8[2] c"),
    ],
    ids=["a result", "a cast", "a result behind another node"],
)
def test_steps_that_somebody_reads_stay_signed(reader: str, outputs: str) -> None:
    onnx = pytest.importorskip("onnx")
    nodes = f"q = QuantizeLinear (x, s, z) {reader} y = DequantizeLinear (q, s, z)"
    model = graph("float[2] x", outputs, nodes, opset=20, s=np.array(0.5, np.float32), z=np.array(0, np.int8))
    run_passes(model, [UnsignedActivations("all")])
    assert list(storage(model).values()) == ["INT8"]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_no_activation_no_change() -> None:
    model = linear()
    assert UnsignedActivations("all").run(model) == 0
    assert [value.name for value in model.graph.initializers.values()] == ["w", "s"]


# -- the runner ----------------------------------------------------------------------------------------------------


class Stub:
    """A pass with a given condition and promise."""

    def __init__(self, before: str | None = None, after: str | None = None) -> None:
        self.before, self.after, self.runs = before, after, 0

    def requires(self, model: Any) -> str | None:
        return self.before

    def run(self, model: Any) -> int:
        self.runs += 1
        return 1

    def ensures(self, model: Any) -> str | None:
        return self.after


def test_a_broken_condition_stops_before_the_pass_and_names_it() -> None:
    stub = Stub(before="the graph has no inputs")
    with pytest.raises(ExportError, match="pass Stub cannot start: the graph has no inputs"):
        run_passes(None, [stub])
    assert stub.runs == 0


def test_a_broken_promise_names_the_pass_and_stops_the_next() -> None:
    first, second = Stub(after="a Transpose is left"), Stub()
    with pytest.raises(ExportError, match="pass Stub did not finish: a Transpose is left"):
        run_passes(None, [first, second])
    assert (first.runs, second.runs) == (1, 0)


def scaled_before_q() -> Any:
    """Two multiplications by a constant a channel, then a Q: one is enough."""
    constants = {"w": SCALE, "f": SCALE, "s": np.array(0.5, np.float32), "z": np.array(0, np.int8)}
    return graph(
        "float[2,3] x", "int8[2,3] y", "n = Mul (x, w) m = Mul (n, f) y = QuantizeLinear (m, s, z)", **constants
    )


@pytest.mark.parametrize(
    ("entry", "model"),
    [
        (StoreWeights(), float_weight_behind_qdq()),
        (WeightsAsRead(), linear()),
        (FoldChannelFactors(), scaled_before_q()),
        (ClampMasks(), masked({"m": np.array(-65504, np.float16)})),
        (NameNodes(), scoped("['', 'a', 'relu']", "['', 'a', 'relu']")),
        (UnsignedActivations("all"), quantized_products()),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "ensures") else "",
)
def test_each_pass_says_what_it_would_have_to_do(entry: Any, model: Any) -> None:
    assert entry.ensures(model) is not None
    run_passes(model, [entry])
    assert entry.ensures(model) is None


@pytest.mark.parametrize(
    ("outputs", "nodes", "kinds"),
    [
        # The value is an input of the graph, and what replaces an output of it; the same inside; another output.
        ("float[3] y", "y = Abs (x)", ["Identity"]),
        ("float[3] y", "a = Abs (x) y = Neg (a)", ["Neg"]),
        ("float[3] a, float[3] y", "a = Neg (x) y = Abs (a)", ["Neg", "Identity"]),
        ("float[3] y", "a = Neg (x) y = Abs (a)", ["Neg"]),
    ],
)
def test_a_replaced_node_leaves_the_names_of_the_graph(outputs: str, nodes: str, kinds: list[str]) -> None:
    model = graph("float[3] x", outputs, nodes)
    names = [value.name for value in (*model.graph.inputs, *model.graph.outputs)]
    (node,) = (node for node in model.graph if node.op_type == "Abs")
    replace_node(model, node, node.inputs[0])
    assert operators(model) == kinds
    assert [value.name for value in (*model.graph.inputs, *model.graph.outputs)] == names
    assert all(np.array_equal(np.abs(found), [1, 2, 3]) for found in computed(model, x=np.float32([1, -2, 3])))


def test_scalar() -> None:
    assert scalar(constant("a", np.array(2.5, np.float32))) == 2.5
    assert scalar(constant("a", np.array([2.5], np.float16))) == 2.5
    assert scalar(constant("a", np.array([1.0, 2.0], np.float32))) is None
    assert scalar(constant("a", np.array(1, np.int64))) is None
    assert scalar(ir.Value(name="x")) is None
