"""What becomes of a calibration, and of a frozen model, when the weights change afterwards."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.errors import CalibrationError, ProxyError, TrainingError
from quantizer.plan.weight_scales import with_scales_of_weights

CHANGED = "of 4 parameters changed since the calibration"


def _net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).eval()


def _sqnr(output: Tensor, expected: Tensor) -> float:
    return float(10 * torch.log10(expected.square().sum() / (output - expected).square().sum()).detach())


X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def _replaced(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(model[2].weight.detach() * 4)


def _assigned(model: nn.Sequential) -> None:
    state = model.state_dict()
    model.load_state_dict({**state, "2.weight": state["2.weight"] * 4}, assign=True)


def _swapped(model: nn.Sequential) -> None:
    linear = nn.Linear(64, 16)
    with torch.no_grad():
        linear.weight.mul_(4)
    model[2] = linear


def _in_place(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[2].weight.mul_(4)


def _through_data(model: nn.Sequential) -> None:
    model[2].weight.data.mul_(4)


# -- scales of weights belong to the weights that are frozen -------------------------------------------------------


@pytest.mark.parametrize("change", [_replaced, _assigned, _swapped, _in_place, _through_data])
def test_a_weight_that_changes_after_calibration_is_frozen_with_its_own_scales(change: Callable[..., None]) -> None:
    model = _net()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    before = _sqnr(q.quantize(model)(X), model(X))
    change(model)
    with pytest.warns(UserWarning, match=CHANGED):
        frozen = q.quantize(model)
    assert _sqnr(frozen(X), model(X)) > before - 2
    with pytest.warns(UserWarning, match=CHANGED):
        measuring = q.amp(model)
    measuring(X)
    with pytest.warns(UserWarning, match=CHANGED):
        training = q.qat(model).eval()
    with torch.no_grad():
        assert torch.equal(training(X), frozen(X))


def test_unchanged_weights_and_casts_are_not_warned_of() -> None:
    model = _net()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q.quantize(model)
        model.to(torch.bfloat16)
        q.quantize(model)


def test_a_loaded_calibration_warns_of_other_weights_and_rescales(tmp_path: Path) -> None:
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(_net(), [X])
    q.save(tmp_path / "q")
    other = _net()
    _in_place(other)
    loaded = Quantizer.load(tmp_path / "q")
    with pytest.warns(UserWarning, match=f"1 {CHANGED}, the first is 2.weight"):
        frozen = loaded.quantize(other)
    assert _sqnr(frozen(X), other(X)) > 35


def test_a_loaded_calibration_refuses_other_shapes(tmp_path: Path) -> None:
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(_net(), [X])
    q.save(tmp_path / "q")
    other = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)).eval()
    with pytest.raises(CalibrationError, match=r"another model: .* of 0\.weight was \[64, 32\] and is \[48, 32\]"):
        Quantizer.load(tmp_path / "q").quantize(other)


def test_a_folder_without_a_fingerprint_refuses_what_its_scales_do_not_fit(tmp_path: Path) -> None:
    import yaml

    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(_net(), [X])
    q.save(tmp_path / "q")
    file = tmp_path / "q" / "quantizer.yaml"
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    document["fingerprint"] = None
    file.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    loaded = Quantizer.load(tmp_path / "q")
    assert torch.equal(loaded.quantize(_net())(X), q.quantize(_kept_model(q))(X))
    other = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)).eval()
    with pytest.raises(CalibrationError, match=r"0\.weight has the shape \[48, 32\], which does not fit its scales"):
        Quantizer.load(tmp_path / "q").quantize(other)


def test_a_part_of_a_parameter_that_became_smaller_is_refused() -> None:
    model: Any = net("F.linear(x, self.packed[16:])", packed=nn.Parameter(torch.randn(48, 32))).eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    smaller = net("F.linear(x, self.packed[16:])", packed=nn.Parameter(torch.randn(24, 32))).eval()
    with pytest.raises(CalibrationError, match=r"packed has the shape \[24, 32\], which does not fit its scales"):
        with_scales_of_weights(q.plan, smaller, torch.float32, None)


def _kept_model(q: Quantizer) -> Any:
    found = q._session._model
    assert found is not None
    return found() or _net()


def test_a_parameter_of_another_shape_after_calibration_is_an_error() -> None:
    model = _net()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    model[2] = nn.Linear(64, 20)
    with pytest.raises(CalibrationError, match=r"2\.weight of .* had the shape \[16, 64\], and has \[20, 64\] now"):
        q.quantize(model)


def test_going_on_after_a_weight_was_replaced_observes_the_new_one() -> None:
    model = _net()
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    q.calibrate(model, [X])
    model[0].weight = nn.Parameter(model[0].weight.detach() * 8)
    with pytest.warns(UserWarning, match=CHANGED):
        q.calibrate(model, [X], resume=True)
    frozen = q.quantize(model)
    assert _sqnr(frozen(X), model(X)) > 30


def test_given_scales_stay_when_the_weight_changes() -> None:
    model = _net()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    given = q.scales()["2.forward.linear_0.weight"] * 1.5
    q.load_scales({"2.forward.linear_0.weight": given})
    _in_place(model)
    with pytest.warns(UserWarning, match=CHANGED):
        frozen: Any = q.quantize(model)
    scales = {name: value for name, value in frozen.state_dict().items() if name.endswith("_weight_quantizer.scale")}
    assert torch.equal(scales[next(name for name in scales if name.startswith("2."))], given)


def test_scales_of_a_training_are_those_that_it_trained_with(tmp_path: Path) -> None:
    model = _net()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    proxy = q.qat(model)
    optimizer = torch.optim.SGD(proxy.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        proxy(X).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        expected = proxy.eval()(X)
        assert torch.equal(q.quantize(model)(X), expected)
        q.save(tmp_path / "q")
        with warnings.catch_warnings():
            # The weights are those that were trained, and calibration saw others.
            warnings.simplefilter("ignore")
            assert torch.equal(Quantizer.load(tmp_path / "q").quantize(model)(X), expected)


def test_parameters_that_are_replaced_in_a_training_are_an_error() -> None:
    model = _net()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    q.qat(model)
    _replaced(model)
    with pytest.raises(TrainingError, match=r"1 parameters of the model were replaced since qat\(\), .* 2\.weight"):
        q.quantize(model)


def test_a_weight_with_nan_is_refused_by_its_name() -> None:
    model = _net()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    with torch.no_grad():
        model[2].weight[3, 5] = torch.nan
    with pytest.raises(CalibrationError, match=r"2\.weight: the weight has NaN"):
        q.quantize(model)


# -- what is frozen is frozen --------------------------------------------------------------------------------------


def _table() -> nn.Module:
    return net(
        "self.linear(self.norm(self.table(ids))) + self.shift",
        "ids",
        table=nn.Embedding(4000, 32),
        norm=nn.LayerNorm(32),
        linear=nn.Linear(32, 64),
        shift=torch.ones(64),
    )


IDS = torch.randint(0, 4000, (4, 8), generator=torch.Generator().manual_seed(2))


def test_training_the_model_leaves_what_was_frozen() -> None:
    model = _table().eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [IDS])
    frozen = q.quantize(model)
    expected = frozen(IDS)
    with torch.no_grad():
        model.linear.bias.add_(1)
        model.linear.weight.mul_(2)
        model.norm.weight.mul_(2)
        model.shift.add_(3)
    assert torch.equal(frozen(IDS), expected)
    shared = {id(parameter) for parameter in model.parameters()} & {id(p) for p in frozen.parameters()}
    assert shared == {id(model.table.weight)}


@pytest.mark.parametrize("verb", ["quantize", "amp"])
@pytest.mark.parametrize("through_data", [False, True], ids=["in place", "through .data"])
def test_a_large_table_that_changes_is_noticed(verb: str, through_data: bool) -> None:
    model = _table().eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [IDS])
    proxy = getattr(q, verb)(model)
    kept = copy.deepcopy(proxy)
    with torch.no_grad():
        expected = proxy(IDS)
        (model.table.weight.data if through_data else model.table.weight).mul_(2)
    with pytest.raises(
        ProxyError, match=rf"table\.weight changed since {verb}\(model\): .* call {verb}\(model\) again"
    ):
        proxy(IDS)
    with torch.no_grad():
        assert torch.equal(kept(IDS), expected)


def test_a_table_whose_own_module_is_never_called_is_watched_too() -> None:
    table = nn.Embedding(4000, 32)
    model = net("self.linear(nn.functional.embedding(ids, self.table.weight))", "ids", table=table, linear=linear())
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model.eval(), [IDS])
    frozen = q.quantize(model)
    with torch.no_grad():
        table.weight.mul_(2)
    with pytest.raises(ProxyError, match=r"table\.weight changed since quantize\(model\)"):
        frozen(IDS)


def test_a_frozen_model_may_change_the_bias_that_it_copied() -> None:
    q = Quantizer(preset="plain", backend="openvino")
    model = _net()
    q.calibrate(model, [X])
    frozen: Any = q.quantize(model)
    expected = frozen(X) + 1
    with torch.no_grad():
        frozen[2].bias.add_(1)
    torch.testing.assert_close(frozen(X), expected)


@pytest.mark.parametrize("alive", [True, False])
def test_a_parameter_that_was_put_into_a_frozen_model_is_not_watched(alive: bool) -> None:
    model: Any = _table().eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [IDS])
    frozen: Any = q.quantize(model)
    expected = frozen(IDS).detach()
    frozen.table.weight = nn.Parameter(model.table.weight.detach().clone())
    if not alive:
        former = weakref.ref(model.table.weight)
        model = q = None  # type: ignore[assignment]
        gc.collect()
        assert former() is None
    assert torch.equal(frozen(IDS), expected)
    with torch.no_grad():
        frozen.table.weight.neg_()
    assert not torch.equal(frozen(IDS), expected)


def test_a_cast_ends_the_sharing_and_the_watch() -> None:
    model = _table().eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [IDS])
    frozen = q.quantize(model).to(torch.bfloat16)
    expected = frozen(IDS)
    with torch.no_grad():
        model.table.weight.mul_(2)
    assert torch.equal(frozen(IDS), expected)


def test_an_amp_proxy_notices_a_training() -> None:
    model = _net()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    measuring = q.amp(model)
    measuring(X)
    _in_place(model)
    with pytest.raises(ProxyError, match=r"2\.weight changed since amp\(model\)"):
        measuring(X)


# -- a weight that is read outside of its site ---------------------------------------------------------------------


def _normed() -> nn.Module:
    """Multiplies by the norm of a weight, which is no product and no site."""
    return net("self.second(self.first(x) * self.first.weight.norm())", first=linear(), second=linear())


@pytest.mark.parametrize("hooked", [False, True])
def test_a_weight_that_is_read_outside_of_its_site_is_float_there(hooked: bool, tmp_path: Path) -> None:
    model: Any = _normed().eval()
    if hooked:
        model.second.register_forward_hook(lambda module, args, result: result * module.weight[0, 0])
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    frozen: Any = q.quantize(model)
    assert torch.equal(q.for_backend("onnxruntime").quantize(model).first.weight, model.first.weight)
    with torch.no_grad():
        assert torch.equal(frozen(X), q.qat(model).eval()(X))
    assert torch.equal(frozen.first.weight, model.first.weight)
    assert ("weight" in frozen.second._parameters) == hooked
    reason = next(row.reason for row in q.coverage.rows if row.name == "first.forward.linear_0")
    assert "weight: also read in float outside of its site, <toy_net_" in reason
    q.save(tmp_path / "q")
    assert torch.equal(Quantizer.load(tmp_path / "q").quantize(model)(X), frozen(X))


# -- nothing to quantize -------------------------------------------------------------------------------------------


def test_a_plan_in_which_nothing_is_quantized_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = _net()
    q = Quantizer(preset="plain", backend="openvino", exclude={"module_types": ["Linear"]})
    q.calibrate(model, [X])
    frozen = q.quantize(model)
    assert "nothing is quantized, so quantize() returns the float model (2 of 2 sites: excluded" in caplog.text
    assert torch.equal(frozen(X), model(X))
