"""Times are taken from files of the same structure: values of weights and scales do not count, all else does."""

from __future__ import annotations

from pathlib import Path

import pytest

onnx = pytest.importorskip("onnx", reason="needs enginequant[onnx]")
numpy = pytest.importorskip("numpy")

from quantizer.pipeline.time_groups import structure_digest


def digest(
    path: Path,
    scales: tuple[float, float] = (0.1, 0.2),
    zero: int = 0,
    width: int = 8,
    axis: int = 1,
    weight: float = 1.0,
) -> str:
    """The checksum of a product of a quantized input by a weight, with its parts as they are asked for."""
    helper, to = onnx.helper, onnx.numpy_helper.from_array
    constants = {
        "x_scale": numpy.float32(scales[0]),
        "y_scale": numpy.float32(scales[1]),
        "zero": numpy.uint8(zero),
        "weight": numpy.full((width, 4), weight, dtype=numpy.float32),
        "shape": numpy.array([-1, axis * 4], dtype=numpy.int64),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "x_scale", "zero"], ["xd"]),
        helper.make_node("MatMul", ["xd", "weight"], ["product"]),
        helper.make_node("Reshape", ["product", "shape"], ["flat"]),
        helper.make_node("QuantizeLinear", ["flat", "y_scale", "zero"], ["yq"]),
        helper.make_node("DequantizeLinear", ["yq", "y_scale", "zero"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", None]) for name in ("x", "y")]
    held = [to(numpy.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:], held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), str(path))
    return structure_digest(path)


def test_values_do_not_count(tmp_path: Path) -> None:
    plain = digest(tmp_path / "a.onnx")
    assert digest(tmp_path / "b.onnx", scales=(0.3, 0.4), weight=2.0) == plain
    assert digest(tmp_path / "c.onnx", zero=3) == digest(tmp_path / "d.onnx", zero=7)


@pytest.mark.parametrize("change", [{"scales": (0.1, 0.1)}, {"zero": 3}, {"width": 16}, {"axis": 2}], ids=str)
def test_what_counts(tmp_path: Path, change: dict[str, object]) -> None:
    assert digest(tmp_path / "a.onnx") != digest(tmp_path / "b.onnx", **change)  # type: ignore[arg-type]
