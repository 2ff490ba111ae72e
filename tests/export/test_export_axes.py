"""Dynamic axes: what the example tells, what it does not, and what the file says in the end."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.errors import ExportError
from quantizer.export.exporter import export_onnx, hint
from quantizer.utils.sizes import DataSizes

onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")


def ids_net() -> nn.Module:
    """Token ids [B, S]."""
    return net("self.linear(self.table(ids))", "ids", table=nn.Embedding(10, 32), linear=linear())


class Masked(nn.Module):
    """x [B, S, 32] and a mask [B, H or 1, S, S]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.linear(x).unflatten(-1, (4, 8)).transpose(1, 2)
        return (y @ y.mT).masked_fill(~mask, -1e4).softmax(-1) @ y


def prototypes() -> nn.Module:
    """x [B, 32] and what it is compared with, [N, 32]."""
    return net("self.linear(x) @ self.linear(table).mT", "x, table", linear=linear())


def exported(model: nn.Module, example: tuple[Tensor, ...], path: Path, **options: Any) -> dict[str, list[Any]]:
    torch.manual_seed(0)
    q = Quantizer(preset="plain", backend="onnxruntime")
    q.calibrate(model.eval(), [example], progress=False)
    q.export(q.quantize(model), path, example, **options)
    inputs = onnx.load(str(path)).graph.input
    return {value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim] for value in inputs}


def ids(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.long)


def mask(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("model", "example", "expected"),
    [
        (ids_net, (ids(2, 1),), {"ids": ["batch", 1]}),
        (ids_net, (ids(1, 1),), {"ids": ["batch", 1]}),
        (ids_net, (ids(1, 4),), {"ids": ["batch", "sequence"]}),
        (Masked, (torch.randn(2, 6, 32), mask(2, 1, 6, 6)), {"x": ["batch", 6, 32], "mask": ["batch", 1, 6, 6]}),
        (Masked, (torch.randn(1, 6, 32), mask(1, 1, 6, 6)), {"x": ["batch", 6, 32], "mask": ["batch", 1, 6, 6]}),
        (Masked, (torch.randn(2, 6, 32), mask(1, 1, 6, 6)), {"x": ["batch", 6, 32], "mask": [1, 1, 6, 6]}),
        (prototypes, (torch.randn(2, 32), torch.randn(1, 32)), {"x": ["batch", 32], "table": [1, 32]}),
    ],
    ids=["one token", "one token of one row", "one row", "mask", "mask of one row", "broadcast mask", "one prototype"],
)
def test_an_axis_of_length_1_is_fixed(
    model: type[nn.Module],
    example: tuple[Tensor, ...],
    expected: dict[str, list[Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="quantizer"):
        assert exported(model(), example, tmp_path / "net.onnx") == expected
    said = "axis 1 of 'ids' is fixed at 1, as in the example; set dynamic_axes=" in caplog.text
    assert said == (expected.get("ids", [0, 0])[1] == 1)


@pytest.mark.usefixtures("exact_byte_products")
def test_a_batch_of_one_row_serves_any_batch(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs enginequant[onnxruntime]")
    model, example = Masked().eval(), (torch.randn(1, 6, 32), mask(1, 1, 6, 6))
    q = Quantizer(preset="plain", backend="onnxruntime")
    q.calibrate(model, [example], progress=False)
    frozen = q.quantize(model)
    q.export(frozen, tmp_path / "net.onnx", example)
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    x, hidden = torch.randn(3, 6, 32), mask(3, 1, 6, 6)
    (got,) = session.run(None, {"x": x.numpy(), "mask": hidden.numpy()})
    assert np.abs(got - frozen(x, hidden).detach().numpy()).max() < 0.01


@pytest.mark.parametrize("rows", [1, 2])
def test_another_length_than_the_batch_is_fixed_and_said(
    rows: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    example = (torch.randn(rows, 32), torch.randn(5, 32))
    with caplog.at_level(logging.WARNING, logger="quantizer"):
        found = exported(prototypes(), example, tmp_path / "net.onnx")
    assert found == {"x": ["batch", 32], "table": [5, 32]}
    assert (
        f"axis 0 of 'table' is fixed at 5, because the batch size of the example is {rows}; set dynamic_axes="
        in caplog.text
    )


def fields() -> nn.Module:
    """Five numbers of categories [B, 5]."""
    return net("self.linear(self.table(ids).flatten(1))", "ids", table=nn.Embedding(10, 32), linear=nn.Linear(160, 32))


def test_what_the_model_fixes_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="quantizer"):
        assert exported(fields(), (ids(2, 5),), tmp_path / "net.onnx") == {"ids": ["batch", 5]}
    assert "the model only works if axis 1 of 'ids' is 5" in caplog.text
    example = (torch.randn(2, 6, 32), mask(2, 4, 6, 6))
    with pytest.raises(ExportError, match="the model only works if axis 1 of 'mask' is 4, so it cannot be 'heads'"):
        exported(Masked(), example, tmp_path / "net.onnx", dynamic_axes={"mask": {1: "heads"}})


def test_axes_of_length_1_that_are_asked_for(tmp_path: Path) -> None:
    axes = {"ids": {0: "batch", 1: "sequence"}}
    assert exported(ids_net(), (ids(2, 1),), tmp_path / "net.onnx", dynamic_axes=axes) == {"ids": ["batch", "sequence"]}


def test_one_dimension_has_one_length(tmp_path: Path) -> None:
    example = (torch.randn(2, 32), torch.randn(5, 32))
    axes = {"x": {0: "batch"}, "table": {0: "batch"}}
    with pytest.raises(ExportError, match="'batch' is 2 in the example at axis 0 of 'x' and 5 at axis 0 of 'table'"):
        exported(prototypes(), example, tmp_path / "net.onnx", dynamic_axes=axes)


def test_the_exporter_s_words_on_lengths_come_with_what_to_do() -> None:
    wrapped = RuntimeError("step 1 of 3")
    wrapped.__cause__ = ConstraintViolationError("1 not in range [2, int_oo]")
    assert "set dynamic_axes= to choose the dynamic axes" in hint(wrapped)
    assert not hint(RuntimeError("step 1 of 3"))


def frames() -> nn.Module:
    """Features of sound x [B, T, 16]."""
    return net(
        "self.linear(torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2))",
        conv=nn.Conv1d(16, 32, 3, padding=1),
        linear=linear(),
    )


@pytest.mark.parametrize("loaded", [False, True], ids=["", "loaded"])
@pytest.mark.parametrize("anew", [False, True], ids=["calibrated", "for another backend"])
def test_an_axis_that_varied_in_the_calibration_is_open(anew: bool, loaded: bool, tmp_path: Path) -> None:
    model = frames().eval()
    q = Quantizer(preset="plain", backend="openvino" if anew else "onnxruntime")
    q.calibrate(model, [torch.randn(4, length, 16) for length in (20, 30)], progress=False)
    if loaded:
        q = Quantizer.load(q.save(tmp_path / "saved"))
    if anew:
        q = q.for_backend("onnxruntime")
    q.export(q.quantize(model), tmp_path / "net.onnx", torch.randn(4, 20, 16))
    (value,) = onnx.load(str(tmp_path / "net.onnx")).graph.input
    assert [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim] == ["batch", "sequence", 16]


class DecidesBySize(nn.Module):
    """Multiplies inputs with an even number of columns, and adds to others."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * x if x.shape[1] % 2 == 0 else x + 1


def test_a_program_that_is_wrong_at_another_size_is_refused(tmp_path: Path) -> None:
    sizes = DataSizes({"x": {0: "batch", 1: "sequence"}}, {"sequence": (8, 2)})
    export = partial(
        export_onnx,
        path=tmp_path / "m.onnx",
        example={"x": torch.ones(2, 8)},
        opset=20,
        dtype=torch.float32,
        axes=sizes,
    )
    assert export(DecidesBySize(), others=[{"x": torch.ones(2, 6)}]).exists()
    with pytest.raises(ExportError, match=r"DecidesBySize cannot be exported for x .2, 7.: its code decides by a size"):
        export(DecidesBySize(), others=[{"x": torch.ones(2, 7)}])
