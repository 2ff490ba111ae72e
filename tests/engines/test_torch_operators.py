"""Single ONNX operators in torch's engine, against ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantizer.engines import BuildOptions, build_engine, load_engine
from quantizer.errors import EngineError

_INDICES = {
    "ScatterND": np.array([[2], [0]]),
    "ScatterElements": np.array([[2, 0, 1, 2], [0, 2, 0, 1]]),  # no place twice, which has no order
}

_ALONE: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("Acos", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "Sinh", "Tan", "Softsign")},
    "Acosh": {},
    "Celu": {"alpha": 0.5},
    "ThresholdedRelu": {"alpha": 0.2},
    "Selu": {"alpha": 2.0, "gamma": 3.0},
    "ArgMax": {"axis": 1},
    "ArgMin": {"axis": 1, "keepdims": 0},
}


def _files(folder: Path, node: onnx.NodeProto, constants: dict[str, np.ndarray[Any, Any]], kind: int) -> Path:
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 4])
    made = helper.make_tensor_value_info("y", kind, None)
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph([node], "g", [given], [made], tensors)
    file = folder / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), file)
    build_engine("torch", file, folder / "m.engine", BuildOptions(compiled=False))
    return file


def _assert_like_onnx_runtime(folder: Path, file: Path, x: np.ndarray[Any, Any]) -> None:
    (found,) = load_engine("torch", folder / "m.engine")(x).values()
    (right,) = onnxruntime.InferenceSession(str(file)).run(None, {"x": x})
    assert found.shape == right.shape
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "attributes"), _ALONE.items())
def test_operators_of_one_tensor(tmp_path: Path, name: str, attributes: dict[str, Any]) -> None:
    node = helper.make_node(name, ["x"], ["y"], **attributes)
    kind = TensorProto.INT64 if name.startswith("Arg") else TensorProto.FLOAT
    x = np.random.default_rng(0).uniform(-0.9, 0.9, (3, 4)).astype(np.float32)
    _assert_like_onnx_runtime(tmp_path, _files(tmp_path, node, {}, kind), x + 2 if name == "Acosh" else x)


@pytest.mark.parametrize("name", ["ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp"])
def test_reductions(tmp_path: Path, name: str) -> None:
    node = helper.make_node(name, ["x", "axes"], ["y"], keepdims=0)
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    _assert_like_onnx_runtime(tmp_path, _files(tmp_path, node, {"axes": np.array([1])}, TensorProto.FLOAT), x)


@pytest.mark.parametrize(
    ("name", "reduction"),
    [
        *(("ScatterND", reduction) for reduction in ("none", "add")),
        *(("ScatterElements", reduction) for reduction in ("none", "add", "mul", "min", "max")),
    ],
)
def test_values_are_scattered(tmp_path: Path, name: str, reduction: str) -> None:
    node = helper.make_node(name, ["x", "places", "new"], ["y"], reduction=reduction)
    new = np.random.default_rng(1).standard_normal((2, 4)).astype(np.float32)
    constants = {"places": _INDICES[name], "new": new}
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    _assert_like_onnx_runtime(tmp_path, _files(tmp_path, node, constants, TensorProto.FLOAT), x)


@pytest.mark.parametrize(
    "picked", ['ScatterND <reduction = "add"> (x, one, x)', "GatherND (x, one)", "GatherND (x, two)"]
)
def test_indices_that_are_computed(tmp_path: Path, picked: str) -> None:
    """Their last axis says how many axes of the data they are for."""
    text = f"""<ir_version: 9, opset_import: ["" : 20]> g (float[rows, 4] x) => (float y)
        <int64[1] a = {{0}}, int64[1] b = {{1}}, int64[1] c = {{2}}, int64[1] along = {{1}}> {{
            i = Cast <to = 7> (x) one = Slice (i, a, b, along) two = Slice (i, a, c, along) y = {picked} }}"""
    model, file = onnx.parser.parse_model(text), tmp_path / "m.onnx"
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(model, file)
    build_engine("torch", file, tmp_path / "m.engine", BuildOptions(compiled=False))
    _assert_like_onnx_runtime(tmp_path, file, np.array([[2, 1, 0, 5], [0, 3, 1, 1], [1, 0, 7, 2]], np.float32))


_COUNTED = {
    "gathered": "y = GatherElements <axis = 1> (x, i)",
    "gathered by constants": "y = GatherElements <axis = -1> (x, c)",
    "rows": "t = Relu (x) r = Transpose <perm = [1, 0]> (t) y = Gather <axis = 0> (r, a)",
    "columns": "y = Gather <axis = 1> (x, i)",
    "scattered": 'y = ScatterElements <axis = 1, reduction = "add"> (x, i, x)',
    "several axes": "one = Unsqueeze (a, last) y = GatherND (x, one)",
}


@pytest.mark.parametrize("picked", _COUNTED.values(), ids=_COUNTED)
def test_indices_that_count_from_the_end(tmp_path: Path, picked: str) -> None:
    text = f"""<ir_version: 9, opset_import: ["" : 20]> g (float[rows, 4] x) => (float y)
        <int64[1] last = {{-1}}, int64[3] a = {{-1, 0, -3}}, int64[3, 2] c = {{-1, 0, -4, 1, 3, -2}}> {{
            i = Cast <to = 7> (x) {picked} }}"""
    model, file = onnx.parser.parse_model(text), tmp_path / "m.onnx"
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(model, file)
    build_engine("torch", file, tmp_path / "m.engine", BuildOptions(compiled=False))
    _assert_like_onnx_runtime(tmp_path, file, np.array([[-1, 1, 0, -3], [0, 3, -4, 1], [1, 0, -2, 2]], np.float32))


@pytest.mark.parametrize(("opset", "count"), [(18, 2), (20, 2), (21, 4), (21, 2)])
def test_groups_are_normalized_with_numbers_for_each_group_or_channel(tmp_path: Path, opset: int, count: int) -> None:
    channels = 4 if opset < 21 else count
    random = np.random.default_rng(0)
    held = {name: random.standard_normal(count).astype(np.float32) for name in ("scale", "bias")}
    node = helper.make_node("GroupNormalization", ["x", "scale", "bias"], ["y"], num_groups=2)
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", channels, 3, 5])
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    tensors = [numpy_helper.from_array(value, name) for name, value in held.items()]
    graph, file = helper.make_graph([node], "g", [given], [made], tensors), tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9), file)
    build_engine("torch", file, tmp_path / "m.engine", BuildOptions(compiled=False))
    x = random.standard_normal((2, channels, 3, 5)).astype(np.float32)
    _assert_like_onnx_runtime(tmp_path, file, x)


def test_an_index_of_one_hot_counts_from_the_end_too(tmp_path: Path) -> None:
    nodes = [helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT64)]
    nodes.append(helper.make_node("OneHot", ["i", "depth", "values"], ["y"]))
    tensors = {"depth": np.array(3), "values": np.array([0.5, 2], np.float32)}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    file = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), file)
    build_engine("torch", file, tmp_path / "m.engine", BuildOptions(compiled=False))
    _assert_like_onnx_runtime(tmp_path, file, np.array([[0, 2, -1, -3], [1, -2, 3, -4]], np.float32))


@pytest.mark.parametrize(
    ("name", "attributes", "said"),
    [
        ("IsInf", {"detect_negative": 0}, "its attribute detect_negative = 0 is not supported"),
        ("ArgMax", {"select_last_index": 1}, "its attribute select_last_index = 1 is not supported"),
        ("ReduceL1", {"noop_with_empty_axes": 1}, "a reduction over no axes is not supported"),
        ("ReduceSumSquare", {"noop_with_empty_axes": 1}, "a reduction over no axes is not supported"),
    ],
)
def test_an_attribute_that_would_be_passed_over_is_refused(
    tmp_path: Path, name: str, attributes: dict[str, Any], said: str
) -> None:
    """Without a look at it the result would be another one."""
    kind = {"IsInf": TensorProto.BOOL, "ArgMax": TensorProto.INT64}.get(name, TensorProto.FLOAT)
    with pytest.raises(EngineError, match=said):
        _files(tmp_path, helper.make_node(name, ["x"], ["y"], **attributes), {}, kind)


def test_a_pooling_of_distant_neighbours_is_refused(tmp_path: Path) -> None:
    text = '<ir_version: 9, opset_import: ["" : 20]> g (float[1, 2, 8, 8] x) => (float[1, 2, 6, 6] y) '
    text += "{ y = AveragePool <kernel_shape = [2, 2], dilations = [2, 2]> (x) }"
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    with pytest.raises(EngineError, match="dilations are not supported"):
        build_engine("torch", tmp_path / "m.onnx", tmp_path / "m.engine", BuildOptions(compiled=False))
