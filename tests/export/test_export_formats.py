"""User code that calls ``quantizer.functional``, in ONNX: every format and granularity, run by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_graphs import node_by_node, operators
from torch import Tensor, nn

from quantizer.errors import ExportError
from quantizer.export.exporter import export_onnx
from quantizer.functional import dequantize, fake_quantize, quantize
from quantizer.numerics.formats import QTYPES
from quantizer.numerics.granularity import scale_shape
from quantizer.plan.targets import profile

onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
pytest.importorskip("onnxscript", reason="exporting needs enginequant[onnx]")
pytest.importorskip("onnxruntime", reason="running ONNX needs enginequant[onnxruntime]")

AXES = {"x": {0: "rows"}}
GRANULARITIES = [(None, None), (1, None), (-1, 4)]


class Rounded(nn.Module):
    """x [rows, 8] rounded in one call, and in two with the steps in between."""

    def __init__(self, dtype: str, axis: int | None, block_size: int | None, scale: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.axis, self.block_size, self.kind = dtype, axis, block_size, scale
        shape = scale_shape((4, 8), axis, block_size)
        self.register_buffer("scale", (torch.rand(shape) + 0.5) / 4)
        self.register_buffer("zero_point", torch.full(shape, 3, dtype=torch.uint8) if dtype == "uint8" else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        where = (self.scale.to(self.kind), self.dtype, self.axis, self.block_size, self.zero_point)
        return fake_quantize(x, *where), dequantize(quantize(x, *where), *where)


def initializers(path: Path) -> dict[str, Any]:
    return {item.name: item for item in onnx.load(path).graph.initializer}


@pytest.mark.parametrize("dtype", sorted(QTYPES))
@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
def test_a_file_computes_what_the_functions_compute(
    dtype: str, axis: int | None, block_size: int | None, tmp_path: Path
) -> None:
    opset = 21 if dtype == "int4" or block_size is not None else 20
    model, x = Rounded(dtype, axis, block_size, torch.float32), torch.randn(4, 8) * 5
    axes = AXES if block_size is None else {}
    export_onnx(model, tmp_path / "m.onnx", {"x": x}, opset=opset, dtype=torch.float32, axes=axes)
    for expected, got in zip(model(x), node_by_node(tmp_path / "m.onnx", x), strict=True):
        assert np.array_equal(expected.numpy(), got)
    assert operators(tmp_path / "m.onnx").count("QuantizeLinear") in (1, 2)
    assert "ConstantOfShape" not in operators(tmp_path / "m.onnx")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [torch.float16, torch.float32, torch.float64])
def test_scales_of_another_type_lose_nothing(dtype: torch.dtype, scale: torch.dtype, tmp_path: Path) -> None:
    model, x = Rounded("int8", None, None, scale), (torch.randn(4, 8) * 5).to(dtype)
    export_onnx(model, tmp_path / "m.onnx", {"x": x}, opset=20, dtype=dtype, axes=AXES)
    for expected, got in zip(model.to(dtype)(x), node_by_node(tmp_path / "m.onnx", x), strict=True):
        assert expected.numpy().dtype == got.dtype
        assert np.array_equal(expected.numpy(), got)


class ScaleOfTheRow(nn.Module):
    """A scale from the data, of as many elements as there are rows."""

    def forward(self, x: Tensor) -> Tensor:
        return fake_quantize(x, x.abs().amax(1) / 100 + 1e-6, "fp8", axis=0)


def test_a_scale_of_dynamic_shape(tmp_path: Path) -> None:
    export_onnx(
        ScaleOfTheRow(), tmp_path / "m.onnx", {"x": torch.randn(4, 8)}, opset=20, dtype=torch.float32, axes=AXES
    )
    for rows in (1, 7):
        x = torch.randn(rows, 8)
        assert np.array_equal(node_by_node(tmp_path / "m.onnx", x)[0], ScaleOfTheRow()(x).numpy())


@pytest.mark.parametrize(
    ("dtype", "block_size", "opset", "message"),
    [
        ("fp8", None, 18, "opset=18: fp8 needs opset 19 or later"),
        ("int4", None, 20, "opset=20: int4 needs opset 21 or later"),
        ("int8", 4, 20, "opset=20: a scale per block needs opset 21 or later"),
    ],
)
def test_an_opset_that_is_too_old(dtype: str, block_size: int | None, opset: int, message: str, tmp_path: Path) -> None:
    model = Rounded(dtype, None if block_size is None else 1, block_size, torch.float32)
    with pytest.raises(ExportError, match=message):
        export_onnx(model, tmp_path / "m.onnx", {"x": torch.randn(4, 8)}, opset=opset, dtype=torch.float32, axes={})
    assert not list(tmp_path.iterdir())


# -- weights -------------------------------------------------------------------------------------------------------


class Weighted(nn.Module):
    """A linear layer whose weight [N, K] is stored, or a parameter that is rounded in each pass."""

    def __init__(self, dtype: str, axis: int | None, block_size: int | None, *, stored: bool) -> None:
        super().__init__()
        self.where = (dtype, axis, block_size)
        weight = torch.randn(48, 64)
        scale = (torch.rand(scale_shape(weight.shape, axis, block_size)) + 0.5) / QTYPES[dtype].qmax
        self.register_buffer("scale", scale)
        self.weight = weight if stored else nn.Parameter(weight)
        self.stored = stored
        if stored:
            del self.weight
            self.register_buffer("weight", quantize(weight, scale, *self.where))

    def forward(self, x: Tensor) -> Tensor:
        rounding = dequantize if self.stored else fake_quantize
        return nn.functional.linear(x, rounding(self.weight, self.scale, *self.where))


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "parameter"])
@pytest.mark.parametrize(("axis", "block_size"), [(None, None), (0, None), (0, 16), (1, 32), (-1, 16)])
@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
def test_a_weight_is_stored_in_its_format(
    dtype: str, axis: int | None, block_size: int | None, stored: bool, tmp_path: Path
) -> None:
    model, x = Weighted(dtype, axis, block_size, stored=stored).eval(), torch.randn(4, 3, 64)
    with torch.no_grad():
        expected = model(x)
    export_onnx(model, tmp_path / "m.onnx", {"x": x}, opset=21, dtype=torch.float32, axes=AXES)
    assert operators(tmp_path / "m.onnx") == ["DequantizeLinear", "MatMul"]
    weights = [item for item in initializers(tmp_path / "m.onnx").values() if list(item.dims) == [64, 48]]
    assert [onnx.TensorProto.DataType.Name(item.data_type) for item in weights] == [QTYPES[dtype].onnx_type]
    read = {name for node in onnx.load(tmp_path / "m.onnx").graph.node for name in node.input}
    assert set(initializers(tmp_path / "m.onnx")) <= read
    assert len(weights[0].raw_data) == 64 * 48 * QTYPES[dtype].bits // 8
    got = node_by_node(tmp_path / "m.onnx", x)[0]
    assert np.allclose(expected.numpy(), got, rtol=1e-5, atol=1e-5)


def test_only_int8_of_one_scale_is_stored_unsigned(tmp_path: Path) -> None:
    for dtype in ("int8", "fp8"):
        model, x = Rounded(dtype, None, None, torch.float32), torch.randn(4, 8) * 5
        export_onnx(
            model,
            tmp_path / "m.onnx",
            {"x": x},
            opset=20,
            dtype=torch.float32,
            axes=AXES,
            target=profile("onnxruntime"),
        )
        for expected, got in zip(model(x), node_by_node(tmp_path / "m.onnx", x), strict=True):
            assert np.array_equal(expected.numpy(), got)
        zeros = {item.data_type for item in initializers(tmp_path / "m.onnx").values() if not item.dims}
        assert (onnx.TensorProto.UINT8 in zeros) == (dtype == "int8")
    model = Rounded("int8", 1, None, torch.float32)
    export_onnx(
        model, tmp_path / "m.onnx", {"x": x}, opset=20, dtype=torch.float32, axes=AXES, target=profile("onnxruntime")
    )
    assert np.array_equal(model(x)[0].numpy(), node_by_node(tmp_path / "m.onnx", x)[0])
