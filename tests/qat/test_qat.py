"""``qat()``: what is trained, what comes of it, and what is refused."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from torch import Tensor, nn
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.errors import CalibrationError, ConfigError, ProxyError
from quantizer.numerics.rounding import GAIN
from quantizer.proxy.build import sites_of


def twice() -> nn.Module:
    """Two linears that read one tensor, a product of two activations, and a residual add."""
    torch.manual_seed(0)
    return net(
        "mixed = (self.query(x) @ self.key(x).transpose(-1, -2)).softmax(-1) @ x; return self.last(mixed) + x",
        query=linear(),
        key=linear(),
        last=linear(),
    )


def data(seed: int = 1) -> Tensor:
    return torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(seed))


def calibrated(model: nn.Module, **config: Any) -> Quantizer:
    return make_calibrated(model, [data()], backend="openvino", sites={"residual_add": True}, **config)


def train(proxy: nn.Module, steps: int = 5, lr: float = 0.01) -> list[float]:
    """Teach the proxy to give zeros; the losses."""
    optimizer = torch.optim.SGD(proxy.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        loss = proxy(data(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("scales", ["fixed", "learned"])
def test_before_a_step_it_is_the_frozen_model(scales: Any) -> None:
    model = twice().eval()
    quantizer = calibrated(model)
    frozen, proxy = quantizer.quantize(model), quantizer.qat(model, scales=scales)
    assert not proxy.training
    assert torch.equal(proxy(data(2)), frozen(data(2)))
    assert not torch.equal(proxy(data(2)), model(data(2)))


@pytest.mark.parametrize("scales", ["fixed", "learned"])
def test_training_the_proxy_trains_the_model(scales: Any) -> None:
    model = twice().train()
    quantizer = calibrated(model)
    before = copy.deepcopy(model.state_dict())
    ranges = {name: scale.clone() for name, scale in quantizer.scales().items()}
    proxy = quantizer.qat(model, scales=scales)
    assert proxy.training
    losses = train(proxy)
    assert losses[-1] < losses[0]
    # A softmax does not see what the key's bias adds to all scores of a row.
    changed = {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}
    assert changed >= set(before) - {"key.bias"}
    assert {id(p) for p in model.parameters()} <= {id(p) for p in proxy.parameters()}
    frozen, proxy = quantizer.quantize(model), proxy.eval()
    assert torch.equal(frozen(data(9)), proxy(data(9)))
    moved = [name for name, scale in quantizer.scales().items() if not torch.equal(scale, ranges[name])]
    assert bool(moved) == (scales == "learned")


def test_a_copy_is_trained_and_the_model_left_alone() -> None:
    model = twice().train()
    quantizer = calibrated(model)
    before, frozen = copy.deepcopy(model.state_dict()), quantizer.quantize(model)
    proxy = quantizer.qat(model, copy=True)
    train(proxy)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    trained = quantizer.quantize(model)
    assert torch.equal(trained(data(9)), proxy.eval()(data(9)))
    assert not torch.equal(trained(data(9)), frozen(data(9)))


def test_what_is_measured_after_a_training_is_the_copy_that_was_trained() -> None:
    model = twice().train()
    quantizer = calibrated(model)
    proxy = quantizer.qat(model, copy=True)
    train(proxy)
    amp = quantizer.amp(model)
    assert not torch.equal(amp(data(9)), model.eval()(data(9)))
    quantizer.fallback(amp, ratio=1.0)
    assert torch.equal(amp(data(9)), quantizer.quantize(model)(data(9)))


@pytest.mark.parametrize("own", [True, False])
def test_a_second_training_starts_from_the_calibrated_ranges(own: bool) -> None:
    model = twice().train()
    quantizer = calibrated(model)
    before = quantizer.scales()
    train(quantizer.qat(model, scales="learned", copy=own))
    assert any(not torch.equal(before[name], scale) for name, scale in quantizer.scales().items())
    again = quantizer.qat(model, scales="learned", copy=own)
    for name, scale in quantizer.scales().items():
        # The range of a weight is that of the weight as it is.
        if own or not name.endswith(".weight"):
            assert torch.equal(before[name], scale), name
    assert torch.equal(again.eval()(data(9)), quantizer.quantize(model)(data(9)))


def test_what_was_learned_is_saved(tmp_path: Any) -> None:
    model = twice().eval()
    quantizer = calibrated(model)
    train(quantizer.qat(model, scales="learned"))
    expected = quantizer.quantize(model)(data(9))
    loaded = Quantizer.load(quantizer.save(tmp_path / "saved"))
    assert torch.equal(loaded.quantize(model)(data(9)), expected)


@pytest.mark.parametrize("scales", ["fixed", "learned"])
def test_what_was_learned_is_for_one_backend(scales: Any) -> None:
    model = twice().eval()
    quantizer = calibrated(model)
    proxy = quantizer.qat(model, scales=scales)
    train(proxy, steps=1)
    with pytest.raises(CalibrationError, match=r"come from load_scales\(\) or qat\(\)"):
        quantizer.for_backend("onnxruntime")
    train(proxy, steps=1)
    assert torch.equal(quantizer.quantize(model)(data(9)), proxy(data(9)))


def test_operands_of_one_tensor_learn_one_scale() -> None:
    model = twice().eval()
    quantizer = calibrated(model)
    proxy = quantizer.qat(model, scales="learned")
    sites = {site.path: site for site in sites_of(proxy)}
    query, key = (sites[f"{name}.forward.linear_0"].quantizer_of("input") for name in ("query", "key"))
    assert query.change is key.change is not None
    train(proxy, steps=2)
    scales = quantizer.scales()
    assert torch.equal(scales["query.forward.linear_0.input"], scales["key.forward.linear_0.input"])


def test_what_fell_back_is_trained_in_float() -> None:
    model = twice().eval()
    quantizer = calibrated(model)
    amp = quantizer.amp(model)
    amp(data())
    chosen = quantizer.fallback(amp, num=2)
    proxy = quantizer.qat(model)
    train(proxy, steps=2)
    assert torch.equal(quantizer.quantize(model)(data(9)), proxy(data(9)))
    assert quantizer.chosen_fallback is chosen
    quantizer.clear_fallback()
    assert not torch.equal(quantizer.quantize(model)(data(9)), proxy(data(9)))


def test_without_calibration_the_first_batches_give_the_ranges(caplog: pytest.LogCaptureFixture) -> None:
    model = twice().eval()
    first, other = Quantizer(preset="plain", backend="openvino"), Quantizer(preset="plain", backend="openvino")
    with caplog.at_level(logging.WARNING, logger="quantizer"):
        proxy = first.qat(model)
    assert "nothing was calibrated, so the first 8 batches determine the ranges" in caplog.text
    batches = [data(seed) for seed in range(8)]
    for batch in batches:
        proxy(batch)
    other.calibrate(model, batches, progress=False)
    later = data(50) * 100
    assert torch.equal(proxy(later), other.quantize(model)(later))
    assert torch.equal(first.quantize(model)(later), other.quantize(model)(later))
    with pytest.raises(CalibrationError, match=r"before qat\(\)"):
        Quantizer(preset="plain").qat(model, scales="learned")


def test_there_are_three_kinds_of_scales() -> None:
    with pytest.raises(ConfigError, match="1 problem in the configuration") as told:
        Quantizer(preset="plain").qat(twice(), scales="nonsense")  # type: ignore[arg-type]
    assert told.value.problems == (
        "qat(scales='nonsense'): unknown kind 'nonsense'; expected fixed, average, learned, or a mapping from patterns "
        "to these",
    )


def test_nothing_trained_and_nothing_calibrated() -> None:
    model = twice().eval()
    quantizer = Quantizer(preset="plain")
    quantizer.qat(model)
    with pytest.raises(CalibrationError, match="nothing was calibrated"):
        quantizer.quantize(model)


def test_proxies_are_not_trained() -> None:
    model = twice().eval()
    quantizer = calibrated(model)
    with pytest.raises(ProxyError, match="pass the float model"):
        quantizer.qat(quantizer.quantize(model))
    proxy = quantizer.qat(model)
    with pytest.raises(ProxyError, match=r"export\(\) expects the model that quantize\(\) returned"):
        quantizer.export(proxy, "model.onnx", data())


def test_adam_moves_small_scales_by_a_share() -> None:
    model = twice().train()
    quantizer = calibrated(model)
    before = quantizer.scales()
    proxy = quantizer.qat(model, scales="learned")
    optimizer = torch.optim.AdamW(proxy.parameters(), lr=0.01 / GAIN, weight_decay=0)
    for step in range(5):
        proxy(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, scale in quantizer.scales().items():
        assert bool(((scale / before[name]).log().abs() <= 0.0501).all()), name


def test_a_scale_that_training_ruined_is_named() -> None:
    model = twice().eval()
    quantizer = calibrated(model)
    proxy = quantizer.qat(model, scales="learned")
    site = next(site for site in sites_of(proxy) if site.path == "last.forward.linear_0")
    with torch.no_grad():
        change = site.quantizer_of("input").change
        assert change is not None
        change.fill_(float("nan"))
    with pytest.raises(CalibrationError, match=r"last\.forward\.linear_0\.input.*scales must be positive and finite"):
        quantizer.quantize(model)
