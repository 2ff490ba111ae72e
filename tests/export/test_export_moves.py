"""Passes that move, merge or drop nodes: the graph afterwards, and that it computes what it did."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ConvNet
from onnx_graphs import computed, graph, operators
from torch import nn
from toy_nets import net

from quantizer import Quantizer
from quantizer.export.exporter import export_onnx
from quantizer.export.passes import ConcatsBeforeQuantize, OddPairsAsBytes, PlainSoftplus, UnfusedRectifiers
from quantizer.export.passes.base import DropUnreadNodes, NameNodes, run_passes
from quantizer.export.passes.float_types import ClampMasks
from quantizer.export.passes.folding import FoldBatchNorm, FoldChannelFactors
from quantizer.export.passes.quantizers import LayoutBeforeQuantize, ScaleBeforeQuantize, ShareQuantizers
from quantizer.export.passes.weights import UnspreadWeights

onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
ir = pytest.importorskip("onnx_ir", reason="exporting needs enginequant[onnx]")

pytestmark = pytest.mark.usefixtures("exact_byte_products")


def unchanged(model: Any, entry: Any) -> bool:
    """The pass finds nothing to do, and that is what it promises."""
    before = operators(model)
    run_passes(model, [entry])
    return operators(model) == before and entry.run(model) == 0


def single(*values: float) -> np.ndarray:
    return np.array(values, np.float32) if len(values) > 1 else np.array(values[0], np.float32)


# -- batch norms -----------------------------------------------------------------------------------------------------

GAIN = single(2.0, -0.5, 0.0, 1.5)
NORM = "n = BatchNormalization <epsilon = 0.01> (c, g, h, m, v) y = Relu (n)"
STATISTICS = {"h": single(0.1, 0.2, -3.0, 0.0), "m": single(1.0, -2.0, 0.5, 0.0), "v": single(0.5, 2.0, 1.0, 4.0)}
IMAGE = np.random.default_rng(0).normal(size=(2, 2, 5, 5)).astype(np.float32)


def convolved(
    *,
    nodes: str = "c = Conv (x, w, b)",
    shape: tuple[int, ...] = (4, 2, 3, 3),
    axis: int = 0,
    scale: np.ndarray | None = None,
    gain: np.ndarray = GAIN,
    low: int = -127,
    outputs: str = "float[N,C,H,W] y",
) -> Any:
    """A convolution with a stored weight, and a batch norm of its four channels."""
    steps = np.random.default_rng(1).integers(low, 128, shape).astype(np.int8)
    steps.flat[0] = low
    scale = single(0.1, 0.2, 0.3, 0.4) if scale is None else scale
    where = f"<axis = {axis}>" if scale.ndim else ""
    text = f"w = DequantizeLinear {where} (q, t) {nodes} {NORM}"
    constants = {"q": steps, "t": scale, "b": single(0.5, -0.5, 1.0, 0.0), "g": gain, **STATISTICS}
    return graph("float[2,2,5,5] x", outputs, text, **constants)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nodes": "c = Conv (x, w)"},
        {"scale": single(0.1)},
        {"nodes": "c = Conv <group = 2> (x, w, b)", "shape": (4, 1, 3, 3)},
        {"nodes": "c = ConvTranspose (x, w, b)", "shape": (2, 4, 3, 3), "axis": 1},
        {"nodes": "c = ConvTranspose (x, w, b)", "shape": (2, 4, 3, 3), "scale": single(0.1)},
        {"low": -128, "gain": np.abs(GAIN)},
    ],
    ids=["bias", "no bias", "one scale", "groups", "transposed", "transposed, one scale", "-128, no change of sign"],
)
def test_a_batch_norm_behind_a_convolution_is_folded(options: dict[str, Any]) -> None:
    model = convolved(**options)
    (expected,) = computed(model, x=IMAGE)
    assert FoldBatchNorm().run(model) == 1
    assert FoldBatchNorm().ensures(model) is None
    assert "BatchNormalization" not in operators(model)
    assert {"q", "t", "g", "h", "m", "v"}.isdisjoint(model.graph.initializers)
    stored = next(node for node in model.graph if node.op_type == "DequantizeLinear")
    assert stored.inputs[0].const_value.numpy().dtype == np.int8
    assert (stored.inputs[1].const_value.numpy() > 0).all()
    (given,) = computed(model, x=IMAGE)
    np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


_CALLS = {
    "one norm": ("", "g"),
    "a norm for each call": ("", "p"),
    "other signs": ("", "k"),
    "no norm": ("e = Identity (d)", None),
}


@pytest.mark.parametrize(("between", "gain"), _CALLS.values(), ids=list(_CALLS))
def test_a_convolution_that_is_called_twice_takes_a_batch_norm_for_each_call(between: str, gain: str | None) -> None:
    norm = between if gain is None else f"e = BatchNormalization <epsilon = 0.01> (d, {gain}, h, m, v)"
    text = f"w = DequantizeLinear <axis = 0> (q, t) c = Conv (x, w, b) {NORM} d = Conv (x, w, b) {norm} z = Relu (e)"
    codes = np.random.default_rng(1).integers(-127, 128, (4, 2, 3, 3)).astype(np.int8)
    gains = {"g": GAIN, "p": GAIN * 3, "k": -GAIN}
    model = graph(
        "float[2,2,5,5] x",
        "float[N,C,H,W] y, float[N,C,H,W] z",
        text,
        q=codes,
        t=single(0.1, 0.2, 0.3, 0.4),
        b=single(0.5, -0.5, 1.0, 0.0),
        **{name: values for name, values in gains.items() if name in ("g", gain)},
        **STATISTICS,
    )
    expected = computed(model, x=IMAGE)
    run_passes(model, [FoldBatchNorm()])
    assert "BatchNormalization" not in operators(model)
    for given, wanted in zip(computed(model, x=IMAGE), expected, strict=True):
        np.testing.assert_allclose(given, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    stored = {node.inputs[0].name for node in model.graph if node.op_type == "DequantizeLinear"}
    assert len(stored) == (1 if gain in ("g", "p") else 2)


@pytest.mark.parametrize(
    "options",
    [
        {"low": -128, "gain": -np.abs(GAIN)},
        {"nodes": "c = ConvTranspose <group = 2> (x, w, b)", "shape": (2, 2, 3, 3), "scale": single(0.1)},
        {"nodes": "r = Relu (x) c = Conv (r, w, b) o = Relu (c)", "outputs": "float[N,C,H,W] y, float[N,C,H,W] o"},
        {"nodes": "i = Conv (x, w, b) c = Relu (i)"},
        {"gain": single(1e-38, 1.0, 1.0, 1.0)},
        {"nodes": "f = Cast <to = 1> (q) c = Conv (x, f, b)"},
        {"nodes": "f = Neg (b) c = Conv (x, w, f)"},
        {"nodes": "f = Neg (x) c = Identity (f)"},
    ],
    ids=[
        "-128 changes its sign",
        "transposed with groups",
        "another reader",
        "something between",
        "subnormal scale",
        "float weight",
        "computed bias",
        "no convolution",
    ],
)
def test_a_batch_norm_that_stays(options: dict[str, Any]) -> None:
    assert unchanged(convolved(**options), FoldBatchNorm())


def pictures() -> nn.Module:
    """A transposed convolution with a batch norm, behind a network of convolutions."""
    return net(
        "self.net(self.down(torch.relu(self.norm(self.up(x)))))",
        up=nn.ConvTranspose2d(3, 16, 3, padding=1),
        norm=nn.BatchNorm2d(16),
        down=nn.Conv2d(16, 3, 3, padding=1),
        net=ConvNet(),
    )


def test_a_float_product_with_a_batch_norm_in_it_is_named_after_its_own_module(tmp_path: Path) -> None:
    path = export_onnx(pictures().eval(), tmp_path / "m.onnx", torch.randn(4, 3, 16, 16), opset=20, dtype=torch.float32)
    found = [node.name for node in onnx.load(path).graph.node if "Conv" in node.op_type]
    assert found[:2] == ["up/ConvTranspose", "down/Conv"]
    assert not [name for name in found if "norm" in name]


def test_a_file_has_no_batch_norm_and_computes_what_the_proxy_computes(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="running ONNX needs enginequant[onnxruntime]")
    torch.manual_seed(0)
    model = pictures().eval()
    with torch.no_grad():
        for norm in (model.norm, model.net.norm):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            norm.weight.normal_()
    data = [torch.randn(4, 3, 16, 16) for _ in range(3)]
    quantizer = Quantizer(preset="plain", backend="openvino")
    quantizer.calibrate(model, data[:2])
    frozen = quantizer.quantize(model)
    path = quantizer.export(frozen, tmp_path / "m.onnx", data[0])
    nodes = onnx.load(path).graph.node
    counts = Counter(node.op_type for node in nodes)
    assert (counts["Conv"], counts["ConvTranspose"], counts["BatchNormalization"]) == (3, 1, 0)
    makers = {name: node for node in nodes for name in node.output}
    assert all(makers[node.input[1]].op_type == "DequantizeLinear" for node in nodes if node.op_type == "Conv")
    # OpenVINO has no integer kernel for the transposed one.
    assert all(node.input[1] not in makers for node in nodes if node.op_type == "ConvTranspose")
    with torch.no_grad():
        expected = frozen(data[2]).numpy()
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = session.run(None, {session.get_inputs()[0].name: data[2].numpy()})[0]
    assert np.square(expected - given).sum() < 1e-4 * np.square(expected).sum()


# -- the scale of attention --------------------------------------------------------------------------------------------

QK = (
    "qs = QuantizeLinear (x, s, z) q = DequantizeLinear (qs, s) "
    "ks = QuantizeLinear (k, s, z) d = DequantizeLinear (ks, s) "
)
SCORES = QK + "p = MatMul (q, d) "
SCALES = {"s": single(0.02), "z": np.array(0, np.int8), "c": single(0.35355338)}
X, K = (np.random.default_rng(n).normal(size=(3, 4)).astype(np.float32) for n in (0, 1))


def attended(nodes: str, outputs: str = "float[3,3] y", **constants: np.ndarray) -> Any:
    return graph("float[3,4] x, float[4,3] k, float[3,3] u", outputs, nodes, **{**SCALES, **constants})


def run_attended(model: Any) -> np.ndarray:
    inputs = {"x": X, "k": K.reshape(4, 3), "u": np.ones((3, 3), np.float32)}
    result: np.ndarray = computed(model, **inputs)[0]
    return result


@pytest.mark.parametrize(
    "nodes",
    [
        SCORES + "m = Mul (p, c) y = Relu (m)",
        SCORES + "m = Mul (c, p) y = Relu (m)",
        SCORES + "m = Div (p, c) y = Relu (m)",
        # Another reader of the query: the key takes the factor.
        SCORES.replace("q = Deq", "o = DequantizeLinear (qs, s) q = Deq") + "m = Mul (p, c) y = Relu (m)",
    ],
    ids=["Mul", "the other way round", "Div", "on the key"],
)
def test_the_scale_of_scores_stands_before_a_quantizer(nodes: str) -> None:
    outputs = "float[3,3] y, float[3,4] o" if " o = " in nodes else "float[3,3] y"
    model = attended(nodes, outputs)
    expected = run_attended(model)
    run_passes(model, [ScaleBeforeQuantize()])
    product = next(node for node in model.graph if node.op_type == "MatMul")
    assert [reader.op_type for reader, _ in product.outputs[0].uses()] == ["Relu"]
    moved = next(node for node in model.graph if node.op_type == "Mul")
    assert [reader.op_type for reader, _ in moved.outputs[0].uses()] == ["QuantizeLinear"]
    # The steps are those that they were, so what is left is the rounding of float32.
    np.testing.assert_allclose(run_attended(model), expected, rtol=1e-6)


def test_a_factor_moves_on_through_the_product_that_made_the_operand() -> None:
    # As in baddbmm(b, k, x @ k, alpha=c), where k has two readers, so that only the other product can take the factor.
    nodes = QK + (
        "e = MatMul (q, d) es = QuantizeLinear (e, s, z) f = DequantizeLinear (es, s) "
        "p = MatMul (d, f) m = Mul (p, c) y = Relu (m)"
    )
    model = attended(nodes, "float[4,3] y")
    expected = run_attended(model)
    run_passes(model, [ScaleBeforeQuantize()])
    assert operators(model)[0] == "Mul"
    np.testing.assert_allclose(run_attended(model), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("nodes", "outputs", "constants"),
    [
        (SCORES + "m = Mul (p, u) y = Relu (m)", "float[3,3] y", {}),
        (SCORES + "m = Mul (p, c) y = Relu (m)", "float[3,3] y, float[3,3] p", {}),
        (SCORES + "m = Div (c, p) y = Relu (m)", "float[3,3] y", {}),
        (SCORES + "m = Mul (p, c) y = Relu (m)", "float[3,3] y", {"c": single(-0.5)}),
        (SCORES + "m = Mul (p, c) y = Relu (m)", "float[3,3] y", {"c": single(1e-37)}),
        ("p = MatMul (x, k) m = Mul (p, c) y = Relu (m)", "float[3,3] y", {}),
    ],
    ids=["no constant", "the scores are read", "its reciprocal", "negative", "subnormal scale", "float"],
)
def test_a_scale_that_stays(nodes: str, outputs: str, constants: dict[str, np.ndarray]) -> None:
    assert unchanged(attended(nodes, outputs, **constants), ScaleBeforeQuantize())


@pytest.mark.parametrize("operator", ["Mul", "Div"])
def test_a_factor_with_more_axes_than_the_scores_stays(operator: str) -> None:
    nodes = SCORES + f"m = {operator} (p, c) y = Relu (m)"
    wide = attended(nodes, "float[1,3,3] y", c=np.full((1, 1, 1), 0.25, np.float32))
    assert unchanged(wide, ScaleBeforeQuantize())
    assert run_attended(wide).shape == (1, 3, 3)
    # With as many axes it changes nothing of the shape.
    as_wide = attended(nodes, "float[3,3] y", c=np.full((1, 1), 0.25, np.float32))
    expected = run_attended(as_wide)
    assert not unchanged(as_wide, ScaleBeforeQuantize())
    np.testing.assert_allclose(run_attended(as_wide), expected, rtol=1e-6)


def test_the_scale_becomes_part_of_the_projection() -> None:
    nodes = (
        "w = DequantizeLinear <axis = 1> (q0, t) l = MatMul (x0, w) b = Add (l, b0) r = Reshape (b, shape) "
        "x = Transpose <perm = [0, 1]> (r) " + SCORES + "m = Mul (p, c) y = Relu (m)"
    )
    weight = np.random.default_rng(2).integers(-127, 128, (5, 4)).astype(np.int8)
    constants = {"q0": weight, "t": single(0.01, 0.02, 0.01, 0.03), "b0": single(1.0, -1.0, 0.5, 0.0)}
    shape = {"shape": np.array([3, 4])}
    model = graph("float[3,5] x0, float[4,3] k", "float[3,3] y", nodes, **SCALES, **constants, **shape)
    inputs = {"x0": np.random.default_rng(3).normal(size=(3, 5)).astype(np.float32), "k": K.reshape(4, 3)}
    expected = computed(model, **inputs)[0]
    run_passes(model, [ScaleBeforeQuantize(), FoldChannelFactors()])
    assert "Mul" not in operators(model)
    np.testing.assert_allclose(computed(model, **inputs)[0], expected, rtol=1e-5)


# -- layout ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    ["t = Transpose <perm = [1, 0]> (q)", "i = Identity (q) t = Reshape (i, shape)", "t = Reshape (q, shape)"],
)
def test_layout_stands_before_the_quantizer(layout: str) -> None:
    nodes = f"qs = QuantizeLinear (x, s, z) q = DequantizeLinear (qs, s) {layout} y = MatMul (t, u)"
    constants = {**SCALES, "shape": np.array([4, 3])}
    model = graph("float[3,4] x, float[3,3] u", "float[4,3] y", nodes, **constants)
    inputs = {"x": X, "u": np.eye(3, dtype=np.float32)}
    expected = computed(model, **inputs)[0]
    run_passes(model, [LayoutBeforeQuantize()])
    assert operators(model)[-3:] == ["QuantizeLinear", "DequantizeLinear", "MatMul"]
    assert np.array_equal(computed(model, **inputs)[0], expected)


def test_a_cast_stands_before_the_quantizer_and_the_scale_has_its_type() -> None:
    nodes = "qs = QuantizeLinear (x, s, z) q = DequantizeLinear (qs, s) t = Cast <to = 1> (q) y = MatMul (t, u)"
    constants = {"s": np.array(0.02, np.float16), "z": np.array(0, np.int8)}
    model = graph("float16[3,4] x, float[4,3] u", "float[3,3] y", nodes, **constants)
    inputs = {"x": X.astype(np.float16), "u": K.reshape(4, 3)}
    expected = computed(model, **inputs)[0]
    run_passes(model, [LayoutBeforeQuantize()])
    assert operators(model) == ["Cast", "QuantizeLinear", "DequantizeLinear", "MatMul"]
    assert next(node for node in model.graph if node.op_type == "QuantizeLinear").inputs[1].dtype == ir.DataType.FLOAT
    np.testing.assert_allclose(computed(model, **inputs)[0], expected, rtol=2e-3)


@pytest.mark.parametrize(
    ("nodes", "step"),
    [
        ("qs = QuantizeLinear <axis = 1> (x, s, z) q = DequantizeLinear <axis = 1> (qs, s) ", single(1, 2, 3, 4)),
        ("qs = QuantizeLinear (x, s, z) q = DequantizeLinear (qs, s) o = Relu (q) ", single(0.1)),
    ],
    ids=["a scale a channel", "another reader"],
)
def test_layout_that_stays(nodes: str, step: np.ndarray) -> None:
    outputs = "float[4,3] y, float[3,4] o" if " o = " in nodes else "float[4,3] y"
    constants = {"s": step, "z": np.zeros(step.shape, np.int8)}
    model = graph("float[3,4] x", outputs, nodes + "y = Transpose <perm = [1, 0]> (q)", **constants)
    assert unchanged(model, LayoutBeforeQuantize())
    model = graph("float[3,4] x", outputs, nodes + "t = Transpose <perm = [1, 0]> (q) y = Relu (t)", **constants)
    assert unchanged(model, LayoutBeforeQuantize())


# -- one quantizer a tensor --------------------------------------------------------------------------------------------

TWICE = (
    "a = QuantizeLinear (x, s, z) b = DequantizeLinear (a, s) c = QuantizeLinear (x, s2, z2) "
    "d = DequantizeLinear (c, s2) y = Add (b, d)"
)
STEP, ZERO = {"s": single(0.02)}, {"z": np.array(0, np.int8)}


def test_readers_of_one_tensor_share_its_quantizer() -> None:
    model = graph("float[3,4] x", "float[3,4] y", TWICE, **STEP, **ZERO, s2=single(0.02), z2=np.array(0, np.int8))
    expected = computed(model, x=X)[0]
    run_passes(model, [ShareQuantizers()])
    assert operators(model) == ["QuantizeLinear", "DequantizeLinear", "Add"]
    assert list(model.graph.initializers) == ["s", "z"]
    assert np.array_equal(computed(model, x=X)[0], expected)


@pytest.mark.parametrize(
    ("step", "zero"), [(single(0.03), np.array(0, np.int8)), (single(0.02), np.array(0, np.uint8))]
)
def test_quantizers_that_differ_stay_two(step: np.ndarray, zero: np.ndarray) -> None:
    nodes = TWICE.replace("DequantizeLinear (c, s2)", "DequantizeLinear (c, s2, z2)")
    assert unchanged(graph("float[3,4] x", "float[3,4] y", nodes, **STEP, **ZERO, s2=step, z2=zero), ShareQuantizers())


# -- masks and bounds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("added", [False, True], ids=["a bound", "a bound that is also a mask"])
def test_a_bound_is_no_mask(added: bool) -> None:
    nodes = f"c = Clip (x, low) a = Add (x, {'low' if added else 'x'}) p = Softmax (a) y = Concat <axis = 0> (c, p)"
    model = graph("float16[3] x", "float16[6] y", nodes, low=np.array(-40000, np.float16))
    run_passes(model, [ClampMasks()])
    held = sorted(float(value.const_value.numpy()) for value in model.graph.initializers.values())
    assert held == ([-40000, -30000] if added else [-40000])
    x = np.array([-32000, -31000, 1], np.float16)
    np.testing.assert_array_equal(computed(model, x=x)[0][:3], x)


def _low_numbers(nodes: str, low: float = -np.inf, **tensors: np.ndarray) -> list[float]:
    """The numbers below 0 that a graph of x [3, 3] and a condition holds after the pass."""
    model = graph("float16[3,3] x, bool[3,3] c", "float16[3,3] y", nodes, low=np.array(low, np.float16), **tensors)
    run_passes(model, [ClampMasks()])
    held = [value.const_value.numpy() for value in model.graph.initializers.values()]
    return sorted({float(number) for array in held for number in array.ravel() if number < 0})


@pytest.mark.parametrize(
    "nodes",
    [
        "y = Mul (x, low)",
        "y = Div (x, low)",
        "y = Where (c, x, low)",
        "e = Equal (x, low) y = Where (e, zero, x)",
        "y = Add (x, low)",
        "f = Mul (x, low) y = Softmax (f)",
        "s = Where (c, x, low) y = LogSoftmax (s)",
        "s = Where (c, x, low) p = Softmax (s) e = Equal (s, low) y = Where (e, zero, p)",
        "s = Where (c, x, low) p = Softmax (s) r = Relu (s) y = Add (p, r)",
        "i = Cast <to = 7> (low) j = Cast <to = 10> (i) a = Add (x, j) y = Softmax (a)",
    ],
)
def test_low_numbers_that_are_no_masks_stay(nodes: str) -> None:
    assert _low_numbers(nodes, -40000.0, zero=np.array(0, np.float16)) == [-40000]


@pytest.mark.parametrize(
    "nodes",
    [
        "s = Where (c, x, low) y = Softmax (s)",
        "m = Where (c, zero, low) a = Add (x, m) y = Softmax (a)",
        "k = Cast <to = 10> (c) m = Mul (k, low) a = Add (m, x) y = Softmax (a)",
        "l = Expand (low, size) t = Trilu (l) a = Add (x, t) y = Softmax (a)",
        "s = Where (c, x, low) w = Cast <to = 1> (s) p = Softmax (w) y = Cast <to = 10> (p)",
        "s = Where (c, x, low) b = Max (s, zero) y = Softmax (b)",
        "m = Where (c, zero, low) a = Add (x, m) p = Softmax (a) b = Add (p, m) y = Softmax (b)",
    ],
)
def test_low_numbers_that_a_softmax_alone_sees_are_raised(nodes: str) -> None:
    assert _low_numbers(nodes, zero=np.array(0, np.float16), size=np.array([3, 3])) == [-30000]


def test_a_number_that_is_a_mask_in_one_place_and_a_factor_in_another() -> None:
    nodes = "s = Where (c, x, low) p = Softmax (s) f = Mul (x, low) y = Add (p, f)"
    assert _low_numbers(nodes, -40000.0) == [-40000, -30000]


def test_a_mask_of_several_numbers() -> None:
    mask = np.array([[0, -65504, -np.inf], [0, 0, -65504], [0, 0, 0]], np.float16)
    model = graph("float16[3,3] x", "float16[3,3] y", "a = Add (x, mask) y = Softmax (a)", mask=mask)
    run_passes(model, [ClampMasks()])
    held = model.graph.initializers["mask"].const_value.numpy()
    np.testing.assert_array_equal(held, np.where(mask < 0, np.float16(-30000), mask))
    assert unchanged(graph("float16[3,3] x", "float16[3,3] y", "y = Add (x, mask)", mask=mask), ClampMasks())
    weights = graph("float16[3,3] x", "float16[3,3] y", "y = MatMul (x, mask)", mask=mask)
    assert unchanged(weights, ClampMasks())
    np.testing.assert_array_equal(weights.graph.initializers["mask"].const_value.numpy(), mask)


# -- joins that a Q with a zero point rounds ---------------------------------------------------------------------------

_PAIR = "q = QuantizeLinear (c, s, z) d = DequantizeLinear (q, s, z)"
TOKEN = {"token": np.ones((1, 1, 4), np.float32), "w": np.eye(4, dtype=np.float32), "n": np.array([2, 1, 4])}
TOKEN["wide"] = np.ones((8, 4), np.float32)


def joined(nodes: str, axis: int = 1, last: str = "y = MatMul (d, w)", zero: int = 7) -> Any:
    text = f"{nodes} c = Concat <axis = {axis}> (t, x) {_PAIR} {last}"
    point = {"z": np.array(zero, np.uint8)}
    return graph("float[2,3,4] x", "float[A,B,C] y", text, **TOKEN, **STEP, **point)


@pytest.mark.parametrize("nodes", ["t = Expand (token, n)", "e = Expand (token, n) t = Identity (e)", "t = Relu (x)"])
def test_a_join_is_rounded_as_a_whole(nodes: str) -> None:
    model, x = joined(nodes), np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    (expected,) = computed(model, x=x)
    run_passes(model, [ConcatsBeforeQuantize()])
    names = operators(model)
    assert names[names.index("Concat") :] == ["Concat", "Max", "QuantizeLinear", "DequantizeLinear", "MatMul"]
    (given,) = computed(model, x=x)
    assert np.array_equal(given, expected)


@pytest.mark.parametrize(
    "model",
    [
        joined("t = Expand (token, n)", zero=0),
        joined("t = Relu (x)", axis=2, last="y = MatMul (d, wide)"),
        joined("t = Expand (token, n)", last="y = Relu (d)"),
    ],
    ids=["no zero point", "along the channels", "no product"],
)
def test_a_join_that_stays(model: Any) -> None:
    assert unchanged(model, ConcatsBeforeQuantize())


# -- weights of 4 bits with an odd number of inputs --------------------------------------------------------------------

_FOUR_BITS = {
    "a MatMul": ((5, 4), "y = MatMul (x, d)"),
    "a Gemm": ((5, 4), "y = Gemm (x, d)"),
    "a turned Gemm": ((4, 5), "y = Gemm <transB = 1> (x, d)"),
    "behind a Transpose": ((4, 5), "t = Transpose <perm = [1, 0]> (d) y = MatMul (x, t)"),
}


def four_bits(inputs: int, shape: tuple[int, ...], product: str) -> Any:
    """A product [3, inputs] with a weight of INT4."""
    array = (np.arange(int(np.prod(shape))).reshape(shape) % 15 - 7).astype(ir.DataType.INT4.numpy())
    zero = np.zeros((), ir.DataType.INT4.numpy())
    nodes = f"d = DequantizeLinear (w, s, z) {product}"
    return graph(f"float[3,{inputs}] x", "float[3,M] y", nodes, s=single(0.5), w=array, z=zero)


@pytest.mark.parametrize(("shape", "product"), _FOUR_BITS.values(), ids=_FOUR_BITS)
def test_a_weight_of_4_bits_with_an_odd_number_of_inputs_is_stored_in_bytes(shape: Any, product: str) -> None:
    model, x = four_bits(5, shape, product), np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    (expected,) = computed(model, x=x)
    run_passes(model, [OddPairsAsBytes()])
    (codes,) = (node.inputs[0] for node in model.graph if node.op_type == "DequantizeLinear")
    assert codes.dtype is ir.DataType.INT8
    assert not {"w", "z"}.intersection(model.graph.initializers)
    (given,) = computed(model, x=x)
    assert np.array_equal(given, expected)
    even = tuple(6 if size == 5 else 5 for size in shape)
    assert unchanged(four_bits(6, even, product), OddPairsAsBytes())


# -- rectifiers behind a product ---------------------------------------------------------------------------------------

_RECTIFIERS = {
    "Relu": ("r = Relu (p)", ["MatMul", "Max"]),
    "Clip": ("r = Clip (p, low, high)", ["MatMul", "Max", "Clip"]),
    "Clip from above": ("r = Clip (p, , high)", ["MatMul", "Max", "Clip"]),
}


def rectified(rectifier: str, zero: int, product: str = "p = MatMul (d, v)", last: str = "y = Identity (e)") -> Any:
    """A product of two DQ, a rectifier, and a Q/DQ pair with a zero point."""
    nodes = f"""q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) v = DequantizeLinear (w, s)
        {product} {rectifier} k = QuantizeLinear (r, s, o) e = DequantizeLinear (k, s, o) {last}"""
    constants = {"s": single(0.05), "z": np.array(128, np.uint8), "o": np.array(zero, np.uint8)}
    weight = (np.arange(16).reshape(4, 4) % 7 - 3).astype(np.int8)
    limits = {"low": single(-0.1), "high": single(0.2)}
    return graph("float[3,4] x", "float[3,4] y", nodes, w=weight, **constants, **limits)


@pytest.mark.parametrize(("rectifier", "expected"), _RECTIFIERS.values(), ids=_RECTIFIERS)
def test_a_rectifier_behind_a_product_is_kept_apart(rectifier: str, expected: list[str]) -> None:
    model, x = rectified(rectifier, 128), np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    (before,) = computed(model, x=x)
    run_passes(model, [UnfusedRectifiers()])
    assert [name for name in operators(model) if name in ("MatMul", "Max", "Clip", "Relu")] == expected
    (given,) = computed(model, x=x)
    assert np.array_equal(given, before)


@pytest.mark.parametrize(
    "model",
    [
        rectified("r = Relu (p)", 0),
        rectified("r = Relu (p)", 128, product="m = MatMul (d, v) p = Add (m, s)"),
        rectified("r = Relu (p)", 128, last="y = Add (e, p)"),
        rectified("r = Sigmoid (p)", 128),
    ],
    ids=["a Q that rectifies", "a bias", "another reader", "no rectifier"],
)
def test_a_rectifier_that_stays(model: Any) -> None:
    assert unchanged(model, UnfusedRectifiers())


# -- large values of a softplus ----------------------------------------------------------------------------------------

_CHOSEN = "g = Greater (x, t) s = Softplus (x) w = Where (g, x, s) y = Tanh (w)"


def test_a_softplus_computes_large_values_itself() -> None:
    model = graph("float[3,4] x", "float[3,4] y", _CHOSEN, t=single(20.0))
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32) * 30
    (before,) = computed(model, x=x)
    run_passes(model, [PlainSoftplus()])
    assert operators(model) == ["Softplus", "Tanh"]
    assert not model.graph.initializers
    assert np.array_equal(computed(model, x=x)[0], before)


@pytest.mark.parametrize(
    ("nodes", "threshold"),
    [
        (_CHOSEN, 5.0),
        (_CHOSEN.replace("(g, x, s)", "(g, s, x)"), 20.0),
        (_CHOSEN.replace("w = W", "y = W")[:-13], 20.0),
    ],
    ids=["a low threshold", "the other way", "an output"],
)
def test_a_softplus_with_other_choices_stays(nodes: str, threshold: float) -> None:
    assert unchanged(graph("float[3,4] x", "float[3,4] y", nodes, t=single(threshold)), PlainSoftplus())


# -- what nobody reads -------------------------------------------------------------------------------------------------


def test_pairs_that_nobody_reads_go_with_their_constants() -> None:
    nodes = "y = Relu (x) a = QuantizeLinear (y, s, z) b = DequantizeLinear (a, s)"
    model = graph("float[3,4] x", "float[3,4] y", nodes, **STEP, **ZERO, left=single(1.0))
    run_passes(model, [DropUnreadNodes()])
    assert operators(model) == ["Relu"]
    assert not model.graph.initializers
    assert [value.name for value in model.graph.inputs] == ["x"]


def test_what_is_read_or_given_back_stays() -> None:
    nodes = "a = QuantizeLinear (x, s, z) y = DequantizeLinear (a, s)"
    assert unchanged(graph("float[3,4] x", "float[3,4] y", nodes, **STEP, **ZERO), DropUnreadNodes())


# -- promises ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "model"),
    [
        (FoldBatchNorm(), convolved()),
        (ScaleBeforeQuantize(), attended(SCORES + "m = Mul (p, c) y = Relu (m)")),
        (LayoutBeforeQuantize(), attended(QK + "t = Transpose (q) y = MatMul (u, t)", "float[3,N] y")),
        (ShareQuantizers(), attended(QK.replace("(k,", "(x,") + "y = Add (q, d)", "float[3,4] y")),
        (DropUnreadNodes(), attended(SCORES + "y = Relu (u)")),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "ensures") else "",
)
def test_each_pass_says_what_it_would_have_to_do(entry: Any, model: Any) -> None:
    assert entry.ensures(model) is not None
    run_passes(model, [entry])
    assert entry.ensures(model) is None


# -- names of tensors --------------------------------------------------------------------------------------------------


def test_results_and_unnamed_constants_are_called_after_nodes() -> None:
    nodes = "val_1 = Add (x, val_0) a, b = Split <num_outputs = 2> (val_1) y = Add (a, b)"
    model = graph("float[2,4] x", "float[1,4] y", nodes, val_0=single(1.0))
    parameter = ir.Value(name="scale", const_value=ir.tensor(single(2.0), name="scale"))
    parameter.metadata_props["pkg.torch.export.graph_signature.InputSpec.kind"] = "PARAMETER"
    model.graph.register_initializer(parameter)
    for node, scope in zip(model.graph, ("layer.site_forward_add_0", "layer", "head"), strict=True):
        node.metadata_props["pkg.torch.onnx.name_scopes"] = f"['', '{scope}', 'x']"
    run_passes(model, [NameNodes()])
    first, second, third = model.graph
    assert [value.name for value in first.inputs] == ["x", "layer.site_forward_add_0/Add.input_1"]
    assert first.outputs[0].name == "layer.site_forward_add_0/Add"
    assert [value.name for value in second.outputs] == ["layer/Split", "layer/Split:1"]
    assert third.outputs[0].name == "y"
    assert "scale" in model.graph.initializers


# -- attention ---------------------------------------------------------------------------------------------------------


def test_no_site_of_torchs_attention_is_lost(tmp_path: Path) -> None:
    # Under torch.export its function calls itself by its name, which once led to the original, without any site.
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(d_model=32, nhead=2, dim_feedforward=64, batch_first=True).eval()
    data = {"src": torch.randn(4, 32, 32)}
    quantizer = Quantizer(preset="plain", backend="openvino", sites={"residual_add": False})
    quantizer.calibrate(layer, [data])
    path = quantizer.export(quantizer.quantize(layer), tmp_path / "m.onnx", data)
    nodes = onnx.load(path).graph.node
    makers = {name: node.op_type for node in nodes for name in node.output}
    products = [node for node in nodes if node.op_type in ("MatMul", "Gemm")]
    # Both products of the attention belong to one site.
    assert sum(row.quantized for row in quantizer.coverage) == 5
    assert len(products) == 6
    assert {makers[name] for node in products for name in node.input[:2]} == {"DequantizeLinear"}
    # Nothing is left between the two products of the attention but the softmax.
    (softmax,) = [node for node in nodes if node.op_type == "Softmax"]
    assert makers[softmax.input[0]] == "MatMul"


def spread_weight(weight: tuple[int, ...], lead: Any) -> Any:
    """A MatMul of x [lead, 3, 4] by a stored weight that an Expand spreads to [lead, 4, 6]."""
    nodes = "d = DequantizeLinear (w, s) e = Expand (d, sizes) y = MatMul (x, e)"
    codes = np.arange(np.prod(weight), dtype=np.int8).reshape(weight)
    model = graph("float[b, 3, 4] x, int64[3] sizes", "float[b, 3, 6] y", nodes, w=codes, s=np.float32(0.5))
    (spread,) = (node.outputs[0] for node in model.graph if node.op_type == "Expand")
    spread.shape, model.graph.inputs[0].shape = ir.Shape([lead, 4, 6]), ir.Shape([lead, 3, 4])
    return model


def test_a_weight_that_is_spread_over_the_batch_is_read_itself() -> None:
    model, x = spread_weight((1, 4, 6), "b"), np.ones((2, 3, 4), np.float32)
    (expected,) = computed(model, x=x, sizes=np.array([2, 4, 6]))
    run_passes(model, [UnspreadWeights()])
    assert operators(model) == ["DequantizeLinear", "MatMul"]
    assert np.array_equal(computed(model, x=x, sizes=np.array([2, 4, 6]))[0], expected)


@pytest.mark.parametrize(
    ("weight", "lead"), [((1, 4, 6), None), ((1, 1, 6), "b"), ((1, 4, 1), "b")], ids=["size unknown", "rows", "columns"]
)
def test_a_weight_that_may_be_spread_otherwise_stays(weight: tuple[int, ...], lead: Any) -> None:
    assert unchanged(spread_weight(weight, lead), UnspreadWeights())
