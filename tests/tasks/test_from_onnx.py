"""Float ONNX files as torch modules: what they compute, beside ONNX Runtime, what becomes a module, and refusals."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

import quantizer
from quantizer.errors import TaskError
from quantizer.tasks.from_onnx import OnnxModule

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

Arrays = Mapping[str, npt.NDArray[Any]]


def _random(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _file(folder: Path, text: str, constants: Arrays | None = None, opset: int = 20, name: str = "m.onnx") -> Path:
    """Write a graph in ONNX's own text, with constants by name."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> {text}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(held, key) for key, held in (constants or {}).items())
    onnx.save(model, folder / name)
    return folder / name


def _distance(module: OnnxModule, path: Path, inputs: Arrays) -> float:
    """Return the largest difference between a module's outputs and those of ONNX Runtime."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    expected = dict(zip([value.name for value in session.get_outputs()], session.run(None, dict(inputs)), strict=True))
    with torch.no_grad():
        made = module(**{module.arguments[name]: torch.from_numpy(array) for name, array in inputs.items()})
    found: Mapping[str, Tensor] = {next(iter(expected)): made} if isinstance(made, Tensor) else made
    assert list(found) == list(expected)
    assert all(found[name].shape == expected[name].shape for name in expected)
    return max(float(np.abs(found[name].numpy() - expected[name]).max()) for name in expected)


MLP = """
g (float[N, 8] x) => (float[N, 4] y) {
    [first] a = Gemm <transB = 1> (x, w1, b1)
    [act] r = Relu (a)
    [second] p = MatMul (r, w2)
    [bias] y = Add (p, b2)
}
"""
MLP_WEIGHTS = {"w1": _random(16, 8), "b1": _random(16), "w2": _random(16, 4), "b2": _random(4)}

CNN = """
g (float[N, 3, H, W] x) => (float[N, 5] y) {
    [stem] a = Conv <pads = [0, 0, 1, 1], strides = [2, 2]> (x, w1)
    [norm] n = BatchNormalization (a, scale, shift, mean, variance)
    [act] r = Relu (n)
    [deep] d = Conv <pads = [1, 1, 1, 1], group = 8> (r, w2, b2)
    [sum] s = Add (r, d)
    [up] u = ConvTranspose <strides = [2, 2]> (s, w3)
    [pool] p = GlobalAveragePool (u)
    [flat] f = Flatten (p)
    [head] y = Gemm (f, w4, b4)
}
"""
CNN_WEIGHTS = {
    "w1": _random(8, 3, 3, 3),
    "scale": _random(8),
    "shift": _random(8),
    "mean": _random(8),
    "variance": np.abs(_random(8)) + 0.5,
    "w2": _random(8, 1, 3, 3),
    "b2": _random(8),
    "w3": _random(8, 6, 2, 2),
    "w4": _random(6, 5),
    "b4": _random(5),
}

# As exporters of PyTorch write it: sizes are computed with Shape, Gather, Concat and Reshape.
ATTENTION = """
g (int64[N, T] ids, int64[N, T] mask) => (float[N, T, 8] y, float[N, T, 1] z) {
    [table] e = Gather (table, ids)
    [shape] s = Shape (e)
    [n] n = Gather <axis = 0> (s, zero)
    [t] t = Gather <axis = 0> (s, one)
    [n1] n1 = Unsqueeze (n, axis0)
    [t1] t1 = Unsqueeze (t, axis0)
    [apart] split = Concat <axis = 0> (n1, t1, heads)
    [q] q0 = MatMul (e, wq)
    [qr] q1 = Reshape (q0, split)
    [qt] q2 = Transpose <perm = [0, 2, 1, 3]> (q1)
    [k] k0 = MatMul (e, wk)
    [kr] k1 = Reshape (k0, split)
    [kt] k2 = Transpose <perm = [0, 2, 3, 1]> (k1)
    [scores] c = MatMul (q2, k2)
    [float_mask] m0 = Cast <to = 1> (mask)
    [open] m1 = Sub (ones, m0)
    [large] m2 = Mul (m1, low)
    [wide] m3 = Unsqueeze (m2, axis12)
    [masked] cm = Add (c, m3)
    [soft] p = Softmax (cm)
    [back] v1 = Transpose <perm = [0, 2, 1, 3]> (q1)
    [mix] o0 = MatMul (p, v1)
    [ot] o1 = Transpose <perm = [0, 2, 1, 3]> (o0)
    [whole] joined = Concat <axis = 0> (n1, t1, minus)
    [or] o2 = Reshape (o1, joined)
    [residual] y = Add (o2, e)
    [mean] z = ReduceMean <keepdims = 1> (y, last)
}
"""
ATTENTION_WEIGHTS = {
    "table": _random(20, 8),
    "wq": _random(8, 8),
    "wk": _random(8, 8, seed=1),
    "zero": np.array(0),
    "one": np.array(1),
    "axis0": np.array([0]),
    "axis12": np.array([1, 2]),
    "last": np.array([-1]),
    "heads": np.array([2, 4]),
    "minus": np.array([-1]),
    "ones": np.array(1, np.float32),
    "low": np.array(-1e4, np.float32),
}


def test_a_perceptron_becomes_linears_with_their_biases(tmp_path: Path) -> None:
    path = _file(tmp_path, MLP, MLP_WEIGHTS)
    model = quantizer.from_onnx(path)
    kinds = {name: type(module) for name, module in model.named_children()}
    assert kinds == {"first": nn.Linear, "second": nn.Linear}
    assert model.nodes == {"first": "first", "second": "second"}
    assert all(module.bias is not None for module in (model.first, model.second))
    assert list(inspect.signature(model.forward).parameters) == ["x"]
    assert "self.first(x)" in inspect.getsource(type(model).forward)
    for rows in (1, 7):
        assert _distance(model, path, {"x": _random(rows, 8)}) < 1e-5


def test_a_convnet_keeps_open_sizes(tmp_path: Path) -> None:
    path = _file(tmp_path, CNN, CNN_WEIGHTS)
    model = quantizer.from_onnx(path)
    found = [type(module).__name__ for module in model.children()]
    assert found == ["Conv2d", "BatchNorm2d", "Conv2d", "Add", "ConvTranspose2d", "Linear"]
    assert model.deep.groups == 8
    for rows, height, width in ((1, 8, 8), (3, 12, 9)):
        assert _distance(model, path, {"x": _random(rows, 3, height, width)}) < 1e-5


def test_sizes_that_the_graph_computes_follow_the_input(tmp_path: Path) -> None:
    path = _file(tmp_path, ATTENTION, ATTENTION_WEIGHTS)
    model = quantizer.from_onnx(path)
    assert {"q", "k", "scores", "mix", "residual", "table"} <= set(dict(model.named_children()))
    for rows, tokens in ((1, 3), (4, 11)):
        ids = np.random.default_rng(rows).integers(0, 20, (rows, tokens))
        mask = np.ones((rows, tokens), np.int64)
        mask[:, -1] = 0
        assert _distance(model, path, {"ids": ids, "mask": mask}) < 1e-5


@pytest.mark.parametrize(
    ("opset", "text", "constants"),
    [
        pytest.param(11, "{ s = Squeeze <axes = [1]> (x) y = Softmax <axis = 1> (s) }", {}, id="axes as attributes"),
        pytest.param(9, "{ s = Squeeze <axes = [1]> (x) y = Clip <min = 0.0, max = 6.0> (s) }", {}, id="opset 9"),
        pytest.param(20, "{ s = Squeeze (x, a) y = Slice (s, a, b, a) }", {"a": [1], "b": [3]}, id="slice"),
        pytest.param(20, "{ s = Squeeze (x, a) y = Pad (s, p) }", {"a": [1], "p": [0, 1, 0, 2]}, id="pad"),
        pytest.param(
            20,
            "{ s = Squeeze (x, a) y = Slice (s, a1, e, a, a1) }",
            {"a": [1], "a1": [-1], "e": [-(2**63)]},
            id="a whole axis backwards",
        ),
        pytest.param(13, "{ s = Squeeze (x, a) m = Mod <fmod = 1> (s, s) y = Sum (s, m, s) }", {"a": [1]}, id="sum"),
        pytest.param(
            20,
            "{ n = Neg (p) q = Neg (n) s = Squeeze (x, a) y = Pad (s, q) }",
            {"a": [1], "p": [0, 1, 0, 2]},
            id="pads that are computed from constants",
        ),
        pytest.param(
            20,
            "{ s = Squeeze (x, a) i = Shape (s) t = Shape (i) o = ConstantOfShape <value = int64[1] {1}> (t) "
            "m = Mul (o, b) e = Equal (i, m) w = Where (e, o, i) y = Expand (s, w) }",
            {"a": [1], "b": [-1]},
            id="expand as torch writes it",
        ),
    ],
)
def test_forms_of_operators(tmp_path: Path, opset: int, text: str, constants: dict[str, list[int]]) -> None:
    arrays = {name: np.array(value) for name, value in constants.items()}
    path = _file(tmp_path, f"g (float[N, 1, 6] x) => (float[N, M] y) {text}", arrays, opset)
    model = quantizer.from_onnx(path)
    for rows in (1, 4):
        assert _distance(model, path, {"x": _random(rows, 1, 6)}) < 1e-6


RECURRENT = {
    "LSTM": ("LSTM", 4, "", "y, h, c"),
    "GRU": ("GRU", 3, "linear_before_reset = 1,", "y, h"),
    "RNN": ("RNN", 1, "", "y, h"),
    "RNN with ReLU": ("RNN", 1, 'activations = ["Relu", "Relu"],', "y, h"),
}


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers(tmp_path: Path, kind: str, direction: str) -> None:
    operator, gates, option, outputs = RECURRENT[kind]
    count = 2 if direction == "bidirectional" else 1
    option = option if count == 2 else option.replace('"Relu", "Relu"', '"Relu"')
    declared = ", ".join(f"float[D, N, 4] {name}" for name in outputs.split(", ")[1:])
    text = f"""
    g (float[T, N, 3] x) => (float[T, D, N, 4] y, {declared}) {{
        {outputs} = {operator} <hidden_size = 4, {option} direction = "{direction}"> (x, w, r, b)
    }}
    """
    weights = {"w": _random(count, gates * 4, 3), "r": _random(count, gates * 4, 4), "b": _random(count, gates * 8)}
    path = _file(tmp_path, text, weights)
    assert _distance(quantizer.from_onnx(path), path, {"x": _random(5, 2, 3)}) < 1e-5


@pytest.mark.parametrize(
    ("operator", "gates", "option", "reason"),
    [
        ("GRU", 3, "", r"linear_before_reset = 0 is not supported"),
        ("RNN", 1, 'activations = ["Sigmoid"],', "other activations"),
        ("LSTM", 4, 'direction = "reverse",', "only the reverse direction"),
    ],
)
def test_another_recurrence_is_refused(tmp_path: Path, operator: str, gates: int, option: str, reason: str) -> None:
    text = f"g (float[T, N, 3] x) => (float[T, 1, N, 4] y) {{ y = {operator} <{option} hidden_size = 4> (x, w, r) }}"
    path = _file(tmp_path, text, {"w": _random(1, gates * 4, 3), "r": _random(1, gates * 4, 4)})
    with pytest.raises(TaskError, match=reason):
        quantizer.from_onnx(path)


BRANCH = """
g (float[N, T] x, int64 rate) => (float[N, T] y) {
    c = Equal (rate, sixteen)
    [decide] y = If (c) <
        then_branch = a () => (float[N, T] p) { p = Mul (x, two) },
        else_branch = b () => (float[N, T] q) { q = Neg (x) }
    >
}
"""
BRANCH_CONSTANTS = {"sixteen": np.array(16), "two": np.array(2, np.float32)}


def test_a_branch_is_decided_by_what_is_fixed(tmp_path: Path) -> None:
    path = _file(tmp_path, BRANCH, BRANCH_CONSTANTS)
    x = torch.randn(2, 3)
    assert torch.equal(quantizer.from_onnx(path, fixed={"rate": 16})(x), 2 * x)
    assert torch.equal(quantizer.from_onnx(path, fixed={"rate": 8, "T": 3})(x), -x)
    with pytest.raises(TaskError, match=r"'decide' \(If\): its condition is computed from the inputs"):
        quantizer.from_onnx(path)
    with pytest.raises(
        TaskError,
        match="fixed names unknown inputs or axes 'speed'; the model has the inputs x, rate, and the named axes N, T",
    ):
        quantizer.from_onnx(path, fixed={"speed": 1})
    with pytest.raises(TaskError, match="'T' is an axis with the length 0"):
        quantizer.from_onnx(path, fixed={"T": 0})
    with pytest.raises(TaskError, match="'rate' has 0 axes in the model, but the value has 1"):
        quantizer.from_onnx(path, fixed={"rate": [16]})


def test_a_form_that_torch_lacks_names_its_node(tmp_path: Path) -> None:
    text = "g (float[N, 6] x) => (float[N, 2] y) { [back] y = Slice (x, from, to, axis, step) }"
    places = {"from": np.array([4]), "to": np.array([2]), "axis": np.array([1]), "step": np.array([-1])}
    path = _file(tmp_path, text, places)
    with pytest.raises(TaskError, match=r"m.onnx: node 'back' \(Slice\): the step -1 is not supported"):
        quantizer.from_onnx(path)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", ["SAME_UPPER", "SAME_LOWER"])
def test_padding_to_the_same_size(tmp_path: Path, padding: str, stride: int) -> None:
    node = f'y = Conv <auto_pad = "{padding}", strides = [{stride}, {stride}]> (x, w)'
    text = f"g (float[N, 3, 9, 8] x) => (float[N, 4, H, W] y) {{ {node} }}"
    path = _file(tmp_path, text, {"w": _random(4, 3, 4, 3)})
    assert _distance(quantizer.from_onnx(path), path, {"x": _random(2, 3, 9, 8)}) < 1e-5


def test_names_that_python_cannot_have(tmp_path: Path) -> None:
    path = _file(tmp_path, MLP, MLP_WEIGHTS)
    model = onnx.load(path)
    model.graph.input[0].name = model.graph.node[0].input[0] = "x:0/class"
    model.graph.node[0].name = "/net/0/forward"
    model.graph.node[2].name = "train"
    onnx.save(model, path)
    made = quantizer.from_onnx(path)
    assert made.arguments == {"x:0/class": "x_0_class"}
    assert list(dict(made.named_children())) == ["net_0_forward", "train_1"]
    assert _distance(made, path, {"x:0/class": _random(2, 8)}) < 1e-5


def test_sizes_below_zero_are_open(tmp_path: Path) -> None:
    path = _file(tmp_path, MLP, MLP_WEIGHTS)
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    onnx.save(model, path)
    assert quantizer.from_onnx(path)(torch.randn(3, 8)).shape == (3, 4)


def test_weights_beside_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path, MLP, MLP_WEIGHTS)
    expected = quantizer.from_onnx(path)(torch.ones(1, 8))
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="m.bin", size_threshold=0)
    assert torch.equal(quantizer.from_onnx(path)(torch.ones(1, 8)), expected)
    (tmp_path / "m.bin").unlink()
    with pytest.raises(TaskError, match=r"in the file 'm\.bin' beside it, which is missing"):
        quantizer.from_onnx(path)


def test_an_operator_without_a_counterpart_is_named(tmp_path: Path) -> None:
    path = _file(tmp_path, "g (float[N, 4] x) => (float[N, 4] y) { [odd] y = Hardmax (x) }")
    with pytest.raises(TaskError, match="node 'odd': the operator Hardmax is not supported"):
        quantizer.from_onnx(path)
    path = _file(tmp_path, "g (float[N, 4] x) => (float[N, 4] y) { [custom] y = Relu (x) }")
    model = onnx.load(path)
    model.graph.node[0].domain, model.graph.node[0].op_type = "com.example", "Swirl"
    model.opset_import.append(onnx.helper.make_opsetid("com.example", 1))
    onnx.save(model, path)
    with pytest.raises(TaskError, match=r"node 'custom': the operator com.example.Swirl is not supported"):
        quantizer.from_onnx(path)


def test_a_quantized_file_is_refused(tmp_path: Path) -> None:
    text = "g (float[N, 4] x) => (float[N, 4] y) { [codes] q = QuantizeLinear (x, s) y = DequantizeLinear (q, s) }"
    path = _file(tmp_path, text, {"s": np.array(0.1, np.float32)})
    with pytest.raises(
        TaskError, match="is already quantized: node 'codes' is a QuantizeLinear; use the original float file"
    ):
        quantizer.from_onnx(path)


def test_what_is_no_onnx_file(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="not found"):
        quantizer.from_onnx(tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("this is no graph\n")
    with pytest.raises(TaskError, match="not an ONNX file"):
        quantizer.from_onnx(tmp_path / "text.onnx")
    path = _file(tmp_path, MLP, MLP_WEIGHTS)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(TaskError, match="cut short"):
        quantizer.from_onnx(path)


@pytest.mark.parametrize(("opset", "match"), [(99, "opset 99 is newer than opset"), (2, "opset 2 is not supported")])
def test_opsets_that_are_not_known(tmp_path: Path, opset: int, match: str) -> None:
    path = _file(tmp_path, "g (float[N, 4] x) => (float[N, 4] y) { y = Relu (x) }")
    model = onnx.load(path)
    model.opset_import[0].version = opset
    onnx.save(model, path)
    with pytest.raises(TaskError, match=match):
        quantizer.from_onnx(path)


@pytest.mark.parametrize("stem", ["none", "true", "class", "1", "-"])
def test_a_file_may_be_called_like_a_word_of_python(tmp_path: Path, stem: str) -> None:
    text = '<ir_version: 10, opset_import: ["" : 20]> g (float[2, 4] x) => (float[2, 4] y) { y = Relu (x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / f"{stem}.onnx")
    model = quantizer.from_onnx(tmp_path / f"{stem}.onnx")
    assert torch.equal(model(-torch.ones(2, 4)), torch.zeros(2, 4))
