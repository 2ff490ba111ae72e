"""Corners of calibration: tensors of several formats, shapes that cannot be cut, branches that few batches take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same
from torch import Tensor, nn
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.errors import CalibrationWarning, QuantizerError
from quantizer.integrations.toolkit_scales import read_toolkit_scales
from quantizer.integrations.tripy import tripy_scales
from quantizer.plan.site_plan import OperandPlan


class Two(nn.Module):
    """Two linears that read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).relu() + self.b(x).tanh()


DATA = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(0))


def calibrated(model: nn.Module, data: list[Any] | None = None, **options: Any) -> Quantizer:
    options = {"backend": "tensorrt", "sites": {"residual_add": False}, **options}
    quantizer = Quantizer(preset="plain", **options)
    quantizer.calibrate(model, [(DATA,)] if data is None else data)
    return quantizer


def operand(quantizer: Quantizer, site: str, name: str) -> OperandPlan:
    (found,) = [entry for entry in quantizer.plan[site].operands if entry.name == name]
    return found


# -- scales from elsewhere ---------------------------------------------------------------------------------------------


def test_a_scale_is_shared_by_readers_of_one_format_alone() -> None:
    quantizer = calibrated(Two().eval(), formats=[{"activations": "fp8", "weights": "fp8", "names": ["b"]}])
    before = quantizer.scales()
    quantizer.load_scales({"b.forward.linear_0.input": torch.tensor(0.01)})
    assert operand(quantizer, "b.forward.linear_0", "input").largest_scale == pytest.approx(0.01, rel=1e-3)
    assert torch.equal(quantizer.scales()["a.forward.linear_0.input"], before["a.forward.linear_0.input"])
    quantizer.load_scales(before)
    assert all(torch.equal(scale, before[name]) for name, scale in quantizer.scales().items())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"formats": [{"activations": "float", "weights": "int8"}]}, "input is float"),
        ({"formats": [{"weights": "int4", "block_size": 16}]}, "weight is int4"),
        ({"dtype": "fp8"}, "is fp8"),
        ({"activations": {"smoothquant_alpha": 0.5}}, "input uses SmoothQuant"),
        ({"backend": "onnxruntime", "formats": [{"activations": "uint8"}]}, "input is uint8"),
    ],
)
def test_tripy_is_given_int8_alone(options: dict[str, Any], reason: str) -> None:
    found = tripy_scales(calibrated(Two().eval(), **options).plan)
    assert not found.linears
    assert all(reason in why for why in found.left.values())


def test_a_range_of_another_toolkit_becomes_a_scale_of_our_format() -> None:
    state = {"a.input_quantizer._amax": torch.tensor(3.0)}
    plan = calibrated(Two().eval(), dtype="fp8").plan
    assert float(read_toolkit_scales(state, plan).scales["a.forward.linear_0.input"]) == pytest.approx(3 / 448)
    smoothed = calibrated(Two().eval(), activations={"smoothquant_alpha": 0.5}).plan
    state["b.weight_quantizer._amax"] = torch.tensor(3.0)
    with pytest.raises(QuantizerError, match="it uses SmoothQuant"):
        read_toolkit_scales(state, smoothed)


# -- shapes ------------------------------------------------------------------------------------------------------------


def relative() -> nn.Module:
    """As many heads as rows: the first axes mean different things."""
    return net("torch.matmul(x, self.table + 0 * x.mean())", table=torch.randn(8, 16, 16))


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (net("self.conv(x)", conv=nn.Conv2d(16, 16, 3)), torch.randn(16, 12, 12)),
        (relative(), torch.randn(8, 8, 16, 16)),
        (net("torch.matmul(x, x * 2) + x.sum()"), torch.randn(32)),
    ],
    ids=["an image alone", "heads and rows", "dot"],
)
def test_auto_takes_any_shape(model: nn.Module, example: Tensor) -> None:
    quantizer = calibrated(model.eval(), [(example,)], backend="openvino", activations={"calibrator": "auto"})
    assert any(entry.quantized for entry in quantizer.plan.values())
    with torch.no_grad():
        assert torch.isfinite(quantizer.quantize(model)(example)).all()


class Later(nn.Module):
    """A tensor is read by a linear first, and by a residual add in a later step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.l, self.m = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.e(x)
        first = first + self.l(first)
        second = first.relu()
        return self.l(second) + self.m(second)


def test_a_histogram_that_one_reader_kept_serves_all() -> None:
    quantizer = calibrated(Later().eval(), sites={"residual_add": "auto"}, activations={"calibrator": "max"})
    adds = [entry for entry in quantizer.plan.values() if entry.kind == "residual_add"]
    assert all(o.sqnr_db is not None for entry in adds for o in entry.operands if o.role == "activation" and o.scale)


# -- batches that are kept ---------------------------------------------------------------------------------------------


def in_place_net() -> nn.Module:
    """Changes what it is given."""
    torch.manual_seed(0)
    return net("x.mul_(0.1); return self.layer(x)", layer=linear())


def test_batches_are_kept_as_they_were_given() -> None:
    quantizer = calibrated(in_place_net().eval(), [(DATA.clone(),)], activations={"calibrator": "auto"})
    same = calibrated(nn.Sequential(in_place_net().layer).eval(), [(DATA * 0.1,)], activations={"calibrator": "auto"})
    expected = operand(same, "0.forward.linear_0", "input").largest_amax
    assert operand(quantizer, "layer.forward.linear_0", "input").largest_amax == pytest.approx(expected, rel=1e-3)


def rare_net() -> nn.Module:
    torch.manual_seed(0)
    return net("self.seldom(x) if x.abs().max() > 50 else self.often(x)", often=linear(), seldom=linear())


class Doubles(nn.Module):
    """Doubles what it is given, in place or not."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(32, 8)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mul_(2.0) if self.in_place else x * 2.0)


def test_kept_batches_are_run_again_as_they_were_given() -> None:
    found = []
    for in_place in (False, True):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)) ** 3
        q = Quantizer(
            preset="plain", backend="openvino", activations={"calibrator": "auto", "smoothquant_alpha": "auto"}
        )
        model = Doubles(in_place=in_place).eval()
        q.calibrate(model, [x])
        found.append((q.scales(), q.for_backend("onnxruntime").scales()))
    assert_same(*found)


def test_where_no_kept_batch_gets_nothing_is_chosen() -> None:
    generator = torch.Generator().manual_seed(1)
    many = [(torch.randn(2, 8, 32, generator=generator),) for _ in range(90)]
    outlier = torch.randn(2, 8, 32, generator=generator)
    outlier[0, 0, 0] = 100.0
    quantizer = calibrated(rare_net().eval(), [*many, (outlier,)], activations={"calibrator": "auto"})
    assert operand(quantizer, "often.forward.linear_0", "input").estimate is not None
    seldom = operand(quantizer, "seldom.forward.linear_0", "input")
    assert seldom.estimate is None  # where the rare batch is kept, another seed is needed
    mse = calibrated(rare_net().eval(), [*many, (outlier,)], activations={"calibrator": "mse"})
    assert seldom.largest_amax == operand(mse, "seldom.forward.linear_0", "input").largest_amax


def test_smoothing_stays_until_more_data_comes(tmp_path: Path) -> None:
    model = Two().eval()
    quantizer = calibrated(model, activations={"smoothquant_alpha": 0.5})
    loaded = Quantizer.load(quantizer.save(tmp_path / "saved"))
    loaded.calib(model, resume=True)
    assert operand(loaded, "a.forward.linear_0", "input").smoothing == "SmoothQuant 0.5"
    with torch.no_grad():
        assert torch.equal(loaded.quantize(model)(DATA), quantizer.quantize(model)(DATA))
    loaded.calibrate(model, [(DATA * 3,)], resume=True)
    found, first = (operand(q, "a.forward.linear_0", "input") for q in (loaded, quantizer))
    assert found.largest_amax is not None
    assert first.largest_amax is not None
    assert found.largest_amax > first.largest_amax


def test_smoothed_models_export_in_bfloat16(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="exporting needs enginequant[onnx]")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).eval()
    quantizer = calibrated(model, fallback_dtype="bfloat16", activations={"smoothquant_alpha": 0.5})
    assert quantizer.export(quantizer.quantize(model), tmp_path / "model.onnx", (DATA,)).exists()


def huge() -> nn.Module:
    """A residual add of values whose scale in INT8 float16 has no number for."""
    torch.manual_seed(0)
    return net("x + self.a(x) * 1e+37", a=linear())


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_scale_beyond_the_targets_float_type_leaves_its_operand_float(dtype: str) -> None:
    model = huge()
    quantizer = calibrated(model, sites={"residual_add": True}, dtype=dtype)
    left, right = quantizer.plan["forward.add_0"].operands
    assert left.quantized
    assert not right.quantized
    assert right.reason is not None
    assert right.reason.startswith("its largest magnitude, ")
    assert right.reason.endswith("e+37, needs a scale beyond the range of float16")
    assert quantizer.quantize(model)(DATA).isfinite().all()
    # float32 has that number.
    other = calibrated(huge(), backend="openvino", sites={"residual_add": True})
    assert all(operand.quantized for operand in other.plan["forward.add_0"].operands)


class LearnedMask(nn.Module):
    """Scores and a mask, both made of weights, so that their sum looks like a residual add."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores, self.mask = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(8, 32, dtype=torch.bool).triu(1)
        return (self.scores(x) + self.mask(x).masked_fill(hidden, torch.finfo(torch.float32).min)).softmax(-1)


@pytest.mark.parametrize("residual", [True, "auto"])
def test_an_add_of_a_mask_is_no_residual(residual: bool | str) -> None:
    quantizer = calibrated(LearnedMask(), backend="openvino", sites={"residual_add": residual})
    entry = quantizer.plan["forward.add_0"]
    assert not entry.quantized
    assert entry.reason == "it adds a mask, whose large negative values leave no precision for the other values"
    assert not any(operand.quantized for operand in entry.operands)


class Biased(nn.Module):
    """Attention whose scores get a bias that a linear layer makes, as ProphetNet's do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.bias = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / 6
        return (scores + self.bias(x)).softmax(-1)


def test_a_bias_of_scores_is_no_residual() -> None:
    quantizer = Quantizer(preset="plain", backend="tensorrt", sites={"residual_add": True})
    quantizer.calibrate(Biased(), [torch.randn(2, 16, 32)], progress=False)
    entry = quantizer.plan["forward.add_0"]
    assert not entry.quantized
    assert entry.reason == "an operand of the add comes from a MatMul of two activations, as attention scores do"


def two_inputs() -> nn.Module:
    return net("(self.a(x), self.b(other))", "x, other", a=nn.Linear(16, 32), b=nn.Linear(16, 32))


def at_once(q: Quantizer, model: nn.Module, batches: list[Any]) -> None:
    q.calibrate(model, batches, progress=False)


def in_a_loop(q: Quantizer, model: nn.Module, batches: list[Any]) -> None:
    proxy = q.calib(model)
    for batch in batches:
        proxy(*batch)
    assert q.plan


@pytest.mark.parametrize("calibrate", [at_once, in_a_loop])
@pytest.mark.parametrize("backend", ["openvino", "tensorrt", "torch"])
def test_an_input_that_was_always_zero_has_no_range(backend: str, calibrate: Callable[..., None]) -> None:
    torch.manual_seed(0)
    model, batches = two_inputs().eval(), [(torch.randn(32, 16), torch.zeros(32, 16)) for _ in range(2)]
    q = Quantizer(preset="plain", backend=backend)
    with pytest.warns(CalibrationWarning, match=r"all values of b\.forward\.linear_0\.input were 0"):
        calibrate(q, model, batches)
    assert "in calibration were 0" in " ".join(q.coverage.text().split())
    assert q.plan["a.forward.linear_0"].quantized
    assert not q.plan["b.forward.linear_0"].quantized
    x = torch.randn(8, 16)
    torch.testing.assert_close(q.quantize(model)(x, x)[1], model(x, x)[1])


def test_an_input_of_one_value_is_warned_of() -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(32, 16), torch.ones(32, 16)) for _ in range(2)]
    q = Quantizer(preset="plain", backend="openvino")
    with pytest.warns(CalibrationWarning, match=r"all values of b\.forward\.linear_0\.input were 1 "):
        q.calibrate(two_inputs().eval(), batches, progress=False)
    assert q.plan["b.forward.linear_0"].quantized
