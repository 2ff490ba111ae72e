"""The choice of smoothing and of an estimate for all ranges, by the output of the model: what a preset gives."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import ConvNet, Mlp
from torch import Tensor, nn
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.algorithms import range_search, replay
from quantizer.algorithms.algorithm import Work
from quantizer.algorithms.replay import OutputError
from quantizer.observe.calibrators import Estimate
from quantizer.observe.replay_batches import ReplayBatches
from quantizer.plan.site_plan import Plan, plan_digest
from quantizer.proxy.lower import LoweredSite

NO_RESIDUAL = {"residual_add": False}


class Outliers(nn.Module):
    """Two linears with outlier channels between them, as behind a GELU: [rows, 32] to [rows, 32]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        with torch.no_grad():
            self.norm.weight[5] = 50.0
            self.up.weight[:, 5] *= 0.02
            self.up.bias[7] = 40.0
            self.down.weight[:, 7] *= 0.02

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


def data(batches: int, seed: int = 0, rows: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 32, generator=generator) for _ in range(batches)]


@torch.no_grad()
def sqnr_db(q: Quantizer, model: nn.Module, x: Tensor) -> float:
    expected = model(x)
    return 10 * math.log10(float(expected.square().sum() / (q.quantize(model)(x) - expected).square().sum()))


def calibrated(model: nn.Module, batches: list[Tensor], **config: Any) -> Quantizer:
    q = Quantizer(**{"backend": "onnxruntime", "sites": NO_RESIDUAL, **config})
    q.calibrate(model, batches, progress=False)
    return q


# -- models that have not all that is compared -----------------------------------------------------------------------


@pytest.mark.parametrize("mask", [torch.finfo(torch.float32).min, float("-inf")])
def test_masked_outputs_do_not_decide(mask: float) -> None:
    class Masked(Outliers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).masked_fill(torch.arange(32) > 20, mask)

    class Part(Outliers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, :21]

    found = calibrated(Masked().eval(), data(8)).plan
    plain = calibrated(Part().eval(), data(8)).plan
    for path, entry in plain.items():
        assert [o.smoothing for o in found[path].operands] == [o.smoothing for o in entry.operands]


def test_an_output_that_becomes_none_is_the_worst() -> None:
    exact = torch.tensor([1.0, float("-inf"), 2.0])
    assert replay._error(torch.tensor([1.0, 5.0, float("nan")]), exact) == math.inf
    assert replay._error(torch.tensor([1.0, 5.0, 1.0]), exact) == pytest.approx(1 / 5)


def test_products_with_computed_weights_are_not_smoothed() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.maker, self.last = nn.Linear(32, 32), nn.Linear(32, 1024), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.last(torch.relu(nn.functional.linear(y, self.maker(y.mean(0)).view(32, 32))))

    plan = calibrated(Computed().eval(), data(6)).plan
    (reason,) = [entry.reason for path, entry in plan.items() if path.startswith("forward")]
    assert "not smoothed: its weight is computed, so factors cannot be folded into it" in reason


def test_convolutions_with_computed_weights_are_not_equalized() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.maker, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 144), nn.Conv2d(4, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.first(x))
            return self.last(torch.relu(nn.functional.conv2d(y, self.maker(y.mean((0, 2, 3))).view(4, 4, 3, 3))))

    images = [torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    plan = calibrated(Computed().eval(), images, weights={"granularity": "per_tensor"}).plan
    assert any("not equalized: " in entry.reason for path, entry in plan.items() if path.startswith("last"))


# -- what one gets who sets nothing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
def test_the_default_moves_outliers(backend: str) -> None:
    model, unseen = Outliers().eval(), data(1, seed=9)[0]
    default = calibrated(model, data(6), backend=backend)
    plain = calibrated(model, data(6), backend=backend, preset="plain")
    # Measured: 15 and 24.
    assert sqnr_db(default, model, unseen) > sqnr_db(plain, model, unseen) + 8
    reasons = {default.plan[name].reason for name in ("up.forward.linear_0", "down.forward.linear_0")}
    assert all("SmoothQuant 0." in reason for reason in reasons)


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
def test_fast_moves_outliers_by_a_fixed_share(backend: str) -> None:
    model, unseen = Outliers().eval(), data(1, seed=9)[0]
    fast, plain = (calibrated(model, data(6), backend=backend, preset=preset) for preset in ("fast", "plain"))
    # Measured: 36 and 7.
    assert sqnr_db(fast, model, unseen) > sqnr_db(plain, model, unseen) + 20
    reasons = {fast.plan[name].reason or "" for name in ("up.forward.linear_0", "down.forward.linear_0")}
    assert all("SmoothQuant 0.8" in reason for reason in reasons)


def test_the_choice_does_not_depend_on_the_order_of_batches() -> None:
    model, batches = Outliers().eval(), data(12)
    plans = [calibrated(model, given).plan for given in (batches, batches[::-1])]
    for path, entry in plans[0].items():
        for mine, other in zip(entry.operands, plans[1][path].operands, strict=True):
            assert torch.equal(mine.scale, other.scale)  # type: ignore[arg-type]
            assert (mine.smoothing, mine.estimate) == (other.smoothing, other.estimate)


def test_one_batch_is_none_to_check_on(caplog: pytest.LogCaptureFixture) -> None:
    model, batches = Outliers().eval(), data(1)
    with caplog.at_level(logging.WARNING):
        q = calibrated(model, batches)
        plan = q.plan
    assert "no second calibration batch" in caplog.text
    assert "max with no SmoothQuant is used" in caplog.text
    plain = calibrated(model, batches, activations={"calibrator": "max", "smoothquant_alpha": None}).plan
    for path, entry in plan.items():
        for mine, other in zip(entry.operands, plain[path].operands, strict=True):
            assert torch.equal(mine.scale, other.scale)  # type: ignore[arg-type]


def test_a_folder_without_batches_has_a_plan_for_another_backend(tmp_path: Any, caplog: Any) -> None:
    model = Outliers().eval()
    q, unseen = calibrated(model, data(6)), data(1, seed=9)[0]
    loaded = Quantizer.load(q.save(tmp_path / "state"))
    for backend in ("openvino", "tensorrt"):
        with caplog.at_level(logging.WARNING):
            other = loaded.for_backend(backend)
            found = sqnr_db(other, model, unseen)
        assert f"ranges are not chosen again for {backend}" in caplog.text
        assert [entry.operands[0].smoothing for entry in other.plan.values() if entry.kind == "linear"] == [
            entry.operands[0].smoothing for entry in q.plan.values() if entry.kind == "linear"
        ]
        assert found == pytest.approx(sqnr_db(q.for_backend(backend), model, unseen), abs=3)


def test_a_wide_range_is_preferred_and_clipping_is_found_where_it_pays() -> None:
    def tail() -> nn.Module:
        """One value in ten thousand is a hundred times the others, and the output does not show it."""
        torch.manual_seed(0)
        return net("torch.tanh(self.layer(x))", layer=linear())

    model, batches = tail().eval(), [batch.clamp(-1, 1) for batch in data(8, rows=2000)]
    plain = calibrated(model, batches)
    assert plain.plan["layer.forward.linear_0"].operands[0].estimate == "max"
    for batch in batches:
        batch[::300, 3] *= 300
    clipped = calibrated(model, batches, activations={"calibrator": "output", "smoothquant_alpha": None})
    estimate = clipped.plan["layer.forward.linear_0"].operands[0].estimate
    assert estimate in ("percentile 99.99", "percentile 99.999", "mse")


# -- choosing and checking -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checked", "expected"), [({"max": 2.0, "mse": 1.0}, "mse"), ({"max": 1.0, "mse": 2.0}, "max")]
)
def test_a_choice_that_is_worse_on_other_batches_is_undone(
    checked: dict[str, float], expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    halves: Iterator[dict[str, float]] = iter([{"max": 2.0, "mse": 1.0}, checked])

    errors: dict[str, dict[str, float]] = {}

    def known(self: OutputError, plan: Plan, half: ReplayBatches, limit: float = math.inf) -> float:
        (estimate,) = {o.estimate for entry in plan.values() for o in entry.operands if o.role == "activation"}
        assert estimate is not None
        if half.digest not in errors:
            errors[half.digest] = next(halves)
        return errors[half.digest][estimate]

    model = Mlp().eval()
    q = Quantizer(preset="plain", backend="onnxruntime", activations={"calibrator": "mse", "smoothquant_alpha": 0.5})
    q.calibrate(model, data(4))
    session = q._session.calibration
    assert session is not None
    session.decide()
    seen = session.observation()
    monkeypatch.setattr(OutputError, "of_all_ranks", known)
    with caplog.at_level(logging.INFO):
        estimates = Estimate(name="max"), Estimate(name="mse")
        range_search.choose(Work.of(session._proxied, seen), None, (None,), estimates)
    assert {group.chosen[1] for group in seen.groups if group.chosen is not None} <= {expected}
    assert ("is worse on other batches" in caplog.text) == (expected == "max")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The outputs of all passes of models that are compared."""
    outputs: list[bytes] = []
    output = replay._output

    def counted(proxy: nn.Module, batch: Any) -> Tensor:
        found = output(proxy, batch)
        outputs.append(found.numpy().tobytes())
        return found

    monkeypatch.setattr(replay, "_output", counted)
    return outputs


def test_a_plan_that_cannot_win_is_not_measured_to_the_end(ran: list[bytes]) -> None:
    q = calibrated(Outliers().eval(), data(8, rows=4), preset="plain")
    session = q._session.calibration
    assert session is not None
    kept = _kept(data(8, rows=4))
    part = OutputError(session._proxied).of_all_ranks(q.plan, kept, limit=1e-9)
    assert len(ran) == 8 + 1, "all in float, and one of them rounded"
    ran.clear()
    whole = OutputError(session._proxied).of_all_ranks(q.plan, kept)
    assert len(ran) == 8 + 8
    assert 1e-9 < part < whole
    assert OutputError(session._proxied).of_all_ranks(q.plan, kept, limit=whole) == whole


@pytest.mark.parametrize("make", [Mlp, ConvNet])
def test_the_error_is_that_of_simulated_rounding_where_integer_kernels_measure_it(
    make: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = make().eval()
    batches = [torch.randn(4, 3, 16, 16) for _ in range(3)] if make is ConvNet else data(3)
    q = calibrated(model, batches, preset="plain", backend="openvino")
    session = q._session.calibration
    assert session is not None
    measured = [OutputError(session._proxied).of_all_ranks(q.plan, _kept(batches))]
    monkeypatch.setattr("quantizer.proxy.lower.has_vnni", lambda: False)
    measured.append(OutputError(session._proxied).of_all_ranks(q.plan, _kept(batches)))
    assert measured[1] > 0
    assert measured[0] == pytest.approx(measured[1], rel=0.01)
    # The proxy of the calibration simulates rounding again.
    assert not [site for site in session._proxied.sites if isinstance(site, LoweredSite) or site.active]


def test_no_batch_runs_twice_in_float_or_with_one_plan(ran: list[bytes]) -> None:
    assert calibrated(Outliers().eval(), data(4)).plan
    assert len(ran) > 4 * 4, "several settings are compared on four batches"
    assert len(ran) == len(set(ran))


@pytest.mark.parametrize("field", ["scale", "smooth", "codes", "quantized", "dtype", "zero_point", "bias_shift"])
def test_a_plan_that_computes_something_else_is_measured_anew(field: str) -> None:
    def without(plan: Plan) -> Plan:
        path, entry = next((path, entry) for path, entry in plan.items() if entry.quantized)
        if field == "bias_shift":
            return {**plan, path: replace(entry, bias_shift=torch.ones(64))}
        (read, *others) = entry.operands
        changed: dict[str, Any] = {
            "scale": read.scale,
            "smooth": torch.ones(32),
            "codes": torch.ones(1),
            "quantized": False,
            "dtype": "uint8",
            "zero_point": 3,
        }
        scale = {"scale": 2 * changed["scale"]} if field == "scale" else {field: changed[field]}
        return {**plan, path: replace(entry, operands=(replace(read, **scale), *others))}

    plan = calibrated(Outliers().eval(), data(4), preset="plain").plan
    said = {path: replace(entry, reason="because", bias_note="so") for path, entry in plan.items()}
    assert plan_digest(plan) == plan_digest(said)
    assert plan_digest(plan) != plan_digest(without(plan))


# -- the batches that are kept -----------------------------------------------------------------------------------------


def _kept(batches: list[Tensor]) -> ReplayBatches:
    kept = ReplayBatches()
    for batch in batches:
        wanted = kept.wanted((batch,), {})
        if wanted is not None:
            kept.keep(*wanted)
    return kept


@pytest.mark.parametrize(("rows", "number"), [(1, 8), (12, 6), (16, 4), (100, 4)])
def test_enough_rows_are_kept_within_bounds(rows: int, number: int) -> None:
    batches = data(20, rows=rows)
    kept, again = _kept(batches), _kept(batches[::-1])
    assert len(kept) == number
    assert all(torch.equal(a[0][0], b[0][0]) for a, b in zip(kept, again, strict=True))


def test_the_halves_share_no_batch() -> None:
    one, other = _kept(data(20, rows=12)).halves()
    first, second = ({float(args[0].sum()) for args, _ in half} for half in (one, other))
    assert len(first) == len(second) == 3
    assert not first & second
    alone, same = _kept(data(1)).halves()
    assert len(alone) == len(same) == 1


# -- attention -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention over many tokens, to one of which some rows look alone: [rows, tokens, 32] to the same."""

    def __init__(self, peak: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.value, self.peak = nn.Linear(32, 32), nn.Linear(32, 32), peak
        self.out = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ x.transpose(-1, -2) * 0.02
        first = torch.zeros(x.shape[1], x.shape[1])
        first[0, 0] = self.peak
        return self.out(torch.softmax(scores + first, -1) @ self.value(x))


@pytest.mark.parametrize(("tokens", "peak", "left"), [(400, 30.0, True), (8, 0.0, False)])
def test_attention_that_costs_most_stays_float(
    tokens: int, peak: float, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[Sequence[Any]] = []
    original = range_search._Search.best_of

    def noted(self: Any, settings: Sequence[Any]) -> Any:
        again.append(settings)
        return original(self, settings)

    monkeypatch.setattr(range_search._Search, "best_of", noted)
    model = Attention(peak).eval()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, tokens, 32, generator=generator) for _ in range(6)]
    q = calibrated(model, batches, backend="openvino")
    products = [entry for entry in q.plan.values() if entry.kind == "matmul"]
    assert len(products) == 2
    for entry in products:
        assert entry.quantized != left
        assert entry.reason.startswith("quantizing the attention lowers the SQNR of the model's output by ") == left
    assert all(entry.quantized for entry in q.plan.values() if entry.kind == "linear")
    # Without these products other ranges may be better: calibrators are compared again.
    assert [sorted({setting.estimate for setting in settings}) for settings in again] == (
        [[0, 1, 2, 3]] if left else []
    )


@pytest.mark.parametrize(("width", "left"), [(32, False), (8192, True)], ids=["half of the work", "2% of the work"])
def test_attention_that_is_a_small_part_of_the_work_stays_float_for_a_smaller_gain(width: int, left: bool) -> None:
    """It costs about 0.6 dB; the wide layers add work, but nothing to the output."""

    class Wider(Attention):
        def __init__(self) -> None:
            super().__init__(peak=8.0)
            self.wide = nn.Sequential(nn.Linear(32, width), nn.Linear(width, 32))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.0 * self.wide(x)

    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 140, 32, generator=generator) for _ in range(6)]
    q = calibrated(Wider().eval(), batches, backend="openvino")
    products = [entry for entry in q.plan.values() if entry.kind == "matmul"]
    assert [entry.quantized for entry in products] == [not left] * 2


@pytest.mark.parametrize(("tokens", "left"), [(400, True), (100, False)], ids=["15 dB", "4 dB"])
def test_without_a_search_attention_stays_float_where_it_costs_much(tokens: int, left: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, tokens, 32, generator=generator) for _ in range(8)]
    q = calibrated(Attention(30.0).eval(), batches, backend="openvino", preset="fast")
    products = [entry for entry in q.plan.values() if entry.kind == "matmul"]
    assert [entry.quantized for entry in products] == [not left] * 2
    costs = "quantizing the attention lowers the SQNR of the model's output by "
    assert [entry.reason.startswith(costs) for entry in products] == [left] * 2


# -- zero points -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "expected"), [("openvino", "uint8"), ("onnxruntime-avx2", "uint8"), ("tensorrt", "int8")]
)
def test_a_zero_point_where_the_target_takes_one_at_no_cost(backend: str, expected: str) -> None:
    model, batches = Attention(0.0).eval(), [torch.randn(4, 8, 32) for _ in range(2)]
    formats = {
        entry.kind: entry.operands[0].dtype
        for entry in calibrated(model, batches, backend=backend).plan.values()
        if entry.quantized
    }
    assert formats["linear"] == expected
    assert formats.get("matmul", "int8") == "int8"
    for options in ({"formats": [{"activations": "int8"}]}, {"activations": {"zero_point": False}}):
        asked = calibrated(model, batches, backend=backend, **options)
        assert {o.dtype for entry in asked.plan.values() for o in entry.operands if entry.quantized} == {"int8"}


FORMATS: list[bool] = []
"""Whether each pass got images with channels last."""


class _Image(nn.Module):
    def __init__(self, views: bool) -> None:
        super().__init__()
        self.a, self.b, self.head, self.views = nn.Conv2d(8, 16, 3), nn.Conv2d(16, 8, 3), nn.Linear(8 * 144, 4), views

    def forward(self, x: Tensor) -> Tensor:
        FORMATS.append(not x.is_contiguous())
        x = self.b(torch.relu(self.a(x)))
        return self.head(x.view(len(x), -1) if self.views else x.flatten(1))


@pytest.mark.parametrize("views", [False, True])
def test_images_have_channels_last_where_the_model_takes_it(views: bool) -> None:
    torch.manual_seed(0)
    model, batches = _Image(views).eval(), [torch.randn(4, 8, 16, 16) for _ in range(4)]
    q = calibrated(model, batches, backend="openvino")
    FORMATS.clear()
    q.quantize(model)
    # A model that views its activations is tried once.
    assert sum(FORMATS) == 1 if views else sum(FORMATS) > len(FORMATS) / 2
    # What the user gave stays as it is.
    assert all(batch.is_contiguous() for batch in batches)


def test_the_error_does_not_depend_on_the_order_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, batches = _Image(False).eval(), [torch.randn(4, 8, 16, 16) for _ in range(4)]
    q = calibrated(model, batches, backend="openvino", preset="plain")
    session = q._session.calibration
    assert session is not None
    measured = [OutputError(session._proxied).of_all_ranks(q.plan, _kept(batches))]
    monkeypatch.setattr(replay, "_takes_channels_last", lambda *_: False)
    measured.append(OutputError(session._proxied).of_all_ranks(q.plan, _kept(batches)))
    assert measured[0] > 0
    assert measured[0] == pytest.approx(measured[1], rel=0.02)
