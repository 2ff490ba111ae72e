"""Ranges of weights: max, mse and percentile, for each kind of scale."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibrated import make_calibrated
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.algorithms.calibration_session import CalibrationSession
from quantizer.errors import ConfigError
from quantizer.numerics.formats import INT4, INT8, QType
from quantizer.plan.weight_scales import weight_amax

GRANULARITIES = [(None, None), (0, None), (1, None), (-1, None), (0, 4), (1, 4)]


def heavy(*shape: int, seed: int = 0) -> Tensor:
    """Values with heavy tails, as clipping is of use for."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) ** 3


def rows(values: Tensor, axis: int | None, block_size: int | None) -> list[Tensor]:
    """The values of each scale, in the order of the flattened scale, by plain indexing."""
    if axis is None:
        return [values.flatten()]
    axis %= values.dim()
    if block_size is None:
        return [values.select(axis, index).flatten() for index in range(values.shape[axis])]
    assert values.dim() == 2
    first, second = values.shape
    if axis == 0:
        return [values[i : i + block_size, j] for i in range(0, first, block_size) for j in range(second)]
    return [values[i, j : j + block_size] for i in range(first) for j in range(0, second, block_size)]


@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
@pytest.mark.parametrize("dtype", [INT8, INT4], ids=lambda dtype: dtype.name)
def test_mse_is_the_best_of_its_shares(axis: int | None, block_size: int | None, dtype: QType) -> None:
    values = heavy(8, 12)
    expected = []
    for row in rows(values, axis, block_size):
        errors = {}
        for number in range(31):
            amax = row.abs().max() * round(1 - 0.02 * number, 2)
            rounded = torch.fake_quantize_per_tensor_affine(
                row, float(amax / dtype.qmax), 0, int(dtype.qmin), int(dtype.qmax)
            )
            errors[float(amax)] = float((rounded - row).double().square().sum())
        expected.append((min(errors, key=errors.__getitem__), min(errors.values())))
    found = weight_amax(values, axis, block_size, dtype, "mse").flatten()
    assert len(found) == len(expected)
    for amax, row, (best, least) in zip(found, rows(values, axis, block_size), expected, strict=True):
        rounded = torch.fake_quantize_per_tensor_affine(
            row, float(amax / dtype.qmax), 0, int(dtype.qmin), int(dtype.qmax)
        )
        # Two shares may be equally good to the last digits of a sum.
        assert float((rounded - row).double().square().sum()) == pytest.approx(least, rel=1e-5), (float(amax), best)


@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
@pytest.mark.parametrize("percentile", [50.0, 90.0, 99.9, 100.0])
def test_percentile_is_the_least_magnitude_that_covers_so_many(
    axis: int | None, block_size: int | None, percentile: float
) -> None:
    values = heavy(8, 12)
    found = weight_amax(values, axis, block_size, INT8, f"percentile {percentile:g}").flatten()
    for amax, row in zip(found, rows(values, axis, block_size), strict=True):
        ordered = np.sort(row.abs().numpy())
        assert float(amax) == ordered[math.ceil(percentile / 100 * len(ordered)) - 1]


@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
def test_max_and_zeros(axis: int | None, block_size: int | None) -> None:
    values = heavy(8, 12)
    expected = torch.stack([row.abs().max() for row in rows(values, axis, block_size)])
    assert torch.equal(weight_amax(values, axis, block_size, INT8, None).flatten(), expected)
    for estimate in ("mse", "percentile 99"):
        assert not weight_amax(torch.zeros(8, 12), axis, block_size, INT8, estimate).any()


# -- through a Quantizer -------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Conv1d(4, 8, 3)
        with torch.no_grad():
            self.first.weight.copy_(heavy(32, 32, seed=1) / 8)
            self.second.weight.copy_(heavy(8, 4, 3, seed=2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(16, 4, 32, generator=generator) for _ in range(2)]


INT4_WEIGHTS = [{"weights": "int4", "activations": "float"}]


def made(net: Net, backend: str = "openvino", **weights: Any) -> Quantizer:
    return make_calibrated(net, data(), backend=backend, formats=INT4_WEIGHTS, weights=weights)


def loss(net: Net, q: Quantizer) -> float:
    x = data()[0]
    with torch.no_grad():
        return float((q.quantize(net)(x) - net(x)).square().sum())


def test_four_bits_lose_less() -> None:
    net = Net().eval()
    assert loss(net, made(net, calibrator="mse")) < 0.9 * loss(net, made(net))
    q = made(net, calibrator="percentile", percentile=95)
    weights = [operand for site in q.plan.values() for operand in site.operands if operand.role == "weight"]
    assert {operand.estimate for operand in weights} == {"percentile 95"}
    assert "percentile 95" in q.ranges.text()


def test_saved_and_computed_again_for_other_weights(tmp_path: Path) -> None:
    net = Net().eval()
    q = made(net, calibrator="mse")
    q.save(tmp_path / "saved")
    again = Quantizer.load(tmp_path / "saved")
    x = data()[0]
    assert torch.equal(again.quantize(net)(x), q.quantize(net)(x))
    with torch.no_grad():
        net.first.weight.mul_(2)
    with pytest.warns(UserWarning, match="weights"):
        scales = q.quantize(net).first.site_forward_linear_0.quantizer_of("weight").scale
    expected = made(net, calibrator="mse").plan["first.forward.linear_0"].operands[1].scale
    assert torch.equal(scales, expected)  # type: ignore[arg-type]


def test_where_codes_are_bounded_nothing_is_clipped() -> None:
    net = Net().eval()
    q = make_calibrated(net, data(), backend="onnxruntime-avx2", weights={"calibrator": "mse"})
    weight = q.plan["first.forward.linear_0"].operands[1]
    assert weight.estimate is None
    assert torch.equal(weight.amax, net.first.weight.detach().abs().amax(1))  # type: ignore[arg-type]


def test_eight_bits_are_clipped_elsewhere() -> None:
    net = Net().eval()
    settings = {"calibrator": "percentile", "percentile": 90}
    q = make_calibrated(net, data(), backend="openvino", weights=settings)
    weight, values = q.plan["first.forward.linear_0"].operands[1], net.first.weight.detach()
    assert weight.estimate == "percentile 90"
    assert bool((weight.amax < values.abs().amax(1)).all())  # type: ignore[operator]
    assert (weight.minimum, weight.maximum) == (float(values.min()), float(values.max()))


def test_bad_input() -> None:
    with pytest.raises(
        ConfigError, match=r"weights.calibrator: got the text 'entropy'; expected 'max', 'mse' or 'percentile'"
    ):
        Quantizer(preset="plain", weights={"calibrator": "entropy"})
    with pytest.raises(ConfigError, match=r"weights.percentile: got .*0.* expected a number, above 0 and at most 100"):
        Quantizer(preset="plain", weights={"percentile": 0})


@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
@pytest.mark.parametrize("value", [None, 0.0, -3.0, math.nan, -math.inf])
def test_the_largest_magnitude_is_found_without_the_magnitudes(
    axis: int | None, block_size: int | None, value: float | None
) -> None:
    weight = heavy(8, 8)
    if value is not None:
        weight[2:6] = value
    found = weight_amax(weight, axis, block_size, INT8, None)
    expected = torch.stack([row.abs().max() for row in rows(weight, axis, block_size)]).reshape(found.shape)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(-1.0), expected.nan_to_num(-1.0))
    assert not found.signbit().logical_and(~found.isnan()).any(), "no range is -0"


def test_a_coverage_plans_once(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer = make_calibrated(nn.Sequential(nn.Linear(32, 32)).eval(), [torch.randn(4, 32)], backend="openvino")
    decide, calls = CalibrationSession.decide, []
    monkeypatch.setattr(CalibrationSession, "decide", lambda own, *given: calls.append(own) or decide(own, *given))
    assert len(quantizer.coverage) == 1
    assert len(calls) == 1
