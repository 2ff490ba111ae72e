"""Kinds of scales: which operand has which, how averages move, and how a schedule fixes them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from calibrated import make_calibrated
from helpers import ConvNet
from torch import Tensor, nn
from toy_nets import net

from quantizer import Quantizer
from quantizer.algorithms.qat import Schedule
from quantizer.algorithms.qat.scales import MOMENTUM, least_scale
from quantizer.errors import CalibrationError, ConfigError, ProxyError, QuantizerError
from quantizer.numerics.formats import QTYPES
from quantizer.proxy.build import sites_of
from quantizer.proxy.operand_quantizer import OperandQuantizer


def residual_net() -> nn.Module:
    """Two linears that read one tensor, and a residual add."""
    torch.manual_seed(0)
    return net(
        "self.query(x) * self.key(x) + x", "x, attention_mask=None", query=nn.Linear(16, 16), key=nn.Linear(16, 16)
    )


def data(seed: int = 1, size: float = 1.0) -> Tensor:
    return size * torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(seed))


def calibrated(model: nn.Module, x: Tensor | None = None, **config: Any) -> Quantizer:
    return make_calibrated(
        model, [data() if x is None else x], **{"backend": "openvino", "sites": {"residual_add": True}} | config
    )


def quantizers(proxy: nn.Module) -> dict[str, OperandQuantizer]:
    return {
        f"{site.path}.{operand.name}": site.quantizer_of(operand.name)
        for site in sites_of(proxy)
        for operand in site.operation.operands
    }


def optimize(proxy: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    proxy(x).square().mean().backward()
    optimizer.step()


def test_averages_go_a_tenth_of_the_way_to_the_values_of_a_step() -> None:
    model = residual_net().eval()
    quantizer = calibrated(model, activations={"calibrator": "max"})
    before = quantizer.scales()
    proxy = quantizer.qat(model, scales="average")
    schedule = Schedule(proxy, 100)
    twice, more = data(2, 2.0), data(3, 3.0)
    for x in (twice, more):  # one step of two batches whose gradients are summed
        proxy(x).sum().backward()
    assert all(torch.equal(before[name], scale) for name, scale in quantizer.scales().items())
    schedule.at(1)
    after = quantizer.scales()
    name = "query.forward.linear_0"
    needed = torch.maximum(twice.abs().amax(), more.abs().amax()) / 127
    torch.testing.assert_close(
        after[f"{name}.input"], MOMENTUM * before[f"{name}.input"] + (1 - MOMENTUM) * needed, rtol=1e-6, atol=0
    )
    # The weight did not move, and neither does its range.
    torch.testing.assert_close(after[f"{name}.weight"], before[f"{name}.weight"], rtol=1e-6, atol=0)
    with torch.no_grad():
        model.query.weight.mul_(2)
    proxy(twice)
    schedule.at(2)
    torch.testing.assert_close(
        quantizer.scales()[f"{name}.weight"], (2 - MOMENTUM) * before[f"{name}.weight"], rtol=1e-6, atol=0
    )
    assert torch.equal(quantizer.quantize(model)(data(9)), proxy(data(9)))


def test_averages_move_once_a_step_and_never_without_gradients() -> None:
    model = residual_net().eval()
    quantizer = calibrated(model)
    proxy = quantizer.qat(model, scales="average")
    schedule = Schedule(proxy, 100)
    with torch.no_grad():
        proxy(data(2, 50.0))
    before = quantizer.scales()
    schedule.at(0)
    assert all(torch.equal(before[name], scale) for name, scale in quantizer.scales().items())
    proxy(data(2, 5.0))
    schedule.at(1)
    moved = quantizer.scales()
    schedule.at(1)
    assert all(torch.equal(moved[name], scale) for name, scale in quantizer.scales().items())
    assert not torch.equal(moved["query.forward.linear_0.input"], before["query.forward.linear_0.input"])


def test_averages_leave_padding_out() -> None:
    model = residual_net().eval()
    quantizer = calibrated(model)
    before = quantizer.scales()["query.forward.linear_0.input"]
    proxy = quantizer.qat(model, scales="average")
    x, mask = data(2, 0.5), torch.ones(4, 8, dtype=torch.long)
    x[0, 5:], mask[0, 5:] = 1000.0, 0
    proxy(x, attention_mask=mask)
    Schedule(proxy, 100).at(1)
    assert quantizer.scales()["query.forward.linear_0.input"] < before


@pytest.mark.parametrize("zero_point", [None, 0, 60, 255])
def test_the_least_scale_clips_nothing_and_is_the_least(zero_point: int | None) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0)) + 0.7
    if zero_point in (0, 255):
        x = x.abs() if zero_point == 0 else -x.abs()
    kind = "int8" if zero_point is None else "uint8"
    quantizer = OperandQuantizer()
    quantizer.set_scale(torch.tensor(1.0), kind, None, zero_point=zero_point)
    scale = least_scale(x, quantizer)
    low, high = (-127, 127) if zero_point is None else (QTYPES[kind].qmin - zero_point, QTYPES[kind].qmax - zero_point)
    assert bool((x >= low * scale * 1.000001).all())
    assert bool((x <= high * scale * 1.000001).all())
    assert bool((x < low * scale * 0.999).any() | (x > high * scale * 0.999).any())


def test_kinds_by_pattern() -> None:
    model = residual_net().eval()
    quantizer = calibrated(model)
    proxy = quantizer.qat(model, scales={"**": "average", "**.add_0.lhs": "learned", "**.weight": "fixed"})
    kinds = {
        name: "learned" if found.change is not None else "average" if found.watcher is not None else "fixed"
        for name, found in quantizers(proxy).items()
        if found.scale is not None
    }
    assert kinds == {
        "query.forward.linear_0.input": "average",
        "query.forward.linear_0.weight": "fixed",
        "key.forward.linear_0.input": "average",
        "key.forward.linear_0.weight": "fixed",
        "forward.add_0.lhs": "learned",
        "forward.add_0.rhs": "average",
    }


def test_kinds_that_cannot_be() -> None:
    model = residual_net().eval()
    quantizer = calibrated(model, sites={"residual_add": False})
    wrong: Any = {"key.**": "learned", "nowhere": "fixed", "**.weight": "grown"}
    with pytest.raises(ConfigError, match="3 problems") as told:
        quantizer.qat(model, scales=wrong)
    kind, nothing, shared = told.value.problems
    assert "unknown kind 'grown'" in kind
    assert "'nowhere' matches no quantized site" in nothing
    assert "they read the same tensor and share a scale" in shared
    with pytest.raises(CalibrationError, match="needs calibrated scales"):
        Quantizer(preset="plain").qat(residual_net(), scales="average")


@pytest.mark.parametrize("scales", ["average", "learned"])
def test_scales_are_fixed_late(scales: Any) -> None:
    model = residual_net().train()
    quantizer = calibrated(model)
    start = quantizer.scales()
    proxy = quantizer.qat(model, scales=scales)
    optimizer = torch.optim.Adam(proxy.parameters(), lr=1e-3)
    schedule = Schedule(proxy, 10, freeze_scales=0.6)
    seen = []
    for step in range(1, 11):
        optimize(proxy, optimizer, data(step, 2.0))
        schedule.at(step)
        seen.append(quantizer.scales())
    name = "query.forward.linear_0.input"
    assert len({scale[name].item() for scale in [start, *seen[:6]]}) == 7
    assert all(torch.equal(scales[key], seen[5][key]) for scales in seen[6:] for key in start)
    changes = [found.change for found in quantizers(proxy).values() if found.change is not None]
    assert bool(changes) == (scales == "learned")
    # All have a gradient, for the sake of processes that train together, and a checkpoint holds zeros.
    assert all(change.grad is not None and bool((change == 0).all()) for change in changes)
    assert torch.equal(quantizer.quantize(model)(data(9)), proxy(data(9)))


def test_scales_may_always_move() -> None:
    model = residual_net().train()
    quantizer = calibrated(model)
    proxy = quantizer.qat(model, scales="learned")
    schedule = Schedule(proxy, 4, freeze_scales=1)
    for step in range(1, 4):
        schedule.at(step)
    assert all(found.moves for found in quantizers(proxy).values())


def test_asymmetric_formats_keep_their_zero_points() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).train()
    x = data().abs() - 0.3
    quantizer = calibrated(model, x, formats=[{"activations": "uint8", "weights": "int8"}])
    proxy = quantizer.qat(model, scales="learned")
    points = {name: found.zero_point for name, found in quantizers(proxy).items() if found.zero_point is not None}
    assert any(int(point) > 0 for point in points.values())
    optimizer = torch.optim.Adam(proxy.parameters(), lr=5e-3)
    for _ in range(3):
        optimize(proxy, optimizer, x)
    frozen = quantizer.quantize(model)
    assert torch.equal(frozen(x), proxy.eval()(x))
    assert all(torch.equal(points[name], quantizers(frozen)[name].zero_point) for name in points)


def test_batch_norms_are_frozen_by_schedule_and_folded_in_the_file(tmp_path: Any) -> None:
    onnx = pytest.importorskip("onnx", reason="needs enginequant[onnx]")
    model, x = ConvNet().train(), torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    quantizer = Quantizer(preset="plain", backend="openvino")
    quantizer.calibrate(model, [x], progress=False)
    proxy = quantizer.qat(model)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    optimizer = torch.optim.SGD(proxy.parameters(), lr=1e-3)
    schedule, means = Schedule(proxy, 4, freeze_batch_norm=0.5), []
    for step in range(1, 5):
        proxy.train()
        optimize(proxy, optimizer, x)
        schedule.at(step)
        means.append([copy.deepcopy(norm.running_mean) for norm in norms])
    for early, half, late, last in zip(*means, strict=True):
        assert not torch.equal(early, half)
        assert torch.equal(half, late)
        assert torch.equal(half, last)
    path = quantizer.export(quantizer.quantize(model), tmp_path / "model.onnx", x)
    assert "BatchNormalization" not in {node.op_type for node in onnx.load(path).graph.node}


def test_a_schedule_is_of_a_proxy_and_of_some_steps() -> None:
    model = residual_net().eval()
    quantizer = calibrated(model)
    for wrong in (model, quantizer.quantize(model)):
        with pytest.raises(QuantizerError, match=r"the proxy that qat\(\) returns"):
            Schedule(wrong, 10)
    proxy = quantizer.qat(model)
    with pytest.raises(QuantizerError, match="steps is 0"):
        Schedule(proxy, 0)
    with pytest.raises(QuantizerError, match=r"freeze_scales is 1\.5"):
        Schedule(proxy, 1, freeze_scales=1.5)


def test_a_frozen_model_is_not_trained() -> None:
    model = residual_net().train()
    quantizer = calibrated(model)
    frozen = quantizer.quantize(model)
    assert frozen(data()).requires_grad  # in eval mode gradients pass through it, to what stands before it
    frozen.train()
    with pytest.raises(ProxyError, match=r"this model is frozen.* train the proxy of qat\(model\)"):
        frozen(data())
    with torch.no_grad():
        frozen(data())


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_no_number_is_no_range(value: float) -> None:
    model = residual_net()
    proxy = calibrated(model).qat(model, scales="average")
    schedule = Schedule(proxy, steps=100)
    before = {name: found.scale.clone() for name, found in quantizers(proxy).items() if found.scale is not None}
    broken = data()
    broken[0, 0, 0] = value
    proxy(broken)
    schedule.at(1)
    proxy(data(size=2.0))
    schedule.at(2)
    for name, scale in before.items():
        after = quantizers(proxy)[name].scale
        assert after is not None
        assert bool(torch.isfinite(after).all())
        assert bool((after <= 2 * scale).all())
    assert not torch.equal(
        before["query.forward.linear_0.input"], quantizers(proxy)["query.forward.linear_0.input"].scale
    )


class InPlace(nn.Module):
    """Adds in place, or in the ordinary way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.how = nn.Linear(16, 16), nn.Linear(16, 16), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = self.second(x)
        if self.how == "operator":
            h += y
        elif self.how == "method":
            h.add_(y)
        elif self.how == "itself":
            h += h
            h += y
        elif self.how == "view":
            part = h[:, :4]
            part += y[:, :4]
            part += y[:, :4]
        elif self.how == "float itself":
            h = h + h
            h = h + y
        elif self.how == "float view":
            part = h[:, :4] + y[:, :4]
            h = torch.cat([part + y[:, :4], h[:, 4:]], 1)
        else:
            h = h + y
        return h * 2


@pytest.mark.parametrize("scales", ["fixed", "average", "learned"])
@pytest.mark.parametrize(
    ("how", "plain"),
    [("operator", "float"), ("method", "float"), ("itself", "float itself"), ("view", "float view")],
)
def test_sums_in_place_train_as_those_that_are_not(how: str, plain: str, scales: Any) -> None:
    found = []
    for kind in (how, plain):
        model = InPlace(kind)
        proxy = calibrated(model, activations={"calibrator": "max"}).qat(model, scales=scales)
        x = data(2).requires_grad_()
        output = proxy(x)
        output.square().sum().backward()
        gradients = [p.grad for p in proxy.parameters()]
        assert all(g is not None and bool(torch.isfinite(g).all()) for g in gradients)
        found.append((output.detach(), x.grad, *gradients))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("scales", ["fixed", "average", "learned"])
def test_an_empty_batch_trains(scales: Any) -> None:
    model = residual_net()
    proxy = calibrated(model).qat(model, scales=scales)
    loss = proxy(data()[:0]).sum() + proxy(data()).square().mean()
    loss.backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in proxy.parameters())


class Checkpointed(nn.Module):
    """Layers with dropout that are computed again for their gradients, in one of the ways of torch."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.2)) for _ in range(2))
        self.last, self.way = nn.Linear(16, 4), way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "sequential":
            parts = nn.Sequential(*self.layers)
            return self.last(torch.utils.checkpoint.checkpoint_sequential(parts, 2, x, use_reentrant=False))
        for layer in self.layers:
            reentrant = self.way == "reentrant"
            run = torch.utils.checkpoint.checkpoint
            x = layer(x) if self.way == "plain" else run(layer, x, use_reentrant=reentrant)
        return self.last(x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "sequential"])
@pytest.mark.parametrize("scales", ["fixed", "average", "learned", None])
def test_layers_that_are_computed_again_train_alike(scales: Any, way: str) -> None:
    results = []
    for tried in ("plain", way):
        model = Checkpointed(tried)
        # Without a calibration the first batches of the training are observed.
        quantizer = calibrated(model.eval()) if scales else Quantizer(preset="plain", backend="openvino")
        proxy = quantizer.qat(model, scales=scales or "fixed").train()
        optimizer = torch.optim.SGD(proxy.parameters(), lr=0.1)
        for seed in range(4):
            torch.manual_seed(seed)
            # The reentrant way gives no gradients to parameters where no input has one.
            optimize(proxy, optimizer, data(seed).requires_grad_())
        results.append([*model.parameters(), *quantizer.scales().values()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
