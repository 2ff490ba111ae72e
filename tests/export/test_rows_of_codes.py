"""The pass that looks up rows of codes: what it changes, with the same values, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantizer.export.passes import QuantizedRows, run_passes

onnx = pytest.importorskip("onnx", reason="needs enginequant[onnx]")
ir = pytest.importorskip("onnx_ir", reason="needs enginequant[onnx]")
ort = pytest.importorskip("onnxruntime", reason="needs enginequant[onnxruntime]")

CODES = np.random.default_rng(0).integers(-127, 128, (50, 16)).astype(np.int8)
SCALES = np.random.default_rng(1).uniform(0.01, 0.1, 50).astype(np.float32)
IDS = np.array([[3, 0, 49], [7, 7, 20]])


def computed(model: bytes) -> np.ndarray:
    """What ONNX Runtime computes as it is written: its own fusions round a product's other operand."""
    settings = ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    (made,) = ort.InferenceSession(model, settings).run(None, {"ids": IDS})
    return made


def run(
    body: str, folder: Path, scales: np.ndarray = SCALES, codes: np.ndarray = CODES, **more: np.ndarray
) -> list[str]:
    """Pass a graph of ``ids``, and compare what it computes before and after; return its operators."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g (int64[n, m] ids) => (float[a, b, c] y) {{ {body} }}'
    )
    for name, array in {"codes": codes, "scales": scales, **more}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    before = computed(model.SerializeToString())
    graph = ir.from_proto(model)
    run_passes(graph, [QuantizedRows()])
    ir.save(graph, folder / "m.onnx")
    onnx.checker.check_model(folder / "m.onnx", full_check=True)
    np.testing.assert_array_equal(before, computed((folder / "m.onnx").read_bytes()))
    return [node.op_type for node in graph.graph]


DQ = "t = DequantizeLinear <axis = 0> (codes, scales) "


@pytest.mark.parametrize(
    ("body", "operators"),
    [
        (DQ + "y = Gather (t, ids)", ["Gather", "Cast", "Gather", "Mul"]),
        (
            "t = DequantizeLinear <axis = 0> (codes, scales, zero) y = Gather (t, ids)",
            ["Gather", "Cast", "Gather", "Mul"],
        ),
        (
            DQ + "a = Gather (t, ids) w = Transpose <perm = [1, 0]> (t) y = MatMul (a, w)",
            ["DequantizeLinear", "Gather", "Cast", "Gather", "Mul", "Transpose", "MatMul"],
        ),
        (
            DQ + "a = Gather (t, ids) b = Gather (t, ids) y = Add (a, b)",
            ["Gather", "Cast", "Gather", "Mul", "Gather", "Cast", "Gather", "Mul", "Add"],
        ),
    ],
    ids=["a table", "with zero points", "one that a product reads too", "one that is read twice"],
)
def test_rows_are_dequantized(tmp_path: Path, body: str, operators: list[str]) -> None:
    assert run(body, tmp_path, zero=np.zeros(50, np.int8)) == operators


@pytest.mark.parametrize(
    ("body", "scales", "codes"),
    [
        ("t = DequantizeLinear <axis = 1> (codes, scales) y = Gather (t, ids)", SCALES[:16], CODES),
        ("t = DequantizeLinear (codes, scales) y = Gather (t, ids)", SCALES[0], CODES),
        (DQ + "y = Gather <axis = 1> (t, places)", SCALES, CODES),
        ("t = DequantizeLinear <axis = 0> (codes, scales, ones) y = Gather (t, ids)", SCALES, CODES),
        (DQ + "y = Gather (t, ids)", SCALES, CODES.view(np.uint8)),
        (
            "t = DequantizeLinear <axis = 0, block_size = 2> (codes, scales) y = Gather (t, ids)",
            np.repeat(SCALES[:25, None], 16, 1),
            CODES,
        ),
    ],
    ids=["of columns", "one scale", "columns are taken", "shifted", "unsigned", "blocks"],
)
def test_others_are_left_alone(tmp_path: Path, body: str, scales: np.ndarray, codes: np.ndarray) -> None:
    more = {"ones": np.ones(50, np.int8), "places": np.array([[0, 5]])}
    assert run(body, tmp_path, scales, codes, **more) == ["DequantizeLinear", "Gather"]
