"""A batch counts as a whole or not at all, whatever becomes of it, and batches of several threads are told apart."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from helpers import Mlp, assert_same
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import _get_current_dispatch_mode
from toy_nets import net

from quantizer import Quantizer
from quantizer.errors import CalibrationError

OPTIONS: dict[str, Any] = {"backend": "openvino", "sites": {"residual_add": True}}


class Net(nn.Module):
    """Query and key read one tensor in some batches alone, and the pass ends early where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.query = nn.Linear(32, 32)
        self.key = nn.Linear(32, 32)
        self.last = nn.Linear(32, 32)
        self.end: BaseException | None = None

    def forward(self, x: Tensor, apart: bool = False) -> Tensor:
        h = self.first(x)
        scores = (self.query(h) @ self.key(h * 2 if apart else h).transpose(-1, -2)).softmax(-1)
        if self.end is not None:
            raise self.end
        return h + self.last(scores @ h)


def everything(q: Quantizer) -> tuple[Any, ...]:
    """All that a calibration says."""
    calibration = q._session.calibration
    assert calibration is not None
    seen = calibration.observation()
    kept = None if seen.kept is None else [sorted(keywords) for _, keywords in seen.kept]
    return str(q.ranges), str(q.coverage), q._session.seen(), kept


def calibrated(model: nn.Module, data: list[Any], **options: Any) -> Quantizer:
    return make_calibrated(model, data, **OPTIONS, **options)


def batches(count: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(2, 8, 32, generator=generator)} for _ in range(count)]


# -- a pass that does not end well ---------------------------------------------------------------------------------


@pytest.mark.parametrize("calibrator", ["max", "percentile", "auto"])
@pytest.mark.parametrize("end", [ZeroDivisionError("inside"), KeyboardInterrupt(), SystemExit()], ids=repr)
def test_what_a_failed_pass_saw_does_not_count(calibrator: str, end: BaseException) -> None:
    """Its ranges, histograms, counters, products, magnitudes, kept batches and groups are those of before."""
    model = Net().eval()
    data = batches()
    options = {"activations": {"calibrator": calibrator, "smoothquant_alpha": 0.5 if calibrator == "max" else None}}
    expected = everything(calibrated(model, data, **options))
    q = Quantizer(preset="plain", **OPTIONS, **options)
    proxy: Any = q.calib(model)
    for batch in data:
        proxy.end = end
        # Larger than float16 holds, and a scale of its own.
        with pytest.raises(type(end), match=str(end) or "^$"):
            proxy(batch["x"] * 1e5, apart=True)
        assert _get_current_dispatch_mode() is None
        assert not torch_modules._global_forward_hooks
        assert not torch_modules._global_forward_pre_hooks
        proxy.end = None
        proxy(**batch)
    assert everything(q) == expected


def test_a_refused_batch_does_not_count_and_the_rest_goes_on() -> None:
    model = Net().eval()
    data = batches()
    expected = everything(calibrated(model, data))
    q = Quantizer(preset="plain", **OPTIONS)
    # The input is finite and large; what the second product gives is not.
    with torch.no_grad(), pytest.raises(CalibrationError, match=r"batch 2 of .*: .* infinite value"):
        q.calibrate(model, [*data[:2], {"x": torch.full((2, 8, 32), 3e38)}, data[2]])
    q.calibrate(model, data[2:], resume=True)
    assert everything(q) == expected


def test_a_batch_that_is_interrupted_while_it_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    from quantizer.observe.range_group import RangeGroup

    model = Net().eval()
    data = batches()
    expected = everything(calibrated(model, data[:2]))
    q = Quantizer(preset="plain", **OPTIONS)
    proxy = q.calib(model)
    proxy(**data[0])
    proxy(**data[1])
    groups = []
    add = RangeGroup.add

    def interrupted(self: RangeGroup, other: RangeGroup) -> None:
        groups.append(other)
        if len(groups) == 2:
            raise KeyboardInterrupt
        add(self, other)

    with monkeypatch.context() as patch:
        patch.setattr(RangeGroup, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            proxy(**data[2])
    assert everything(q) == expected


# -- a calibration that does not end well ------------------------------------------------------------------------------


def _unfinished(end: BaseException, data: list[Any]) -> Any:
    yield from data
    raise end


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("end", [ZeroDivisionError("inside"), KeyboardInterrupt()], ids=repr)
def test_a_calibration_that_fails_leaves_the_one_before(end: BaseException, count: int, tmp_path: Any) -> None:
    model = Net().eval()
    q = calibrated(model, batches())
    q.amp(model)(**batches()[0])
    q.fallback(q.amp(model), names=["last"])
    expected, fallback = everything(q), q.chosen_fallback
    large = [{"x": batch["x"] * 50} for batch in batches(count)]
    expected_error = type(end) if isinstance(end, KeyboardInterrupt) else CalibrationError
    with pytest.raises(expected_error, match=str(end) or "^$"):
        q.calibrate(model, _unfinished(end, large))
    assert everything(q) == expected
    assert q.chosen_fallback is fallback
    loaded = Quantizer.load(q.save(tmp_path / "saved"))
    with pytest.raises(expected_error, match=str(end) or "^$"):
        loaded.calibrate(model, _unfinished(end, large))
    assert str(loaded.ranges) == str(q.ranges)
    q.calibrate(model, large or batches(1), resume=True)
    q.clear_fallback()
    assert everything(q) == everything(calibrated(model, [*batches(), *(large or batches(1))]))


def test_no_data_leaves_the_calibration_before() -> None:
    model = Net().eval()
    q = calibrated(model, batches())
    expected = everything(q)
    with pytest.raises(CalibrationError, match="the calibration data is empty"):
        q.calibrate(model, [])
    assert everything(q) == expected


def test_a_first_calibration_that_fails_can_be_resumed() -> None:
    model = Net().eval()
    data = batches()
    q = Quantizer(preset="plain", **OPTIONS)
    with pytest.raises(CalibrationError, match="failed after 2 batches, with ZeroDivisionError: inside"):
        q.calibrate(model, _unfinished(ZeroDivisionError("inside"), data[:2]))
    assert everything(q) == everything(calibrated(model, data[:2]))
    q.calibrate(model, data[2:], resume=True)
    assert everything(q) == everything(calibrated(model, data))


# -- threads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibrator", ["max", "percentile"])
def test_four_threads_give_what_one_gives(calibrator: str) -> None:
    model = Net().eval()
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(2, 8, 32, generator=generator) * (1 + place % 7) for place in range(50)]
    options = {"activations": {"calibrator": calibrator}}
    alone = calibrated(model, data, **options)
    for _ in range(3):
        q = Quantizer(preset="plain", **OPTIONS, **options)
        proxy = q.calib(model)
        with torch.no_grad():
            expected = [model(x) for x in data]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(proxy, data))
        assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))
        assert everything(q) == everything(alone)
    assert not torch_modules._global_forward_hooks


class Spreads(nn.Module):
    """Runs its branches in threads of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.barrier: threading.Barrier | None = None

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda branch: branch(x), self.branches))
        return torch.stack(found).sum(0)

    def __deepcopy__(self, memo: Any) -> Any:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        vars(made).update(
            {name: value if name == "barrier" else copy.deepcopy(value, memo) for name, value in vars(self).items()}
        )
        return made


def test_threads_of_the_model_are_part_of_its_pass() -> None:
    model = Spreads().eval()
    q = calibrated(model, [torch.randn(4, 16) for _ in range(3)])
    assert all(site.quantized for site in q.plan.values() if site.kind == "linear")


def test_threads_of_the_model_in_several_passes_are_refused() -> None:
    class Meets(Spreads):
        def forward(self, x: Tensor) -> Tensor:
            assert self.barrier is not None
            self.barrier.wait()
            try:
                return super().forward(x)
            finally:
                self.barrier.wait()

    model = Meets().eval()
    model.barrier = threading.Barrier(2, timeout=120)
    q = Quantizer(preset="plain", **OPTIONS)
    proxy = q.calib(model)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(proxy, torch.randn(4, 16)) for _ in range(2)]
        errors = [run.exception() for run in runs]
    assert all("so its batch is unknown" in str(error) for error in errors)


# -- ways of calling -----------------------------------------------------------------------------------------------


class Calls(nn.Module):
    """Has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def __call__(self, x: Tensor) -> Tensor:
        h: Tensor = self.up(x)
        return self.down(h.relu()) @ torch.ones(32, 32).to(x) + x


class CallsMore(Calls):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + self.up(x)[..., :32]


@pytest.mark.parametrize("kind", [Calls, CallsMore])
def test_a_model_with_a_call_and_no_forward(kind: type[nn.Module], tmp_path: Any) -> None:
    model = kind().eval()
    x = torch.randn(4, 32)
    with torch.no_grad():
        expected = model(x)
        q = Quantizer(preset="plain", **OPTIONS)
        assert_same(q.proxy(model)(x), expected)
        assert_same(q.calib(model)(x), expected)
        assert q.coverage.multiply_adds > 0
        frozen = q.quantize(model)
        rounded = frozen(x)
        assert 0 < float((rounded - expected).norm() / expected.norm()) < 0.1
        assert_same(pickle.loads(pickle.dumps(frozen))(x), rounded)
        amp = q.amp(model)
        assert_same(amp(x), expected)
        assert "up" in str(q.sensitivity)
    assert not hasattr(type(model), "_quantizer_original_class")


def test_a_call_around_torchs_own_is_observed() -> None:
    class Doubles(Mlp):
        def __call__(self, x: Tensor) -> Any:
            return super().__call__(x * 2)

    model, x = Doubles().eval(), torch.randn(4, 32)
    q = calibrated(model, [x], activations={"calibrator": "max"})
    found = next(operand for operand in q.plan["up.forward.linear_0"].operands if operand.name == "input")
    assert found.maximum == float((x * 2).max())


def test_a_model_that_calls_itself() -> None:
    q = calibrated(
        net("self(self.layer(x), depth - 1) if depth else x", "x, depth", layer=nn.Linear(16, 16)).eval(),
        [{"x": torch.randn(4, 16), "depth": 3}],
    )
    assert q.plan["layer.forward.linear_0"].quantized
    assert _get_current_dispatch_mode() is None


def test_a_part_that_runs_alone_is_no_batch() -> None:
    model = Net().eval()
    x = torch.randn(2, 8, 32)
    q = calibrated(model, [x])
    expected = everything(q)
    proxy: Any = q.calib(model, resume=True)
    proxy.first(x * 100)
    assert everything(q) == expected


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda proxy: pickle.loads(pickle.dumps(proxy))])
def test_a_copy_of_an_observing_proxy_observes_nothing(duplicate: Any) -> None:
    model, x = Mlp().eval(), torch.randn(4, 32)
    q = Quantizer(preset="plain", **OPTIONS)
    proxy = q.calib(model)
    proxy(x)
    expected = everything(q)
    twin = duplicate(proxy)
    with torch.no_grad():
        assert_same(twin(x * 100), model(x * 100))
    assert everything(q) == expected
    proxy(x * 100)
    assert everything(q) != expected


# -- weights that are no numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["first.weight", "last.weight"])
@pytest.mark.parametrize(("value", "said"), [(torch.nan, "nan"), (torch.inf, "inf"), (-torch.inf, "-inf")])
def test_a_weight_that_is_no_number_is_refused_by_its_name(name: str, value: float, said: str) -> None:
    """Also where no other site reads what it makes."""
    model = Net().eval()
    parameter = model.get_parameter(name)
    with torch.no_grad():
        parameter.view(-1)[3] = value
    q = Quantizer(preset="plain", **OPTIONS)
    with torch.no_grad(), pytest.raises(CalibrationError, match=rf"the weight '{name}', .* contains (?i:{said}), so"):
        q.calibrate(model, batches())
    with pytest.raises(CalibrationError, match="nothing was calibrated yet"):
        q.quantize(model)


def test_a_weight_that_becomes_no_number_between_batches() -> None:
    model = Net().eval()
    q = calibrated(model, batches(2))
    expected = everything(q)
    with torch.no_grad():
        model.last.weight[0, 0] = torch.nan
    with torch.no_grad(), pytest.raises(CalibrationError, match=r"the weight 'last.weight'"):
        q.calibrate(model, batches(3)[2:], resume=True)
    with torch.no_grad():
        model.last.weight[0, 0] = 0.1
    assert everything(q)[2] == expected[2]


def test_a_parameter_that_masks_is_no_weight() -> None:
    class Hides(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Parameter(torch.full((8, 8), -torch.inf).triu(1), requires_grad=False)

        def forward(self, x: Tensor, apart: bool = False) -> Tensor:
            found: Tensor = self.last((self.query(x) @ self.key(x).transpose(-1, -2) + self.mask).softmax(-1) @ x)
            return found

    assert calibrated(Hides().eval(), batches()).coverage.multiply_adds > 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_nothing_but_zeros_is_told_once(dtype: torch.dtype) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.last = nn.Embedding(10, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.last(self.embed(x.long()))
            return found

    model = Looks().eval()
    q = calibrated(model, [torch.zeros(2, 8, dtype=dtype)] * 3)
    with pytest.warns(UserWarning, match="all inputs of all 3 calibration batches are zero"):
        q.quantize(model)
    assert str(q.ranges)
    q.calibrate(model, [torch.ones(2, 8, dtype=dtype)], resume=True)
    assert str(q.ranges)
