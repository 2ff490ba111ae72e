"""``quantizer check``: what it prints, and its exit code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantizer.cli.main import main

onnx = pytest.importorskip("onnx", reason="checking needs enginequant[onnx]")
pytest.importorskip("onnx_ir", reason="checking needs enginequant[onnx]")


def _file(folder: Path, *, products: int = 1, scale: float = 0.5, width: type[np.generic] = np.float16) -> str:
    """Products of one quantized activation [B, 32] and a weight of steps [32, 32] each."""
    helper = onnx.helper
    element = helper.np_dtype_to_tensor_dtype(np.dtype(width))
    arrays = {"s": np.array(scale, width), "z": np.array(0, np.int8), "w": np.ones((32, 32), np.int8)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], "quantize"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], "dequantize"),
    ]
    for number in range(products):
        nodes += [
            helper.make_node("DequantizeLinear", ["w", "s"], [f"w{number}"], f"weight_{number}"),
            helper.make_node("MatMul", ["d", f"w{number}"], [f"y{number}"], f"product_{number}"),
        ]
    made = helper.make_model(
        helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("x", element, ["batch", 32])],
            [helper.make_tensor_value_info(f"y{number}", element, ["batch", 32]) for number in range(products)],
            [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
        ),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    onnx.save(made, folder / "m.onnx")
    return str(folder / "m.onnx")


def test_a_file_without_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path)
    assert main(["check", path, "--target", "tensorrt"]) == 0
    assert capsys.readouterr().out == f"{path}: no finding\n"


def test_an_error_makes_the_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = _file(tmp_path, width=np.float32)
    assert main(["check", path, "--target", "tensorrt"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "error [unconverted-float32] 1 place",
        "    all 1 MatMul, Gemm and Conv nodes have float32 tensors: tensorrt uses the",
        "    types of the graph, so non-quantized operations run in float32",
        "  -> convert the model to float16 before export, scales included",
        f"{path}: 1 error, 0 warnings",
    ]


def test_warnings_alone_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path, width=np.float32)
    assert main(["check", path, "--target", "onnxruntime"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("warning [signedness] 1 place\n  quantize\n")
    assert out.endswith(f"{path}: 0 errors, 1 warning\n")


@pytest.mark.parametrize(("more", "shown", "last"), [([], 3, "  ... and 3 more"), (["--all"], 6, None)])
def test_many_places_of_one_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], shown: int, last: str | None
) -> None:
    path = _file(tmp_path, scale=-1.0, products=5)
    assert main(["check", path, "--target", "tensorrt", *more]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "error [scale-value] 6 places"
    assert lines[1] == "  quantize"
    assert sum(line.startswith("    its scale is not a finite number above 0") for line in lines) == shown
    assert (last in lines) == (last is not None)
    # The advice is the same for all.
    assert sum("->" in line for line in lines) == 1


def test_a_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "none.onnx"), "--target", "tensorrt"]) == 1
    assert "none.onnx does not exist; expected an ONNX file" in capsys.readouterr().err


def test_the_target_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", _file(tmp_path)]) == 2
    assert "required: --target" in capsys.readouterr().err
