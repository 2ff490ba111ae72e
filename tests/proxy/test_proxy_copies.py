"""Copies and pickles of proxies, in every mode: they compute the same, and nobody watches them."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from helpers import ConvNet
from torch import nn
from toy_nets import net

from quantizer import Quantizer
from quantizer.algorithms.qat.scales import MovingAverage
from quantizer.proxy.build import quantizers_of


@pytest.mark.parametrize("mode", ["simulated", "average", "learned"])
def test_a_copy_computes_the_same(mode: str) -> None:
    """The other modes are those of any model: tests/property holds them."""
    model, x = ConvNet().eval(), torch.randn(4, 3, 16, 16)
    q = Quantizer(preset="plain", backend="tensorrt" if mode == "simulated" else "openvino")
    q.calibrate(model, [x])
    proxy = q.simulate(model) if mode == "simulated" else q.qat(model, scales=mode).eval()
    saved = io.BytesIO()
    torch.save(proxy, saved)
    saved.seek(0)
    with torch.no_grad():
        for other in (copy.deepcopy(proxy), torch.load(saved, weights_only=False)):
            assert torch.equal(other(x), proxy(x))


def test_the_scales_of_a_copy_in_training_follow_its_own_values_without_padding() -> None:
    model, x = net("self.linear(x)", "x, attention_mask=None", linear=nn.Linear(16, 16)), torch.randn(2, 4, 16)
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
