"""Activations whose ranges are taken at run time: what has them, what they need, and what they become in a file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ConvNet, Mlp, assert_same
from torch import Tensor, nn
from toy_nets import net

from quantizer import Quantizer
from quantizer.errors import CalibrationError, ConfigError
from quantizer.numerics.torch_operators import fake_quantize_dynamic

DYNAMIC = {"ranges": "dynamic"}


def rows(seed: int = 0, size: float = 1.0) -> Tensor:
    return size * torch.randn(12, 32, generator=torch.Generator().manual_seed(seed))


def dynamic(model: nn.Module, *batches: Any, **config: Any) -> Quantizer:
    quantizer = Quantizer(**{"preset": "plain", "backend": "onnxruntime", "activations": DYNAMIC, **config})
    quantizer.calibrate(model.eval(), batches or [rows()], progress=False)
    return quantizer


def operands(quantizer: Quantizer, role: str = "activation") -> list[Any]:
    return [o for site in quantizer.plan.values() if site.quantized for o in site.operands if o.role == role]


def test_a_linear_rounds_by_the_values_of_each_call() -> None:
    model = nn.Sequential(nn.Linear(32, 16)).eval()
    quantizer = dynamic(model)
    frozen = quantizer.quantize(model)
    (weight,) = (site.stored for site in frozen.modules() if getattr(site, "stored", None) is not None)
    (scale,) = (o.scale for o in operands(quantizer, "weight"))
    values = weight.float() * scale[:, None]
    # Ten times what calibration saw: nothing is clipped.
    for x in (rows(1), rows(2, size=10)):
        assert_same(frozen(x), nn.functional.linear(fake_quantize_dynamic(x), values, model[0].bias))


def test_one_batch_of_anything_is_enough() -> None:
    model = Mlp().eval()
    few, other = dynamic(model, rows(0, size=0.01)), dynamic(model, rows(1), rows(2))
    assert_same(few.quantize(model)(rows(3)), other.quantize(model)(rows(3)))
    assert all(operand.dynamic and operand.scale is None for operand in operands(few))
    assert not [name for name in few.scales() if name.endswith(".input")]


def test_other_kinds_of_site_stay_float() -> None:
    model = ConvNet().eval()
    quantizer = dynamic(model, torch.randn(2, 3, 16, 16))
    reasons = {site.reason for site in quantizer.plan.values() if site.kind == "conv" and site.multiply_adds}
    assert reasons == {"onnxruntime has no dynamic quantization kernel for this kind of site"}
    static = {"kinds": ["conv"], "activations": "int8"}
    mixed = dynamic(model, torch.randn(2, 3, 16, 16), formats=[static])
    assert {site.quantized for site in mixed.plan.values() if site.kind == "conv" and site.multiply_adds} == {True}


def test_a_rule_for_some_sites() -> None:
    model = Mlp().eval()
    rule = {"kinds": ["linear"], "activations": "dynamic"}
    quantizer = dynamic(model, activations={"ranges": "static"}, formats=[rule])
    assert [operand.dynamic for operand in operands(quantizer)]
    assert all(operand.dynamic for operand in operands(quantizer))


@pytest.mark.parametrize("backend", ["tensorrt", "openvino-avx2"])
def test_a_backend_without_kernels_refuses(backend: str) -> None:
    model = Mlp().eval()
    with pytest.raises(ConfigError, match=rf"activations\.ranges: {backend} has no kernels for dynamic ranges"):
        dynamic(model, backend=backend).quantize(model)
    with pytest.raises(ConfigError, match="no kernels for dynamic ranges"):
        dynamic(model).for_backend(backend)


def blocks_net() -> nn.Module:
    """Linears with 128 and with 96 input channels, and a product with its weight first: [rows, 128] to [rows, 96]."""
    torch.manual_seed(0)
    return net(
        "self.broken((self.first @ torch.tanh(self.whole(x)).t()).t())",
        whole=nn.Linear(128, 96),
        broken=nn.Linear(96, 96),
        first=nn.Parameter(torch.randn(96, 96) / 10),
    )


def test_blocks_of_neighbours_where_the_engine_takes_them() -> None:
    model = blocks_net().eval()
    x = torch.randn(12, 128, generator=torch.Generator().manual_seed(1))
    quantizer = dynamic(model, x, backend="openvino")
    reasons = {path.partition(".")[0]: site.reason for path, site in quantizer.plan.items()}
    assert reasons["whole"].startswith("int8 in blocks of 128 with ranges at run time: input; int8: weight")
    why = "dynamic quantization on openvino needs K to be a multiple of 128, but K = 96"
    assert [reason for reason in reasons.values() if reason == why] == [why] * (len(reasons) - 1)
    (operand,) = operands(quantizer)
    assert (operand.dynamic, operand.dtype, operand.block_size) == (True, "int8", 128)
    frozen = quantizer.quantize(model)
    (weight,) = (site.stored for site in frozen.modules() if getattr(site, "stored", None) is not None)
    (scale,) = (o.scale for o in operands(quantizer, "weight"))
    rounded = nn.functional.linear(
        fake_quantize_dynamic(x, "int8", 128), weight.float() * scale[:, None], model.whole.bias
    )
    assert_same(frozen(x), model.broken((model.first @ torch.tanh(rounded).t()).t()))


def test_blocks_need_weights_of_8_bits() -> None:
    model = blocks_net().eval()
    rule = {"weights": "int4"}
    with pytest.raises(ConfigError, match=r"formats\[0\]: openvino supports dynamic ranges only with weights in"):
        dynamic(model, torch.randn(2, 128), backend="openvino", formats=[rule]).quantize(model)


def test_each_backend_rounds_in_its_own_way() -> None:
    model = blocks_net().eval()
    quantizer = dynamic(model, torch.randn(12, 128))
    other = quantizer.for_backend("openvino")
    assert {operand.block_size for operand in operands(quantizer)} == {None}
    assert {operand.block_size for operand in operands(other)} == {128}


def test_outliers_and_biases_as_for_static_ranges() -> None:
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)).eval()
    with torch.no_grad():
        model[0].weight[5] = 60.0
        model[1].weight[:, 5] *= 0.02
    batches = [rows(seed) for seed in range(4)]
    expected = model(rows(9))

    def error(**config: Any) -> float:
        with torch.no_grad():
            return float((dynamic(model, *batches, **config).quantize(model)(rows(9)) - expected).square().sum())

    assert error(preset="balanced") < error() / 10


def test_a_choice_by_the_output_tries_no_range(caplog: pytest.LogCaptureFixture) -> None:
    batches = [rows(seed) for seed in range(4)]
    quantizer = dynamic(Mlp().eval(), *batches, activations={"calibrator": "output", **DYNAMIC}, bias_correction=False)
    with caplog.at_level(logging.INFO):
        assert {operand.estimate for operand in operands(quantizer)} == {None}


def test_a_saved_folder_keeps_it(tmp_path: Path) -> None:
    model = Mlp().eval()
    quantizer = dynamic(model)
    loaded = Quantizer.load(quantizer.save(tmp_path / "saved"))
    assert_same(loaded.quantize(model)(rows(3)), quantizer.quantize(model)(rows(3)))


def test_no_scale_can_be_loaded_for_it() -> None:
    model = Mlp().eval()
    quantizer = dynamic(model)
    name = next(f"{path}.input" for path, site in quantizer.plan.items() if site.quantized)
    with pytest.raises(CalibrationError, match="the operand is dynamically quantized and has no scale"):
        quantizer.load_scales({name: torch.tensor(0.1)})


@pytest.mark.parametrize("scales", ["fixed", "learned"])
def test_training_moves_the_weights_under_it(scales: Any) -> None:
    torch.manual_seed(0)
    model = Mlp().eval()
    quantizer = dynamic(model)
    proxy = quantizer.qat(model, scales=scales)
    optimizer = torch.optim.SGD(proxy.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (proxy(rows()) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    # The trained proxy rounds as the frozen one does.
    assert_same(quantizer.quantize(model)(rows(3)), proxy.eval()(rows(3)).detach())


def test_sensitivity_ranks_and_puts_back() -> None:
    model = Mlp().eval()
    quantizer = dynamic(model)
    amp = quantizer.amp(model)
    amp(rows(1))
    quantizer.fallback(amp, num=1)
    assert len(operands(quantizer)) < len(operands(dynamic(model)))
