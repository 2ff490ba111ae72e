"""Models whose type changes after calibration, calls in inference mode, and forwards with autocast blocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.errors import CalibrationError

BALANCED: dict[str, Any] = {"activations": {"calibrator": "auto", "smoothquant_alpha": 0.8}}
"""What chooses ranges and factors by running batches, on few of them."""
RECONSTRUCT: dict[str, Any] = {"formats": [], "weights": {"rounding": "reconstruct"}}


class Net(nn.Module):
    """A table of positions, statistics and products: [B, 8, 32] to [B, 8, 32]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 32)
        self.register_buffer("positions", torch.randn(8, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm((self.first(x) + self.positions).mT)).mT
        return self.last(x @ (x.mT @ x / 64).softmax(-1))


def data(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 8, 32, generator=generator).to(dtype) for _ in range(4)]


def sqnr(right: Tensor, found: Tensor) -> float:
    right, found = right.detach().double(), found.detach().double()
    return float(10 * torch.log10(right.square().sum() / (right - found).square().sum()))


@pytest.mark.parametrize("before", [False, True], ids=["planned after the cast", "planned before"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_model_that_is_cast_after_calibration(dtype: torch.dtype, before: bool) -> None:
    model, batches = Net().eval(), data()
    right = model(batches[0])
    quantizer = Quantizer(backend="openvino", **BALANCED)
    quantizer.calibrate(model, batches, progress=False)
    if before:
        quantizer.quantize(model)
    model.to(dtype)
    found = quantizer.quantize(model)(batches[0].to(dtype))
    assert found.dtype == dtype
    assert sqnr(right, found) > 20
    if dtype == torch.float64:
        # Back again its weights are those of calibration; from bfloat16 they are rounded.
        model.float()
        assert sqnr(right, quantizer.quantize(model)(batches[0])) > 20


def test_a_part_that_is_cast_after_calibration() -> None:
    model = Net().eval()
    quantizer = Quantizer(backend="openvino", **BALANCED)
    quantizer.calibrate(model, data(), progress=False)
    model.last.double()
    with pytest.raises(CalibrationError, match=r"first.weight is float32 and last.weight is float64, and both were"):
        quantizer.quantize(model)


@pytest.mark.parametrize("calibrating", [torch.inference_mode, nullcontext], ids=["in inference mode", "as usual"])
@pytest.mark.parametrize("quantizing", [torch.inference_mode, nullcontext], ids=["in inference mode", "as usual"])
def test_what_is_made_in_inference_mode_takes_part_in_autograd(
    calibrating: Callable[[], AbstractContextManager[Any]], quantizing: Callable[[], AbstractContextManager[Any]]
) -> None:
    model, batches = Net().eval(), data()
    quantizer = Quantizer(backend="onnxruntime", **BALANCED)
    with calibrating():
        quantizer.calibrate(model, batches, progress=False)
    with quantizing():
        scales, frozen, lowered = quantizer.scales(), quantizer.quantize(model), quantizer.lower(model)
        trained, amp = quantizer.qat(model), quantizer.amp(model)
        right = frozen(batches[0])
    for proxy in (frozen, lowered, amp, trained):
        assert torch.is_grad_enabled()
        assert proxy(batches[0]).shape == right.shape
    assert torch.equal(frozen(batches[0]), right)
    assert not any(scale.is_inference() for scale in scales.values())
    trained.train()(batches[0]).sum().backward()


def test_calibration_by_calls_in_several_modes() -> None:
    model, batches = Net().eval(), data()
    quantizer, other = (Quantizer(backend="openvino", **BALANCED) for _ in range(2))
    proxy = quantizer.calib(model)
    modes = (torch.inference_mode, torch.no_grad, nullcontext, torch.inference_mode)
    for batch, mode in zip(batches, modes, strict=True):
        with mode():
            proxy(batch)
    other.calibrate(model, batches, progress=False)
    found = quantizer.quantize(model)(batches[0])
    assert torch.equal(found, other.quantize(model)(batches[0]))


def in_place() -> nn.Module:
    """A forward that writes into its input."""
    torch.manual_seed(0)
    return net("self.linear(F.silu(x, inplace=True))", linear=linear())


def test_data_made_in_inference_mode_that_a_forward_changes() -> None:
    model = in_place().eval()
    quantizer = Quantizer(backend="openvino", preset="plain")
    with torch.inference_mode():
        quantizer.calibrate(model, [batch.clone() for batch in data()], progress=False)
    assert len(quantizer.coverage.quantized) == 1


def block_net() -> nn.Module:
    return net("self.down(torch.relu(self.up(x)))", up=nn.Linear(32, 48), down=nn.Linear(48, 32))


class Autocast(nn.Module):
    """Blocks that compute in bfloat16 because the model around them says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.w = nn.ModuleList([block_net(), block_net()]), nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x
            for block in self.blocks:
                y = block(y) @ self.w
        return x + y.float()


@pytest.mark.parametrize("measure", ["gradient", "output", "local"])
def test_sensitivity_of_a_forward_with_autocast(measure: str) -> None:
    model, batches = Autocast().eval(), data()
    quantizer = Quantizer(backend="openvino", preset="plain")
    quantizer.calibrate(model, batches, progress=False)
    amp = quantizer.amp(model, measure=measure)
    assert torch.equal(amp(batches[0]), model(batches[0]))
    errors = [row.error for row in quantizer.sensitivity]
    assert len(errors) > 5
    assert all(error > 0 for error in errors)


def test_weights_of_blocks_under_autocast_are_reconstructed() -> None:
    model, batches = Autocast().eval(), data()
    right = model(batches[0])
    quantizer = Quantizer(backend="openvino", preset="plain", **RECONSTRUCT)
    quantizer.calibrate(model, batches, progress=False)
    assert sqnr(right, quantizer.quantize(model)(batches[0])) > 30
