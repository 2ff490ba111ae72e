"""Copies and pickles of proxies, in every mode: they compute the same, and nobody watches them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import ConvNet, Mlp
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.algorithms.qat.scales import MovingAverage
from quantizer.proxy.build import quantizers_of


def _saved(proxy: nn.Module) -> Any:
    data = io.BytesIO()
    torch.save(proxy, data)
    data.seek(0)
    return torch.load(data, weights_only=False)


def _normed() -> nn.Module:
    # A container of torch's as root, whose class stays what it is; a batch norm calls a method of its counter.
    return nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 16))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv and batch norm": (ConvNet, (4, 3, 16, 16)),
    "sequential": (_normed, (8, 32)),
    "residual": (Mlp, (8, 32)),
}


MODES = (
    *("off", "calibrating", "measuring", "frozen", "simulated"),
    *("training fixed", "training average", "training learned"),
)


def _proxy(mode: str, model: nn.Module, x: Tensor) -> nn.Module:
    q = Quantizer(preset="plain", backend="tensorrt" if mode == "simulated" else "openvino")
    if mode == "off":
        return q.proxy(model)
    calibrating = q.calib(model)
    calibrating(x)
    if mode == "calibrating":
        return calibrating
    if mode == "measuring":
        measuring = q.amp(model)
        measuring(x)
        return measuring
    if mode == "frozen":
        return q.quantize(model)
    if mode == "simulated":
        return q.simulate(model)
    scales: Any = mode.partition(" ")[2]
    return q.qat(model, scales=scales).eval()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _saved], ids=["deepcopy", "torch.save"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("net", NETS)
def test_a_copy_computes_the_same(net: str, mode: str, duplicate: Callable[[nn.Module], nn.Module]) -> None:
    make, shape = NETS[net]
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(shape)
    proxy = _proxy(mode, model, x)
    other = duplicate(proxy)
    with torch.no_grad():
        assert torch.equal(other(x), proxy(x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _saved], ids=["deepcopy", "torch.save"])
def test_a_copy_of_a_calibrating_proxy_is_not_observed(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model, x = Mlp().eval(), torch.randn(8, 32)
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    calibrating = q.calib(model)
    calibrating(x)
    ranges = {name: scale.clone() for name, scale in q.scales().items()}
    duplicate(calibrating)(100 * x)
    assert {name: float(scale.max()) for name, scale in q.scales().items()} == {
        name: float(scale.max()) for name, scale in ranges.items()
    }
    calibrating(100 * x)
    assert q.scales()["up.forward.linear_0.input"] > 50 * ranges["up.forward.linear_0.input"]


def test_the_scales_of_a_copy_in_training_follow_its_own_values_without_padding() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Any:
            return self.linear(x)

    model, x = Padded(), torch.randn(2, 4, 16)
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    q.calibrate(model.eval(), [x])
    proxy = q.qat(model, scales="average")
    other = copy.deepcopy(proxy)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    padded = x.clone()
    padded[1, 1:] = 1e4
    other(padded, attention_mask=mask)
    averages = {id(found.watcher): found.watcher for found in quantizers_of(other)}
    for average in averages.values():
        if isinstance(average, MovingAverage):
            average.step()
    scales = [float(found.scale.max()) for found in quantizers_of(other) if found.scale is not None]
    assert max(scales) < 1
    # The proxy that was copied saw nothing.
    assert [float(found.scale.max()) for found in quantizers_of(proxy) if found.scale is not None] == pytest.approx(
        [float(scale.max()) for scale in q.scales().values()]
    )
