"""Biases that become part of the products of an ONNX Runtime engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantizer.engines import BuildOptions, build_engine, load_engine

onnx = pytest.importorskip("onnx", reason="needs enginequant[onnx]")
pytest.importorskip("onnxruntime", reason="needs enginequant[onnxruntime]")

# Seven bits: without VNNI a CPU adds two products of bytes in 16 bits.
WEIGHT = np.random.default_rng(0).integers(-64, 65, (8, 6)).astype(np.int8)
PRODUCT = "q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) w = DequantizeLinear <axis = 1> (v, t, o) "


def built(nodes: str, folder: Path, outputs: str = "float[N,6] y", **constants: Any) -> tuple[list[str], Any]:
    """The operators of an engine, and the engine."""
    constants = {
        "s": np.array(0.05, np.float32),
        "z": np.array(128, np.uint8),
        "v": WEIGHT,
        "t": np.full(6, 0.01, np.float32),
        "o": np.zeros(6, np.int8),
        **constants,
    }
    text = f'<ir_version: 10, opset_import: ["" : 20]> g (float[N,8] x) => ({outputs}) {{ {PRODUCT}{nodes} }}'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in constants.items())
    onnx.save(model, folder / "model.onnx")
    path = build_engine("onnxruntime", folder / "model.onnx", folder / "model.engine", BuildOptions()).path
    return [node.op_type for node in onnx.load(path).graph.node], load_engine("onnxruntime", path)


BIAS = np.arange(6, dtype=np.float32)
X = np.random.default_rng(1).normal(size=(3, 8)).astype(np.float32)


def product() -> np.ndarray[Any, Any]:
    steps = np.clip(np.rint(X / np.float32(0.05)), -128, 127)
    return np.asarray(steps @ WEIGHT.astype(np.float64) * 0.05 * 0.01)


@pytest.mark.parametrize("nodes", ["p = MatMul (d, w) y = Add (p, b)", "p = MatMul (d, w) y = Add (b, p)"])
def test_a_bias_becomes_part_of_its_product(nodes: str, tmp_path: Path) -> None:
    operators, engine = built(nodes, tmp_path, b=BIAS)
    assert "MatMulIntegerToFloat" in operators
    assert "Add" not in operators
    np.testing.assert_allclose(engine({"x": X})["y"], product() + BIAS, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("nodes", "outputs", "bias"),
    [
        ("p = MatMul (d, w) y = Add (p, b)", "float[N,6] y", BIAS[:1]),
        ("p = MatMul (d, w) y = Add (p, b)", "float[3,6] y", np.stack([BIAS] * 3)),
        ("p = MatMul (d, w) y = Add (p, b)", "float[N,6] y, float[N,6] p", BIAS),
        ("p = MatMul (d, w) r = Add (p, b) y = Mul (r, p)", "float[N,6] y", BIAS),
    ],
    ids=["one number", "a matrix", "an output", "another reader"],
)
def test_what_is_no_bias_of_its_own_stays(nodes: str, outputs: str, bias: Any, tmp_path: Path) -> None:
    operators, engine = built(nodes, tmp_path, outputs, b=bias)
    assert {"Add", "MatMulIntegerToFloat"} <= set(operators)
    expected = product() + bias
    expected = expected * product() if " Mul " in nodes else expected
    np.testing.assert_allclose(engine({"x": X})["y"], expected, rtol=1e-5, atol=1e-5)


def test_a_number_added_to_a_product_of_two_activations_stays(tmp_path: Path) -> None:
    # Neither has a shape in the file, and () would pass for the shape of a bias.
    nodes = (
        "u = Transpose <perm = [1, 0]> (d) k = Neg (u) kq = QuantizeLinear (k, s, o0) "
        "kd = DequantizeLinear (kq, s, o0) p = MatMul (d, kd) y = Add (p, b)"
    )
    number = {"b": np.array(0.5, np.float32), "o0": np.array(0, np.int8)}
    _, engine = built(nodes, tmp_path, "float[N,N] y", **number)
    held = np.clip(np.rint(X / np.float32(0.05)), -128, 127) * 0.05
    np.testing.assert_allclose(engine({"x": X})["y"], held @ -held.T + 0.5, rtol=1e-4, atol=1e-4)


def test_what_is_added_to_a_stack_of_products_stays(tmp_path: Path) -> None:
    nodes = "g = DequantizeLinear (vs, t0, o0) p = MatMul (d, g) y = Add (p, b)"
    bias = np.arange(48, dtype=np.float32).reshape(8, 6)
    x = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)
    _, engine = built(
        nodes,
        tmp_path,
        "float[3,N,6] y",
        b=bias,
        vs=np.stack([WEIGHT] * 3),
        t0=np.array(0.01, np.float32),
        o0=np.array(0, np.int8),
    )
    steps = np.clip(np.rint(x / np.float32(0.05)), -128, 127)
    expected = steps @ WEIGHT.astype(np.float64) * 0.05 * 0.01 + bias
    np.testing.assert_allclose(engine({"x": x})["y"], np.stack([expected] * 3), rtol=1e-4, atol=1e-4)


def test_the_second_of_two_biases_stays(tmp_path: Path) -> None:
    nodes = "p = MatMul (d, w) r = Add (p, b) n = Neg (r) m = Neg (n) y = Add (m, b)"
    operators, engine = built(nodes, tmp_path, b=BIAS)
    assert operators.count("Add") == 1
    np.testing.assert_allclose(engine({"x": X})["y"], product() + 2 * BIAS, rtol=1e-5, atol=1e-5)
