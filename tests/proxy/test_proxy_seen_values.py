"""What calibration sees is what goes through, however the model goes about it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from toy_nets import linear, net

from quantizer import Quantizer

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def _sqnr(output: Tensor, expected: Tensor) -> float:
    output, expected = output.detach().double(), expected.detach().double()
    return float(10 * torch.log10(expected.square().sum() / (output - expected).square().sum()))


def _in_place() -> nn.Module:
    """Reads a tensor, adds to it in place, and reads it again."""
    return net("x = x.clone(); x += 50 * self.first(x); return self.second(x)", first=linear(), second=linear())


@pytest.mark.parametrize("inference", [False, True])
def test_a_tensor_that_is_changed_in_place_is_seen_again(inference: bool) -> None:
    torch.manual_seed(0)
    model = _in_place().eval()
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    with torch.inference_mode(inference):
        q.calib(model)(X)
    first, second = (float(q.scales()[f"{name}.forward.linear_0.input"]) for name in ("first", "second"))
    assert second > 5 * first
    assert _sqnr(q.quantize(model)(X), model(X)) > 30


def test_a_buffer_that_is_filled_again_is_seen_in_each_batch() -> None:
    model = nn.Sequential(nn.Linear(32, 32)).eval()
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    calibrating = q.calib(model)
    with torch.inference_mode():
        batch = X.clone() / 100
        calibrating(batch)
        batch.copy_(X)
        calibrating(batch)
    assert float(q.scales()["0.forward.linear_0.input"]) == pytest.approx(float(X.abs().max()) / 127)


def _adds_twice() -> nn.Module:
    """One module that adds joins two branches in its first call and adds positions in its second."""
    return net(
        "joined = self.add(self.first(x), self.second(x)); return self.add(joined, self.positions)",
        first=linear(),
        second=linear(),
        add=net("x + y", "x, y"),
        positions=nn.Parameter(torch.randn(1, 32) * 100),
    )


@pytest.mark.parametrize("switch", [True, "auto"])
def test_an_add_of_which_one_call_joins_no_branches_stays_float(switch: Any) -> None:
    torch.manual_seed(0)
    model = _adds_twice().eval()
    q = Quantizer(preset="plain", backend="openvino", sites={"residual_add": switch})
    q.calibrate(model, [X])
    (row,) = [row for row in q.coverage.rows if row.name == "add.forward.add_0"]
    assert not row.quantized
    assert row.reason == "the add broadcasts an operand"
    assert _sqnr(q.quantize(model)(X), model(X)) > 35


class _Sums(nn.Module):
    """Adds up from the number 0: the first call of the add has one tensor alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])

    def forward(self, x: Tensor) -> Any:
        total: Any = 0
        for layer in self.layers:
            total = total + layer(x)
        return total


def test_a_sum_that_starts_from_a_number_is_quantized() -> None:
    torch.manual_seed(0)
    model = _Sums().eval()
    q = Quantizer(preset="plain", backend="openvino", sites={"residual_add": True})
    q.calibrate(model, [X])
    assert q.plan["forward.add_0"].quantized
    assert _sqnr(q.quantize(model)(X), model(X)) > 25


class _Cache(nn.Module):
    """Keeps keys in a buffer, as decoders with a static cache do."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(32, 32)
        self.key = nn.Linear(32, 32)
        self.register_buffer("cache", torch.zeros(128, 32))
        self.cache: Tensor

    def forward(self, x: Tensor) -> Any:
        self.cache[: len(x)] = self.key(x)
        return torch.matmul(self.query(x), self.cache[: len(x)].T)


def test_a_buffer_that_a_pass_writes_into_is_an_activation() -> None:
    torch.manual_seed(0)
    model = _Cache().eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    assert q.plan["forward.matmul_0"].quantized
    assert [o.role for o in q.plan["forward.matmul_0"].operands] == ["activation", "activation"]


def test_percentiles_are_chosen_on_the_inputs_that_were_given() -> None:
    torch.manual_seed(0)
    model = net("self.linear(x.mul_(3).add_(1))", linear=linear()).eval()
    chosen = []
    for change in (lambda x: x, lambda x: x.mul(3).add(1)):
        q = Quantizer(preset="plain", backend="openvino", activations={"percentile": [90, 99, 99.9, 100]})
        q.calibrate(model if not chosen else model.linear, [change(X.clone())])
        chosen.append(next(o.estimate for e in q.plan.values() for o in e.operands if o.name == "input"))
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("measure", ["output", "gradient"])
def test_a_hook_of_the_whole_model_does_not_drown_what_groups_cost(measure: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).eval()

    def costs() -> dict[str, float]:
        q = Quantizer(preset="plain", backend="openvino")
        q.calibrate(model, [X])
        measuring = q.amp(model, measure=measure)
        measuring(X)
        return {row.group: row.error for row in q.sensitivity}

    expected = costs()
    model.register_forward_hook(lambda module, args, output: output * 2 + 1)
    assert costs() == pytest.approx(expected)


class _Filled(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.how = how

    def forward(self, x: Tensor) -> Any:
        if self.how == "a whole number":
            return self.linear(x).masked_fill(x > 2, 100000)
        return F.avg_pool2d(10000 * self.linear(x)[None, None], 8, divisor_override=1)


@pytest.mark.parametrize("how", ["a whole number", "another divisor"])
def test_values_beyond_float16_are_found(how: str) -> None:
    torch.manual_seed(0)
    model = _Filled(how).eval()
    q = Quantizer(preset="plain", backend="tensorrt")
    q.calibrate(model, [X + 1])
    assert float(model(X + 1).detach().abs().max()) > 65504
    assert q._session.regions().wide[""] > 65504


def test_a_convolution_by_a_view_of_a_weight_is_laid_out_alike() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16):
        model, x = (
            net("F.conv2d(x, self.weight[:, :])", weight=nn.Parameter(torch.randn(8, 16, 1, 1))).eval().to(dtype),
            torch.randn(2, 16, 5, 5, dtype=dtype),
        )
        q = Quantizer(preset="plain", backend="openvino")
        q.calibrate(model, [x])
        with torch.no_grad():
            assert torch.equal(q.qat(model).eval()(x), q.quantize(model)(x))
