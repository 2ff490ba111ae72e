"""Outliers of activations, moved into the weights: the formula, what is smoothed and what is not, and what it gains."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from helpers import Mlp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.algorithms.smoothquant import ALPHAS, migration_factors
from quantizer.plan.site_plan import OperandPlan

GAIN_DB = 15.0
"""What smoothing adds to the output's SQNR where outliers are planted; measured: 24 to 26."""

NO_RESIDUAL = {"residual_add": False}


class Outliers(nn.Module):
    """Three linears that read one normalization with outlier channels, and one more: [rows, 32] to [rows, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.out = nn.Linear(32, 32)
        with torch.no_grad():
            self.norm.weight[3], self.norm.weight[17] = 60.0, -40.0
            for layer in (self.query, self.key, self.value):
                # As in trained networks: what reads an outlier has small weights for it.
                layer.weight[:, [3, 17]] *= 0.05

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.out(torch.tanh(self.query(y)) * torch.tanh(self.key(y)) + torch.tanh(self.value(y)))


def data(batches: int = 3, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(40, 32, generator=generator) for _ in range(batches)]


def calibrated(model: nn.Module, smooth: Any = 0.5, calibrator: str = "max", **options: Any) -> Quantizer:
    activations = {"calibrator": calibrator, "smoothquant_alpha": smooth}
    return make_calibrated(
        model.eval(), data(), **{"backend": "onnxruntime", "sites": NO_RESIDUAL, "activations": activations, **options}
    )


def operand(q: Quantizer, site: str, name: str) -> OperandPlan:
    return next(entry for entry in q.plan[site].operands if entry.name == name)


def sqnr_db(found: Tensor, expected: Tensor) -> float:
    return 10 * math.log10(float(expected.square().sum() / (found - expected).square().sum()))


@torch.no_grad()
def gain_db(model: nn.Module, **options: Any) -> float:
    """What smoothing adds to the SQNR of the output, on data that calibration did not see."""
    x = data(1, seed=9)[0]
    smooth = options.pop("smooth")
    with_it, without = (calibrated(model, share, **options).quantize(model)(x) for share in (smooth, None))
    return sqnr_db(with_it, model(x)) - sqnr_db(without, model(x))


# -- the formula ---------------------------------------------------------------------------------------------------


@given(alpha=st.floats(0.01, 1.0), seed=st.integers(0, 1000), dtype=st.sampled_from([torch.float32, torch.float16]))
def test_the_product_stays_what_it_was(alpha: float, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 16, generator=generator) * torch.logspace(-2, 2, 16)
    weight = torch.randn(4, 16, generator=generator)
    s = migration_factors(x.abs().amax(0), weight.abs().amax(0), alpha, dtype)
    assert torch.allclose(F.linear(x / s, weight * s), F.linear(x, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("alpha", [0.3, 0.5, 1.0])
def test_the_factors_are_those_of_the_paper(alpha: float) -> None:
    x, weight = torch.tensor([1.0, 100.0, 0.01]), torch.tensor([0.5, 0.02, 0.3])
    # No channel counts as less than 1.5 times their median, which is 1.
    expected = x.clamp(min=1.5) ** alpha / weight ** (1 - alpha)
    assert torch.allclose(migration_factors(x, weight, alpha, torch.float32), expected, rtol=1e-6)
    # The target's type holds the inverse, and that is what the weights are multiplied by the inverse of.
    inverse = migration_factors(x, weight, alpha, torch.float16).reciprocal()
    assert torch.equal(inverse.half().float().reciprocal(), inverse.half().double().reciprocal().float())
    assert torch.allclose(inverse, inverse.half().float(), rtol=1e-6)


def test_quiet_channels_keep_room_for_other_data() -> None:
    x, weight = torch.cat([torch.tensor([30.0]), torch.linspace(0.2, 1.0, 31)]), torch.ones(32)
    factors = migration_factors(x, weight, 0.85, torch.float32)
    end = (x / factors).amax()
    quiet = x < x.median()
    # Half again as large as in calibration, and still inside of the range.
    assert bool((1.5 * x / factors <= end)[quiet].all())


def test_channels_of_zeros_have_a_finite_factor() -> None:
    zeros, some = torch.zeros(3), torch.tensor([0.0, 2.0, 3.0])
    assert torch.equal(migration_factors(zeros, some, 0.5, torch.float32), torch.ones(3))
    assert torch.equal(migration_factors(some, zeros, 0.5, torch.float32), torch.ones(3))
    factors = migration_factors(some, some.flip(0), 0.5, torch.float16)
    assert bool((torch.isfinite(factors) & (factors > 0)).all())


# -- what it gains -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibrator", ["max", "mse", "percentile"])
def test_outliers_cost_less(calibrator: str) -> None:
    assert gain_db(Outliers(), smooth=0.5, calibrator=calibrator) > GAIN_DB


def test_a_search_is_as_good_as_a_fixed_share() -> None:
    model = Outliers()
    assert gain_db(model, smooth="auto") > GAIN_DB
    chosen = calibrated(model, "auto")
    found = {operand(chosen, f"{name}.forward.linear_0", "input").smoothing for name in ("query", "key", "value")}
    assert len(found) == 1
    assert found < {f"SmoothQuant {alpha:g}" for alpha in ALPHAS}


def test_a_search_leaves_what_has_no_outliers() -> None:
    model = net("self.layer(torch.sign(x))", layer=linear())
    with torch.no_grad():
        # Steps of both operands, exactly; a factor could only lose them.
        model.layer.weight.copy_(torch.randint(-127, 128, (32, 32)).float())
        model.layer.weight[:, 0] = 127.0
    q = calibrated(model, "auto")
    assert operand(q, "layer.forward.linear_0", "input").smooth is None
    assert "the error of the model's output is smallest without" in q.coverage.quantized[0].reason


def test_ranges_of_max_are_exact_over_all_batches() -> None:
    model = Outliers()
    q = calibrated(model)
    with torch.no_grad():
        y = model.norm(torch.cat(data()))
    planned = operand(q, "key.forward.linear_0", "input")
    assert planned.smooth is not None
    assert torch.allclose(planned.amax, (y.abs().amax(0) / planned.smooth).max(), rtol=1e-6)  # type: ignore[arg-type]
    weight = operand(q, "key.forward.linear_0", "weight")
    expected = (model.key.weight * planned.smooth).abs().amax(1)
    assert torch.allclose(weight.amax, expected)  # type: ignore[arg-type]
    assert planned.minimum == pytest.approx(float((y.amin(0) / planned.smooth).min()))


def test_a_search_that_goes_on_is_one_over_all_data() -> None:
    """It begins from what nothing was smoothed of, or the factors of the first data would stand for no smoothing."""
    model = Outliers().eval()
    settings: dict[str, Any] = {"calibrator": "max", "smoothquant_alpha": "auto"}
    parts, whole = (
        Quantizer(preset="plain", backend="onnxruntime", sites=NO_RESIDUAL, activations=settings) for _ in range(2)
    )
    # Large values in the last batch alone, which is none of those that are run again.
    large = data(1, seed=9)[0]
    large[0] *= torch.linspace(1, 30, 32)
    large[0, 20] = 400.0
    first = data(12)
    parts.calibrate(model, first)
    assert "SmoothQuant 0." in parts.coverage.text() + str(parts.ranges)
    parts.calibrate(model, [large], resume=True)
    whole.calibrate(model, [*first, large])
    for path, site in whole.plan.items():
        for mine, other in zip(parts.plan[path].operands, site.operands, strict=True):
            assert mine.smoothing == other.smoothing, path
            assert torch.equal(mine.scale, other.scale)  # type: ignore[arg-type]
    assert str(parts.ranges) == str(whole.ranges)
    assert str(parts.coverage) == str(whole.coverage)


# -- what is smoothed ----------------------------------------------------------------------------------------------


def test_what_reads_one_tensor_shares_one_factor() -> None:
    model = Outliers()
    q = calibrated(model)
    names = ("query", "key", "value")
    inputs = [operand(q, f"{name}.forward.linear_0", "input") for name in names]
    magnitude = torch.stack([getattr(model, name).weight.abs().amax(0) for name in names]).amax(0)
    with torch.no_grad():
        activation = model.norm(torch.cat(data())).abs().amax(0)
        activation = activation.clamp(min=1.5 * float(activation.median()))
    for planned in inputs:
        assert torch.allclose(planned.smooth, (activation / magnitude).sqrt(), rtol=1e-5)  # type: ignore[arg-type]
    assert all(row.reason == "int8: input, weight; SmoothQuant 0.5" for row in q.coverage.quantized)
    assert "int8, SmoothQuant 0.5" in q.ranges.text()


class Shared(nn.Module):
    """A linear whose input an addition reads too, and products by weights on either side."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.left = nn.Parameter(torch.randn(32, 32))
        self.right = nn.Parameter(torch.randn(32, 16))
        self.bias = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.layer(x)) + x
        z = self.left @ y.T
        return torch.addmm(self.bias[:16], z.T * 2, self.right)


@pytest.mark.parametrize(
    ("residual", "reason"), [(True, "not smoothed: .*reads the same tensor"), (False, "SmoothQuant")]
)
def test_what_others_read_in_low_precision_is_left(residual: bool, reason: str) -> None:
    q = calibrated(Shared(), sites={"residual_add": residual}, backend="tensorrt")
    said = q.plan["layer.forward.linear_0"].reason
    assert said.startswith("int8: input, weight; " + reason.partition(".*")[0])
    assert reason.partition(".*")[2] in said
    assert (operand(q, "layer.forward.linear_0", "input").smooth is None) == residual


def test_the_weight_must_be_met_along_the_last_axis() -> None:
    model = Shared().eval()
    q = calibrated(model)
    assert "not smoothed: its channels are not the last axis" in q.plan["forward.matmul_0"].reason
    planned = operand(q, "forward.addmm_0", "rhs")
    assert planned.smooth_axis == 0
    x = data(1)[0]
    with torch.no_grad():
        assert sqnr_db(q.quantize(model)(x), model(x)) > 25


def test_a_tied_weight_stays_what_it_was() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 32)
            self.head = nn.Linear(32, 50, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.table(ids) * 5))

    model, ids = Tied().eval(), torch.arange(20).reshape(2, 10)
    q = Quantizer(preset="plain", backend="onnxruntime", activations={"smoothquant_alpha": 0.5})
    q.calibrate(model, [ids])
    frozen: Any = q.quantize(model)
    assert "SmoothQuant 0.5" in q.plan["head.forward.linear_0"].reason
    assert torch.equal(frozen.table.weight, model.table.weight)
    assert frozen.table.weight is frozen.head.weight
    with torch.no_grad():
        assert sqnr_db(frozen(ids), model(ids)) > 30


def test_a_branch_that_no_kept_batch_takes_is_left() -> None:
    model = net("self.always(x) + (self.rarely(x * 2) if len(x) == 7 else 0)", always=linear(), rarely=linear()).eval()
    for seed in range(20):
        q = Quantizer(
            preset="plain",
            backend="onnxruntime",
            sites=NO_RESIDUAL,
            activations={"calibrator": "max", "smoothquant_alpha": 0.5},
        )
        q.calibrate(model, [*data(6, seed), torch.randn(7, 32, generator=torch.Generator().manual_seed(seed))])
        if "not smoothed" in q.plan["rarely.forward.linear_0"].reason:
            break
    assert "not smoothed: no stored batch reaches it" in q.plan["rarely.forward.linear_0"].reason
    assert "SmoothQuant 0.5" in q.plan["always.forward.linear_0"].reason


# -- proxies -------------------------------------------------------------------------------------------------------


def test_the_module_shows_its_own_weight() -> None:
    model = Outliers().eval()
    frozen: Any = calibrated(model).quantize(model)
    step = model.key.weight.abs().amax() / 50
    assert bool(((frozen.key.weight - model.key.weight).abs() < step).all())
    assert not [name for name, _ in frozen.key.named_parameters() if name.endswith("weight")]


def test_fallback_puts_it_back() -> None:
    model, x = Outliers().eval(), data(1)[0]
    q = calibrated(model)
    amp = q.amp(model)
    amp(x)
    q.fallback(amp, num=1)
    back = [path for path, entry in q.plan.items() if not entry.quantized and "linear" in path]
    assert back in ([f"{name}.forward.linear_0" for name in ("query", "key", "value")], ["out.forward.linear_0"])
    # A layer that stays float multiplies nothing, so it holds no factors.
    factors = {name.partition(".")[0] for name in q.quantize(model).state_dict() if name.endswith(".factor")}
    assert factors == {"query", "key", "value", "out"} - {path.partition(".")[0] for path in back}


def test_half_precision_keeps_the_factors() -> None:
    model, x = Outliers().eval(), data(1)[0]
    q = calibrated(model, backend="tensorrt")
    frozen = q.quantize(model)
    with torch.no_grad():
        expected = frozen(x)
        found = frozen.half()(x.half())
    assert found.dtype == torch.float16
    assert sqnr_db(found.float(), expected) > 35


def test_another_search_goes_on_top() -> None:
    model = Outliers().eval()
    q = calibrated(model, activations={"percentile": (99.0, 100.0), "smoothquant_alpha": 0.5})
    planned = operand(q, "query.forward.linear_0", "input")
    assert planned.smoothing == "SmoothQuant 0.5"
    assert planned.estimate in ("percentile 99", "percentile 100")
    chosen = operand(calibrated(model, calibrator="auto"), "query.forward.linear_0", "input")
    assert chosen.estimate is not None
    assert chosen.amax <= operand(calibrated(model), "query.forward.linear_0", "input").amax  # type: ignore[operator]


def test_nothing_of_it_without_the_setting() -> None:
    q = calibrated(Mlp(), None)
    assert all(o.smooth is None and o.smoothing is None for entry in q.plan.values() for o in entry.operands)
