"""Calibration: what is seen, what is refused, and what is decided from it."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from helpers import ConvNet, Mlp, batch, tiny
from torch import Tensor, nn
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.errors import CalibrationError
from quantizer.plan.reasons import ReasonCode
from quantizer.plan.site_plan import OperandPlan


def _operand(q: Quantizer, site: str, name: str) -> OperandPlan:
    return next(operand for operand in q.plan[site].operands if operand.name == name)


# -- ranges --------------------------------------------------------------------------------------------------------


def test_max_ranges_are_those_of_the_data() -> None:
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    data = [torch.randn(8, 32) * scale for scale in (1, 5, 2)]
    q.calibrate(Mlp().eval(), data)
    found = _operand(q, "up.forward.linear_0", "input")
    everything = torch.cat(data)
    assert found.minimum == float(everything.min())
    assert found.maximum == float(everything.max())
    assert float(found.amax) == float(everything.abs().max())  # type: ignore[arg-type]
    assert float(found.scale) == pytest.approx(float(everything.abs().max()) / 127)  # type: ignore[arg-type]


def test_percentile_ranges_keep_minimum_and_maximum() -> None:
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "percentile", "percentile": 90})
    data = torch.randn(4096, 32)
    q.calibrate(Mlp().eval(), [data])
    found = _operand(q, "up.forward.linear_0", "input")
    assert found.minimum == float(data.min())
    assert found.maximum == float(data.max())
    exact = float(data.abs().flatten().kthvalue(int(0.9 * data.numel())).values)
    assert float(found.amax) == pytest.approx(exact, rel=0.01)  # type: ignore[arg-type]
    assert found.clipped == pytest.approx(0.1, abs=0.005)


@pytest.mark.parametrize("calibrator", ["max", "percentile"])
def test_the_order_of_batches_and_their_size_do_not_matter(calibrator: str) -> None:
    data = torch.randn(64, 32) * torch.logspace(-3, 2, 64)[:, None]
    found = []
    for cut in (data.split(64), data.split(7), data.flip(0).split(5)):
        q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": calibrator})
        q.calibrate(Mlp().eval(), cut)
        found.append(_operand(q, "up.forward.linear_0", "input"))
    assert len({float(operand.amax) for operand in found}) == 1  # type: ignore[arg-type]
    assert len({(operand.minimum, operand.maximum) for operand in found}) == 1


@pytest.mark.parametrize(("granularity", "shape"), [("per_channel", (64,)), ("per_tensor", ())])
def test_weight_ranges(granularity: str, shape: tuple[int, ...]) -> None:
    model = Mlp().eval()
    q = Quantizer(preset="plain", backend="openvino", weights={"granularity": granularity})
    q.calibrate(model, [torch.randn(4, 32)])
    found = _operand(q, "up.forward.linear_0", "weight")
    assert found.role == "weight"
    assert found.amax is not None
    assert found.amax.shape == shape
    wanted = model.up.weight.detach().abs()
    assert torch.equal(found.amax, wanted.amax(1) if shape else wanted.amax())


def test_scales_are_what_the_target_can_hold() -> None:
    q = Quantizer(preset="plain", backend="tensorrt")
    q.calibrate(Mlp().eval(), [torch.randn(4, 32)])
    for row in q.plan.values():
        for operand in row.operands:
            assert operand.scale is not None
            assert torch.equal(operand.scale, operand.scale.half().float())
            assert bool((operand.scale > 0).all())


def test_an_activation_with_a_single_value_says_so() -> None:
    model = net("self.a(torch.full_like(x, 3)) + self.b(x)", a=linear(), b=linear()).eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [torch.randn(4, 32)])
    notes = {name: q.plan[f"{name}.forward.linear_0"].operands[0].note for name in "ab"}
    assert notes == {"a": "all of its values in calibration were 3", "b": None}


# -- groups --------------------------------------------------------------------------------------------------------


def test_operands_join_even_when_they_first_looked_apart() -> None:
    """Two linears read one tensor in the second batch only; from then on they are one group, with all that was seen."""

    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    x = torch.randn(8, 32)
    q.calibrate(
        net("self.a(x) - self.b(x * 3 if apart else x)", "x, apart", a=linear(), b=linear()).eval(),
        [{"x": x, "apart": True}, {"x": x, "apart": False}],
    )
    a, b = (_operand(q, f"{name}.forward.linear_0", "input") for name in "ab")
    assert a.range_group == b.range_group
    assert float(a.amax) == float(b.amax) == float((x * 3).abs().max())  # type: ignore[arg-type]


def test_a_tensor_changed_in_place_is_another_tensor() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(32, 32)
            self.b = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            y = self.a(x)
            x.mul_(100)
            return y - self.b(x)

    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    q.calibrate(InPlace().eval(), [torch.randn(8, 32)])
    a, b = (_operand(q, f"{name}.forward.linear_0", "input") for name in "ab")
    assert a.range_group != b.range_group
    assert float(b.amax) == pytest.approx(100 * float(a.amax))  # type: ignore[arg-type]


def pyramid() -> nn.Module:
    """A map of one pixel, resized: torch has a kernel for this, and for graphs a decomposition of another layout."""
    return net(
        "self.out(F.interpolate(self.narrow(x), size=(1, 1), mode='nearest'))",
        narrow=nn.Conv2d(64, 64, 3, padding=1),
        out=nn.Conv2d(64, 64, 3, padding=1),
    )


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_observing_takes_torchs_kernels_and_not_its_decompositions(context: Any) -> None:
    importlib.import_module("torch._decomp.decompositions")  # registers them, as the import of many models does
    model = pyramid().eval()
    x = torch.randn(2, 64, 1, 1).as_strided((2, 64, 1, 1), (64, 1, 64, 64))  # channels last
    with context():
        expected, given = model(x), Quantizer(preset="plain").calib(model)(x)
    assert given.stride() == expected.stride()
    assert torch.equal(given, expected)


def test_batches_are_mappings_sequences_or_tensors() -> None:
    x = torch.randn(4, 32)
    shown = set()
    for data in ([x], [(x,)], [[x]], [{"x": x}], iter([x]), (item for item in [x])):
        q = Quantizer(preset="plain")
        q.calibrate(Mlp().eval(), data)  # type: ignore[arg-type]
        shown.add(len(q.coverage.quantized))
    assert shown == {3}


# -- sites that cannot be quantized --------------------------------------------------------------------------------


def branches_net() -> nn.Module:
    """One of its two linears runs only when asked."""
    return net(
        "x = self.always(x); return self.seldom(x) if both else x", "x, both=False", always=linear(), seldom=linear()
    )


def test_a_site_that_never_ran_stays_float() -> None:
    model = branches_net().eval()
    x = torch.randn(4, 32)
    q = Quantizer(preset="plain")
    q.calibrate(model, [x])
    rows = {row.name: row for row in q.coverage}
    assert rows["always.forward.linear_0"].quantized
    assert rows["seldom.forward.linear_0"].reason == "never ran in calibration"
    frozen = q.quantize(model)
    with torch.no_grad():
        hidden = frozen(x)
        assert torch.equal(frozen(x, both=True), model.seldom(hidden))
    for row in q.ranges:
        assert row.amax is None or math.isfinite(row.amax)


def test_small_products_stay_float_on_tensorrt() -> None:
    model = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 32)).eval()
    q = Quantizer(preset="plain", backend="tensorrt")
    q.calibrate(model, [torch.randn(4, 32)])
    reasons = {row.name: (row.reason, row.rule) for row in q.coverage}
    assert reasons["0.forward.linear_0"] == (
        "N = 8 is below 16: slower quantized than in float on tensorrt",
        "target tensorrt",
    )
    assert reasons["2.forward.linear_0"][0].startswith("K = 8 is below 16")
    other = Quantizer(preset="plain", backend="openvino")
    other.calibrate(model, [torch.randn(4, 32)])
    assert len(other.coverage.quantized) == 2


def test_a_target_that_gains_nothing_from_a_kind() -> None:
    pytest.importorskip("transformers", reason="makes a transformers model: install enginequant[hf]")
    q = Quantizer(preset="plain", backend="onnxruntime")
    q.calibrate(tiny("bert"), [batch("bert")])
    assert {row.kind for row in q.coverage.quantized} == {"linear"}
    assert {row.rule for row in q.coverage if row.kind == "matmul"} == {"target onnxruntime"}


class Parameters(nn.Module):
    """One site, called with one weight after the other, and with what is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(32, 32) / 6 for _ in range(3))

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.matmul(x, y)

    def forward(self, x: Tensor, kind: str) -> Tensor:
        if kind == "loop":
            for weight in self.weights:
                x = self.product(x, weight)
        if kind == "mixed":
            x = self.product(self.product(x, self.weights[0]), x.T @ x)
        if kind == "reversed":
            x = self.product(self.product(x, x.T @ x), self.weights[0])
        return x


@pytest.mark.parametrize("kind", ["loop", "mixed", "reversed"])
def test_a_site_whose_weight_varies_stays_float(kind: str) -> None:
    """Were one weight stored, the other calls would silently be computed with it."""
    model = Parameters().eval()
    x = torch.randn(32, 32)
    q = Quantizer(preset="plain", backend="openvino", include={"sites": ["product.*"]})
    q.calibrate(model, [(x, kind)])
    reasons = {row.name: row.reason for row in q.coverage if not row.quantized}
    assert reasons["product.matmul_0"] == "an operand is a parameter in some calls, but not in others"
    assert torch.equal(q.quantize(model)(x, kind), model(x, kind))


# -- special values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibrator", ["max", "percentile"])
def test_a_first_batch_of_zeros(calibrator: str) -> None:
    model = Mlp().eval()
    x = torch.randn(8, 32)
    q = Quantizer(
        preset="plain", backend="openvino", activations={"calibrator": calibrator}, sites={"residual_add": True}
    )
    q.calibrate(model, [torch.zeros(8, 32), x])
    without = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    without.calibrate(model, [x])
    found = float(_operand(q, "up.forward.linear_0", "input").amax)  # type: ignore[arg-type]
    alone = float(_operand(without, "up.forward.linear_0", "input").amax)  # type: ignore[arg-type]
    assert found == pytest.approx(alone, rel=0.01)
    assert q.quantize(model)(x).isfinite().all()


@pytest.mark.parametrize("calibrator", ["max", "percentile"])
@pytest.mark.parametrize("residual", [True, "auto"])
def test_nothing_but_zeros(calibrator: str, residual: object) -> None:
    model = Mlp().eval()
    q = Quantizer(preset="plain", activations={"calibrator": calibrator}, sites={"residual_add": residual})
    q.calibrate(model, [torch.zeros(8, 32)] * 2)
    with pytest.warns(UserWarning, match="all inputs of all 2 calibration batches are zero"):
        operand = _operand(q, "up.forward.linear_0", "input")
    # A range of nothing is none: values that come later would be cut off or coarse.
    assert (operand.quantized, operand.scale, operand.reason) == (False, None, ReasonCode.ONLY_ZEROS.text())
    assert [q.plan[name].quantized for name in ("up.forward.linear_0", "down.forward.linear_0")] == [False, True]
    frozen = q.quantize(model)
    assert frozen(torch.zeros(8, 32)).isfinite().all()
    assert frozen(torch.randn(8, 32)).isfinite().all()
    assert str(q.ranges)
    assert q.ranges._repr_html_()


def test_a_weight_of_zeros() -> None:
    model = Mlp().eval()
    with torch.no_grad():
        model.up.weight.zero_()
        model.down.weight[3].zero_()
    q = Quantizer(preset="plain")
    q.calibrate(model, [torch.randn(8, 32)])
    frozen: Any = q.quantize(model)
    assert torch.equal(frozen.up.weight, model.up.weight)
    assert frozen(torch.randn(8, 32)).isfinite().all()


def test_empty_tensors() -> None:
    model = Mlp().eval()
    x = torch.randn(8, 32)
    q = Quantizer(preset="plain")
    q.calibrate(model, [torch.zeros(0, 32)])
    assert {row.reason for row in q.coverage} == {"an operand was empty in every call"}
    assert torch.equal(q.quantize(model)(x), model(x))


@pytest.mark.parametrize("order", [(0, 8), (8, 0)])
def test_an_empty_batch_among_others(order: tuple[int, int]) -> None:
    model = Mlp().eval()
    data = {0: torch.zeros(0, 32), 8: torch.randn(8, 32)}
    q = Quantizer(preset="plain")
    q.calibrate(model, [data[rows] for rows in order])
    alone = Quantizer(preset="plain")
    alone.calibrate(model, [data[8]])
    assert [row.name for row in q.coverage.quantized] == [row.name for row in alone.coverage.quantized]
    assert q.quantize(model)(data[0]).shape == (0, 32)


class Masked(nn.Module):
    """Adds a mask with -inf, and -3.4e38, before the softmax, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(32, 32)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor, fill: float) -> Tensor:
        query = self.query(x)
        scores = torch.matmul(query, x.transpose(-1, -2))
        mask = torch.zeros_like(scores)
        mask[..., -1] = fill
        scores = scores + mask
        return self.out(torch.matmul(scores.softmax(-1), x))


@pytest.mark.parametrize("fill", [-math.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("residual", [True, "auto"])
def test_a_masks_values_never_reach_a_range(fill: float, residual: object) -> None:
    model = Masked().eval()
    x = torch.randn(2, 16, 32)
    q = Quantizer(preset="plain", sites={"residual_add": residual})
    q.calibrate(model, [(x, fill)])
    for row in q.ranges:
        assert row.amax is None or row.amax < 100, row
    assert q.quantize(model)(x, fill).isfinite().all()
    assert q.plan["forward.matmul_1"].quantized


# -- flow ----------------------------------------------------------------------------------------------------------


def test_a_failed_calibration_is_not_taken_for_a_calibration() -> None:
    model = Mlp().eval()
    q = Quantizer(preset="plain")
    with pytest.raises(CalibrationError, match="shapes"):
        q.calibrate(model, [torch.randn(4, 31)])
    with pytest.raises(CalibrationError, match="nothing was calibrated yet"):
        q.quantize(model)


def test_a_model_in_train_mode_is_calibrated_in_eval_mode() -> None:
    model = ConvNet().train()
    x = torch.randn(4, 3, 16, 16)
    q = Quantizer(preset="plain")
    running = model.norm.running_mean.clone()  # type: ignore[union-attr]
    with torch.no_grad():
        output = q.calib(model)(x)
    assert model.training
    assert torch.equal(model.norm.running_mean, running)  # type: ignore[arg-type]
    assert torch.equal(output, model.eval()(x))


def test_a_second_calib_starts_afresh() -> None:
    model = Mlp().eval()
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    q.calibrate(model, [torch.randn(8, 32) * 100])
    large = float(_operand(q, "up.forward.linear_0", "input").amax)  # type: ignore[arg-type]
    x = torch.randn(8, 32)
    q.calibrate(model, [x])
    small = float(_operand(q, "up.forward.linear_0", "input").amax)  # type: ignore[arg-type]
    assert small == float(x.abs().max()) < large


def test_resume_goes_on() -> None:
    model = Mlp().eval()
    data = [torch.randn(8, 32) * scale for scale in (1, 7)]
    whole, parts = Quantizer(preset="plain"), Quantizer(preset="plain")
    whole.calibrate(model, data)
    parts.calibrate(model, data[:1])
    proxy = parts.calib(model, resume=True)
    assert parts.calib(model, resume=True) is proxy
    proxy(data[1])
    assert str(parts.ranges) == str(whole.ranges)
    assert str(parts.coverage) == str(whole.coverage)


def test_a_quantizer_does_not_keep_a_model_alive() -> None:
    import gc
    import weakref

    model = Mlp().eval()
    q = Quantizer(preset="plain")
    q.inspect(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_pass_under_a_callers_dispatch_mode() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = Mlp().eval()
    q = Quantizer(preset="plain")
    with FlopCounterMode(display=False):
        q.calib(model)(torch.randn(4, 32))
    assert len(q.coverage.quantized) == 3


# -- residual adds -------------------------------------------------------------------------------------------------


class Additions(nn.Module):
    """Every kind of addition; only the first and the last join branches."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32)
        self.b = nn.Linear(32, 32)
        self.bias = nn.Parameter(torch.randn(32))
        self.place = nn.Parameter(torch.randn(8, 32))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.a(x)
        y = y + self.bias
        y = y + self.place
        y = y + y.mean(-1, keepdim=True)
        z = self.b(y)
        z = z[..., :16].repeat(1, 2) + z[..., 16:].repeat(1, 2)
        z = z + 1
        return torch.add(y, nn.functional.gelu(self.b(z)))


def test_only_adds_that_join_branches_are_residual() -> None:
    model = Additions().eval()
    q = Quantizer(preset="plain", sites={"residual_add": True})
    q.calibrate(model, [torch.randn(8, 32)])
    rows = {row.name: row for row in q.coverage if row.kind == "residual_add"}
    assert {name for name, row in rows.items() if row.quantized} == {"forward.add_0", "forward.add_5"}
    assert {rows[f"forward.add_{place}"].reason for place in (1, 2)} == {
        "the add broadcasts an operand",
        "an operand of the add is a parameter",
    }
    assert rows["forward.add_3"].reason == "the add broadcasts an operand"
    assert rows["forward.add_4"].reason == "both operands of the add come from the same layer"
    assert all(row.quiet for name, row in rows.items() if name not in ("forward.add_0", "forward.add_5"))
    assert q.coverage.title().endswith("print .all for 4 additions that are no residual adds")
