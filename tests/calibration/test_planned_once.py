"""A plan is made once, and again for what changed since: batches, weights however they were written, the backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import Mlp
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.algorithms import calibration_session
from quantizer.plan import weight_scales
from quantizer.plan.apply import frozen_proxy
from quantizer.plan.site_plan import Plan
from quantizer.utils.fingerprint import TensorStamp

UP = "up.forward.linear_0"
DOWN = "down.forward.linear_0"


class Counted:
    """A calibrated quantizer, with the plans that it made and the weights that it scaled since the last question."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, width: int = 32) -> None:
        torch.manual_seed(0)
        self.model = Mlp(width).eval()
        self.batches = [torch.randn(16, width) for _ in range(3)]
        self._plans, self._weights = 0, 0
        make_plan, scaled_for = calibration_session.make_plan, weight_scales.scaled_for

        def counted_plan(*args: object) -> Plan:
            self._plans += 1
            return make_plan(*args)  # type: ignore[arg-type]

        def counted_weight(*args: object) -> object:
            self._weights += 1
            return scaled_for(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(calibration_session, "make_plan", counted_plan)
        monkeypatch.setattr(weight_scales, "scaled_for", counted_weight)
        self.q = self.calibrated()

    def calibrated(self, backend: str = "openvino", batches: int = 2) -> Quantizer:
        q = Quantizer(preset="plain", backend=backend, activations={"calibrator": "max"})
        q.calibrate(self.model, self.batches[:batches], progress=False)
        return q

    def since(self) -> tuple[int, int]:
        """Return how many plans were made and weights were scaled since the last call of this."""
        counted = self._plans, self._weights
        self._plans, self._weights = 0, 0
        return counted

    def is_anew(self, q: Quantizer | None = None, backend: str = "openvino", batches: int = 2) -> bool:
        """Return whether all scales equal those of a calibration from nothing on the model as it is."""
        return _same((q or self.q).scales(), self.calibrated(backend, batches).scales())


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(scale, other[name]) for name, scale in one.items())


def _of_weights(scales: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: scale for name, scale in scales.items() if name.endswith(".weight")}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def test_one_plan_serves_all_verbs(counted: Counted, tmp_path: Path) -> None:
    q, model = counted.q, counted.model
    print(q.plan, q.ranges, q.coverage)
    assert counted.since() == (1, 2)
    q.scales()
    q.save(tmp_path / "saved")
    q.quantize(model)
    q.amp(model)
    q.qat(model, copy=True)
    print(q.plan, q.ranges, q.coverage)
    assert counted.since() == (0, 0)


def _in_place(model: Mlp) -> None:
    with torch.no_grad():
        model.up.weight.mul_(2)


def _by_data(model: Mlp) -> None:
    model.up.weight.data.mul_(2)


def _one_by_numpy(model: Mlp) -> None:
    model.up.weight.detach().numpy()[37, 5] = 9.0


def _other_data(model: Mlp) -> None:
    model.up.weight.data = model.up.weight.data * 2


def _replaced(model: Mlp) -> None:
    model.up.weight = nn.Parameter(model.up.weight.detach() * 2)


def _loaded(model: Mlp) -> None:
    model.load_state_dict({**model.state_dict(), "up.weight": model.up.weight.detach() * 2})


def _trained(model: Mlp) -> None:
    model.up.weight.grad = torch.ones_like(model.up.weight)
    torch.optim.SGD([model.up.weight], lr=0.1).step()
    model.up.weight.grad = None


CHANGES = (_in_place, _by_data, _one_by_numpy, _other_data, _replaced, _loaded, _trained)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_weight_that_changed_is_planned_again_alone(change: Callable[[Mlp], None], counted: Counted) -> None:
    before = counted.q.scales()
    counted.since()
    change(counted.model)
    after = counted.q.scales()
    # A state dict is copied into all of them.
    assert counted.since() == (1, 2 if change is _loaded else 1)
    assert not torch.equal(before[f"{UP}.weight"], after[f"{UP}.weight"])
    assert torch.equal(before[f"{DOWN}.weight"], after[f"{DOWN}.weight"])
    # The ranges of activations stay those of the former weights.
    assert _same(_of_weights(after), _of_weights(counted.calibrated().scales()))


@pytest.mark.filterwarnings("ignore:1 of 4 parameters changed since the calibration:UserWarning")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_weight_that_changed_after_the_plan_is_quantized_as_it_is(
    change: Callable[[Mlp], None], counted: Counted
) -> None:
    x = counted.batches[0]
    before = counted.q.quantize(counted.model)(x)
    change(counted.model)
    after = counted.q.quantize(counted.model)
    assert not torch.equal(before, after(x))
    # The ranges of activations stay those of the former weights.
    plan = weight_scales.with_scales_of_weights(counted.q.plan, counted.model, torch.float32, None)
    assert torch.equal(after(x), frozen_proxy(counted.model, plan)(x))


def test_a_bias_changes_no_plan(counted: Counted) -> None:
    before = counted.q.plan
    counted.since()
    counted.model.up.bias.data.add_(1)
    assert counted.q.plan == before
    assert counted.since() == (0, 0)


def test_more_batches_make_a_new_plan(counted: Counted) -> None:
    print(counted.q.plan)
    counted.since()
    counted.q.calibrate(counted.model, [4 * counted.batches[2]], resume=True, progress=False)
    counted.batches[2] = 4 * counted.batches[2]
    print(counted.q.plan)
    plans, weights = counted.since()
    assert (plans, weights) == (1, 0)
    assert counted.is_anew(batches=3)


def test_a_fallback_needs_no_new_plan_and_can_be_undone(counted: Counted) -> None:
    q = counted.q
    amp = q.amp(counted.model)
    amp(counted.batches[0])
    before = q.scales()
    counted.since()
    q.fallback(amp, num=1)
    assert before.keys() > q.scales().keys()
    q.clear_fallback()
    assert q.scales().keys() == before.keys()
    assert counted.since() == (0, 0)


def test_another_backend_has_a_plan_of_its_own(counted: Counted) -> None:
    first = counted.q.scales()
    other = counted.q.for_backend("tensorrt")
    assert not _same(other.scales(), first)
    assert counted.is_anew(other, "tensorrt")
    assert _same(counted.q.scales(), first)


def test_what_a_caller_does_with_a_plan_is_not_in_the_next_one(counted: Counted) -> None:
    plan = counted.q.plan
    scale = plan[UP].operands[1].scale
    assert scale is not None
    scale.mul_(3)
    del plan[DOWN]
    assert counted.q.plan.keys() > plan.keys()
    assert counted.is_anew()


# -- stamps ------------------------------------------------------------------------------------------------------------


def _swap_rows(x: Tensor) -> None:
    x.copy_(x[[1, 0, *range(2, len(x))]])


def _swap_columns(x: Tensor) -> None:
    x.copy_(x[:, [2, 3, 0, 1, *range(4, x.shape[1])]])


def _reverse(x: Tensor) -> None:
    x.copy_(x.flip(0))


def _negate(x: Tensor) -> None:
    x.neg_()


def _last_bit(x: Tensor) -> None:
    x.view(torch.uint8).view(-1)[12345] ^= 1


def _very_last(x: Tensor) -> None:
    x.view(-1)[-1] = 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1024, 1024), (2036, 1018), (300, 40)], ids=str)
@pytest.mark.parametrize(
    "write",
    [_swap_rows, _swap_columns, _reverse, _negate, _last_bit, _very_last],
    ids=lambda write: write.__name__.strip("_"),
)
def test_a_stamp_sees_what_data_writes(
    write: Callable[[Tensor], None], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape).to(dtype))
    before = TensorStamp.of(parameter)
    assert TensorStamp.of(parameter) == before
    write(parameter.data)
    after = TensorStamp.of(parameter)
    assert after.version == before.version
    assert after.place == before.place
    assert after.values != before.values


def test_tensors_that_cannot_be_read_never_have_the_stamp_of_before() -> None:
    class Other(Tensor):
        pass

    sparse, other = torch.eye(3).to_sparse(), torch.ones(3).as_subclass(Other)
    assert TensorStamp.of(sparse) != TensorStamp.of(sparse)
    assert TensorStamp.of(other) != TensorStamp.of(other)
    meta = torch.empty(3, device="meta")
    assert TensorStamp.of(meta) == TensorStamp.of(meta)


@pytest.mark.parametrize("x", [torch.empty(0), torch.ones(()), torch.ones(4, 6).t(), torch.ones(2, 3, 4)[:, 1:]])
def test_a_tensor_of_any_layout_has_a_stamp(x: Tensor) -> None:
    before = TensorStamp.of(x)
    assert TensorStamp.of(x) == before
    x.data.mul_(2)
    assert (TensorStamp.of(x) != before) == (x.numel() > 0)
