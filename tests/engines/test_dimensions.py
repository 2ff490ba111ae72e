"""Dimensions that inputs share by their name in the ONNX file: held to in every call, and by made-up inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantizer.engines import InputSizes, build_engine, inspect_engine, load_engine
from quantizer.engines.base import ranges_with_cache
from quantizer.engines.engine_file import read_engine
from quantizer.engines.onnx_graph import graph_inspection
from quantizer.errors import EngineError
from quantizer.export.qdq.onnx_file import input_dimensions

onnx = pytest.importorskip("onnx", reason="install enginequant[onnx]")

# A mean over the tokens that a mask leaves, as an encoder of sentences ends.
POOLING = """<ir_version: 10, opset_import: ["" : 20]>
g (int64[batch, sequence] ids, int64[batch, sequence] mask) => (float[batch, 4] y)
<float[9, 4] table, int64[1] last = {2}, int64[1] tokens = {1}> {
    x = Gather <axis = 0> (table, ids)
    m = Cast <to = 1> (mask)
    column = Unsqueeze (m, last)
    wide = Expand (column, size)
    kept = Mul (x, wide)
    sum = ReduceSum <keepdims = 0> (kept, tokens)
    counted = ReduceSum <keepdims = 0> (wide, tokens)
    y = Div (sum, counted)
    size = Shape (x)
}"""


def _save(path: Path, text: str, **tensors: Any) -> Path:
    model = onnx.parser.parse_model(text)
    graph = model.graph
    # The order of the text is for people: a node may not stand before what it reads.
    made = {value.name for value in (*graph.input, *graph.initializer)} | set(tensors)
    nodes, left = [], list(graph.node)
    while left:
        node = next(node for node in left if made.issuperset(node.input))
        made.update(node.output)
        node.name = f"{node.op_type}/{len(nodes)}"
        nodes.append(node)
        left.remove(node)
    del graph.node[:]
    graph.node.extend(nodes)
    kept = [tensor for tensor in graph.initializer if tensor.name not in tensors]
    del graph.initializer[:]
    graph.initializer.extend([*kept, *(onnx.numpy_helper.from_array(value, name) for name, value in tensors.items())])
    onnx.save(model, path)
    return path


@pytest.fixture(params=["openvino", "onnxruntime"])
def name(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param, reason=f"install enginequant[{request.param}]")
    return str(request.param)


@pytest.fixture
def pooling(tmp_path: Path) -> Path:
    table = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    return _save(tmp_path / "pooling.onnx", POOLING, table=table)


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize(
    ("shape", "which"), [((2, 9), "sequence"), ((2, 4), "sequence"), ((3, 6), "batch"), ((1, 6), "batch")]
)
def test_inputs_that_differ_in_a_shared_dimension(
    name: str, built: bool, shape: tuple[int, int], which: str, pooling: Path, tmp_path: Path
) -> None:
    path = build_engine(name, pooling, tmp_path / "pooling.engine").path if built else pooling
    engine, random = load_engine(name, path), np.random.default_rng(1)
    ones = np.ones((2, 6), np.int64)
    batches = [random.integers(0, 9, (2, 6)) for _ in range(3)]
    expected = [load_engine(name, path)({"ids": ids, "mask": ones})["y"] for ids in batches]
    engine({"ids": batches[0], "mask": ones})
    axis = 0 if which == "batch" else 1
    message = (
        rf"{name} engine: dimension '{which}' is {(2, 6)[axis]} in input 'ids' \(axis {axis}\) and {shape[axis]} in "
        rf"input 'mask' \(axis {axis}\): pass one size, or .*dynamic_axes"
    )
    with pytest.raises(EngineError, match=message):
        engine({"ids": batches[1], "mask": np.ones(shape, np.int64)})
    for ids, right in zip(batches[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(engine({"ids": ids, "mask": ones})["y"], right)


def test_inputs_that_share_no_dimension_may_differ(name: str, tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]>
    g (float[n, 4] a, float[k, 4] b, float[?, 4] c) => (float[s, 4] y) { y = Concat <axis = 0> (a, b, c) }"""
    engine = load_engine(name, build_engine(name, _save(tmp_path / "m.onnx", text), tmp_path / "m.engine").path)
    given = {key: np.ones((size, 4), np.float32) for key, size in (("a", 2), ("b", 3), ("c", 5))}
    assert engine(given)["y"].shape == (10, 4)


def test_names_of_dimensions_are_in_specs_and_engine_files(name: str, pooling: Path, tmp_path: Path) -> None:
    path = build_engine(name, pooling, tmp_path / "pooling.engine").path
    for file in (pooling, path):
        assert [spec.dimensions for spec in load_engine(name, file).inputs] == [("batch", "sequence")] * 2


def test_an_openvino_engine_tells_the_names_in_its_note(pooling: Path, tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="install enginequant[openvino]")
    _, note = read_engine(build_engine("openvino", pooling, tmp_path / "new.engine").path)
    assert note["dimensions"] == {"ids": ["batch", "sequence"], "mask": ["batch", "sequence"]}


def test_many_inputs_with_long_names(tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="install enginequant[openvino]")
    names = [f"past_key_values.{layer}.value" for layer in range(60)]
    inputs = ", ".join(f"float[batch, past_sequence, 4] {name.replace('.', '_')}" for name in names)
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
    g ({inputs}) => (float[batch, s, 4] y) {{ y = Concat <axis = 1> ({", ".join(names).replace(".", "_")}) }}"""
    path = build_engine("openvino", _save(tmp_path / "m.onnx", text), tmp_path / "m.engine").path
    assert {spec.dimensions for spec in load_engine("openvino", path).inputs} == {("batch", "past_sequence", "")}


def test_dimensions_are_read_without_weights(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]>
    g (float[batch, ?, 3] "a b", float[] c) => (float[batch, s, 3] y) { y = Add ("a b", c) }"""
    path = tmp_path / "m.onnx"
    model = onnx.parser.parse_model(text.replace('"a b"', "ab"))
    model.graph.input[0].name = model.graph.node[0].input[0] = "a b"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(10000, np.float32), "unread"))
    onnx.save(model, path)
    assert input_dimensions(path) == {"a b": ("batch", "", ""), "c": ()}


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([["batch", "sequence"]], {"batch": 8, "sequence": 128}),
        ([["sequence", "batch", ""]], {"batch": 8, "sequence": 128}),
        ([["b", "l", ""], ["l", ""]], {"b": 8, "l": 128}),
        ([["l", ""], ["b", "l"]], {"b": 8, "l": 128}),
        # One token is read, the others are in the cache.
        (
            [["batch", "sequence"], ["batch", "total_sequence"], ["batch", "", "past_sequence", ""]],
            {"batch": 8, "sequence": 1, "past_sequence": 127, "total_sequence": 128},
        ),
    ],
)
def test_sizes_of_names(shapes: list[list[str]], expected: dict[str, int]) -> None:
    sizes = InputSizes(8, 128).of(shapes)
    assert {name: sizes[name] for name in expected} == expected


def test_ranges_with_a_cache_hold_for_all_its_tokens() -> None:
    ranges = {"batch": (1, 8, 32), "sequence": (16, 128, 512)}
    assert ranges_with_cache(ranges, [["batch", "sequence"]]) == ranges
    shapes = [["batch", "sequence"], ["batch", "total_sequence"], ["batch", "", "past_sequence", ""]]
    assert ranges_with_cache(ranges, shapes) == {
        "batch": (1, 8, 32),
        "sequence": (1, 1, 512),
        "past_sequence": (0, 127, 511),
        "total_sequence": (1, 128, 512),
    }
    assert ranges_with_cache({}, shapes) == {}


# Positions have no batch, and their only axis is that of the tokens.
POSITIONS = """<ir_version: 10, opset_import: ["" : 20]>
g (float[b, l, 16] x, float[l, 16] positions) => (float[b, l, 8] y) <float[16, 8] w> {
    h = Add (x, positions)
    y = MatMul (h, w)
}"""


def test_made_up_inputs_share_dimensions(name: str, tmp_path: Path) -> None:
    path = _save(tmp_path / "m.onnx", POSITIONS, w=np.ones((16, 8), np.float32))
    for file in (path, build_engine(name, path, tmp_path / "m.engine").path):
        layers = inspect_engine(name, file, sizes=InputSizes(2, 5)).layers
        assert 2 * 5 * 16 * 8 in [layer.multiply_adds for layer in layers]
    (product,) = graph_inspection(path, "no engine", sizes=InputSizes(2, 5)).layers
    assert product.multiply_adds == 2 * 5 * 16 * 8


def test_a_sequence_that_comes_first(tmp_path: Path) -> None:
    text = POSITIONS.replace("b, l", "sequence, batch").replace("l, 16", "batch, 16")
    path = _save(tmp_path / "m.onnx", text, w=np.ones((16, 8), np.float32))
    assert graph_inspection(path, "no engine", sizes=InputSizes(2, 5)).layers[0].multiply_adds == 2 * 5 * 16 * 8


# Two types of tokens are usual, and some models have one: a table of a single row.
ONE_ROW = """<ir_version: 10, opset_import: ["" : 20]>
g (int64[batch, sequence] types) => (float[batch, sequence, 4] y) <float[1, 4] table> {
    y = Gather <axis = 0> (table, types)
}"""


def test_made_up_numbers_of_rows_that_are_not_there(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="install enginequant[onnxruntime]")
    path = _save(tmp_path / "m.onnx", ONE_ROW, table=np.ones((1, 4), np.float32))
    assert [layer.type for layer in inspect_engine("onnxruntime", path).layers] == ["Gather"]


def test_an_engine_that_runs_on_nothing_made_up(tmp_path: Path) -> None:
    # OpenVINO runs it, and what it gives means nothing.
    pytest.importorskip("onnxruntime", reason="install enginequant[onnxruntime]")
    text = """<ir_version: 10, opset_import: ["" : 20]>
    g (float[a, b] x, float[c, d] y) => (float[e, f] z) { z = MatMul (x, y) }"""
    path = _save(tmp_path / "m.onnx", text)
    with pytest.raises(EngineError, match=r"could not run"):
        inspect_engine("onnxruntime", path, sizes=InputSizes(2, 5))


def test_values_that_are_no_arrays(name: str, pooling: Path) -> None:
    torch = pytest.importorskip("torch")
    engine, mask = load_engine(name, pooling), np.ones((2, 3), np.int64)
    for value, what in (
        (torch.ones(2, 3, dtype=torch.bfloat16), r"Tensor of torch\.bfloat16"),
        ([[1, 2, 3], [1, 2]], "list"),
        (torch.ones(2, 3, device="meta"), r"Tensor of torch\.float32"),
    ):
        with pytest.raises(
            EngineError, match=rf"input 'ids' is a {what}, which cannot become an array \(.*\); expected ids: int64"
        ):
            engine({"ids": value, "mask": mask})
