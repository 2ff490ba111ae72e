"""``q.scales`` and ``q.load_scales``: what goes in comes out, is used, and is saved; what cannot be taken is listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from torch import nn
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.errors import CalibrationError, ProxyError
from quantizer.plan.weight_scales import ONE_SCALE
from tests.helpers import Mlp

BACKENDS = ("tensorrt", "openvino")
LINEAR = "up.forward.linear_0"


def _calibrated(model: nn.Module, **options: Any) -> Quantizer:
    return make_calibrated(
        model,
        [torch.randn(16, 32, generator=torch.Generator().manual_seed(0))],
        **{"activations": {"calibrator": "max"}, **options},
    )


def twins() -> nn.Module:
    """Two linears that read one tensor."""
    return net("self.one(x) + self.two(x)", one=linear(), two=linear())


@pytest.mark.parametrize("backend", BACKENDS)
def test_loading_its_own_scales_changes_nothing(backend: str) -> None:
    model, x = Mlp().eval(), torch.randn(4, 32)
    q = _calibrated(model, backend=backend)
    expected, scales = q.quantize(model)(x), q.scales()
    assert {f"{LINEAR}.input", "up.forward.linear_0.weight", "down.forward.linear_0.input"} <= set(scales)
    assert scales["up.forward.linear_0.weight"].shape == (64,)
    assert all(scale.dtype == torch.float32 for scale in scales.values())
    q.load_scales(scales)
    assert all(torch.equal(q.scales()[name], scale) for name, scale in scales.items())
    assert torch.equal(q.quantize(model)(x), expected)


@pytest.mark.parametrize("per_channel", [True, False])
def test_the_frozen_model_uses_them(per_channel: bool) -> None:
    model, x = Mlp().eval(), torch.randn(4, 32)
    q = _calibrated(model, backend="openvino", sites={"residual_add": False})
    site = LINEAR
    weight = torch.full((64,) if per_channel else (), 0.01)
    q.load_scales({f"{site}.input": torch.tensor(0.02, dtype=torch.float64), f"{site}.weight": weight})
    up = q.plan[site].operands
    torch.testing.assert_close(up[0].amax, torch.tensor(2.54))
    torch.testing.assert_close(up[1].amax, weight * 127)
    assert up[1].axis == (0 if per_channel else None)
    assert up[0].clipped is None
    quantized: Any = q.quantize(model)
    rounded = (x / 0.02).round().clamp(-128, 127) * torch.tensor(0.02)
    assert torch.equal(quantized.up.weight, (model.up.weight / 0.01).round().clamp(-128, 127) * torch.tensor(0.01))
    torch.testing.assert_close(quantized.up(x), nn.functional.linear(rounded, quantized.up.weight, model.up.bias))
    assert str(q.ranges)


def test_its_own_scales_can_be_loaded_where_a_row_is_tiny() -> None:
    model = Mlp().eval()
    with torch.no_grad():
        model.up.weight[3] *= 1e-7  # its scale is no normal number of the target's float16
    q = _calibrated(model, backend="tensorrt")
    scales = q.scales()
    assert float(scales[f"{LINEAR}.weight"][3]) < torch.finfo(torch.float16).smallest_normal
    q.load_scales(scales)
    assert all(torch.equal(q.scales()[name], scale) for name, scale in scales.items())


@pytest.mark.parametrize(
    ("layer", "note"), [(nn.Conv2d(64, 64, 3), None), (nn.ConvTranspose2d(64, 64, 3, groups=2), ONE_SCALE)]
)
def test_a_convolution_says_where_one_scale_serves_all_channels(layer: nn.Module, note: str | None) -> None:
    q = Quantizer(preset="plain", backend="tensorrt")
    q.calibrate(nn.Sequential(layer).eval(), [torch.randn(2, 64, 8, 8)])
    (site,) = [entry for entry in q.plan.values() if entry.multiply_adds]
    weight = next(operand for operand in site.operands if operand.role == "weight")
    assert weight.quantized
    assert weight.scales == (64 if note is None else 1)
    assert weight.note == note


def test_how_many_scales_an_operand_has() -> None:
    q = _calibrated(Mlp().eval(), exclude={"sites": ["forward.add_0.lhs"]}, sites={"residual_add": True})
    assert {operand.name: operand.scales for operand in q.plan[LINEAR].operands} == {"input": 1, "weight": 64}
    left = next(operand for operand in q.plan["forward.add_0"].operands if operand.name == "lhs")
    assert left.amax is None
    assert left.scales == 1


def test_what_was_measured_with_the_former_range_goes_with_it() -> None:
    q = _calibrated(Mlp().eval(), activations={"calibrator": "auto"})
    before = q.plan[LINEAR].operands
    q.load_scales({f"{LINEAR}.input": torch.tensor(0.5)})
    given, kept = q.plan[LINEAR].operands
    for operand, missing in ((before[0], False), (given, True)):
        assert [value is None for value in (operand.estimate, operand.sqnr_db, operand.clipped)] == [missing] * 3
    assert kept.scale is not None
    assert torch.equal(kept.scale, before[1].scale)


def test_another_scale_of_uint8_moves_the_zero_point() -> None:
    q = _calibrated(Mlp().eval(), backend="onnxruntime", formats=[{"activations": "uint8"}])
    (before, _), name = q.plan[LINEAR].operands, f"{LINEAR}.input"
    assert before.minimum is not None
    q.load_scales({name: q.scales()[name] * 2})
    assert q.plan[LINEAR].operands[0].zero_point == round(-before.minimum / float(q.scales()[name]))


def test_scales_of_blocks_are_replaced_by_those_of_blocks_or_by_one() -> None:
    q = _calibrated(Mlp().eval(), backend="onnxruntime", formats=[{"weights": "int4", "block_size": 16}])
    name, found = f"{LINEAR}.weight", []
    for scale in (q.scales()[name] * 2, torch.tensor(0.1)):
        q.load_scales({name: scale})
        weight = q.plan[LINEAR].operands[1]
        found.append((weight.axis, weight.block_size))
    assert found == [(1, 16), (None, None)]


def test_a_scale_is_held_in_the_targets_type() -> None:
    model = Mlp().eval()
    q = _calibrated(model, backend="tensorrt")
    q.load_scales({f"{LINEAR}.input": torch.tensor(0.1)})
    assert q.scales()[f"{LINEAR}.input"] == torch.tensor(0.1).half().float()


def test_they_are_saved_and_can_be_replaced_after_a_load(tmp_path: Path) -> None:
    model, x = Mlp().eval(), torch.randn(4, 32)
    q = _calibrated(model)
    name = f"{LINEAR}.input"
    q.load_scales({name: torch.tensor(0.5)})
    loaded = Quantizer.load(q.save(tmp_path / "state"))
    assert loaded.scales()[name] == 0.5
    assert torch.equal(loaded.quantize(model)(x), q.quantize(model)(x))
    loaded.load_scales({name: torch.tensor(0.25)})
    assert loaded.scales()[name] == 0.25
    assert not torch.equal(loaded.quantize(model)(x), q.quantize(model)(x))


def test_calibrating_again_replaces_them() -> None:
    model = Mlp().eval()
    q = _calibrated(model)
    before = q.scales()
    q.load_scales({name: scale * 2 for name, scale in before.items()})
    q.calibrate(model, [torch.randn(16, 32, generator=torch.Generator().manual_seed(0))])
    assert all(torch.equal(q.scales()[name], scale) for name, scale in before.items())


def test_what_fell_back_stays_float() -> None:
    model = Mlp().eval()
    q = _calibrated(model, sites={"residual_add": False})
    amp = q.amp(model)
    amp(torch.randn(4, 32))
    fallback = q.fallback(amp, ratio=1.0)
    name = f"{LINEAR}.input"
    q.load_scales({name: torch.tensor(0.5)})
    assert q.chosen_fallback == fallback
    assert q.scales() == {}
    q.clear_fallback()
    assert q.scales()[name] == 0.5
    with pytest.raises(ProxyError, match=r"fallback\(\) expects the proxy that the last amp\(\)"):
        q.fallback(amp, num=1)  # it measured other scales


# -- operands that share a range -----------------------------------------------------------------------------------


def test_a_scale_holds_for_the_whole_range_group() -> None:
    q = _calibrated(twins().eval())
    q.load_scales({"two.forward.linear_0.input": torch.tensor(0.5)})
    assert q.scales()["one.forward.linear_0.input"] == q.scales()["two.forward.linear_0.input"] == 0.5


def test_operands_of_a_range_group_must_agree() -> None:
    q = _calibrated(twins().eval())
    with pytest.raises(
        CalibrationError, match=r"two\.forward.*0\.25, but one\.forward\S+ has 0\.5: they read the same"
    ):
        q.load_scales(
            {"one.forward.linear_0.input": torch.tensor(0.5), "two.forward.linear_0.input": torch.tensor(0.25)}
        )


# -- what cannot be taken --------------------------------------------------------------------------------------------

BAD: list[tuple[str, Any, str]] = [
    ("upp.forward.linear_0.input", torch.tensor(1.0), r"did you mean 'up\.forward\.linear_0\.input'"),
    (f"{LINEAR}.inputs", torch.tensor(1.0), r"did you mean 'up\.forward\.linear_0\.input'"),
    ("zzz", torch.tensor(1.0), r"zzz: no operand of the calibrated model has this name \(SITE\.OPERAND\)$"),
    (f"{LINEAR}.input", torch.ones(32), r"shape \[32\], expected \[\]$"),
    (f"{LINEAR}.weight", torch.ones(32), r"shape \[32\], expected \[\] or \[64\] \(its channels, axis 0\)"),
    (f"{LINEAR}.weight", torch.ones(64, 1), r"shape \[64, 1\], expected \[\] or \[64\]"),
    (f"{LINEAR}.input", torch.tensor(0.0), "it contains 0; scales must be positive and finite"),
    (f"{LINEAR}.input", torch.tensor(-1.0), "it contains -1"),
    (f"{LINEAR}.weight", torch.tensor([1.0] * 63 + [float("nan")]), "it contains nan"),
    (f"{LINEAR}.weight", torch.tensor([1.0] * 63 + [float("inf")]), "it contains inf"),
    (f"{LINEAR}.input", torch.tensor(1), "expected a floating-point tensor, got torch.int64"),
    (f"{LINEAR}.input", 0.5, "expected a floating-point tensor, got float"),
    (f"{LINEAR}.input", torch.tensor(1e6), r"1e\+06 is too large for torch.float16"),
    (
        "down.forward.linear_0.input",
        torch.tensor(1.0),
        r"its site is not quantized \(excluded by rule\); remove the scale",
    ),
    (
        "forward.add_0.lhs",
        torch.tensor(1.0),
        r"the operand is not quantized \(excluded by rule\); remove the scale, or change",
    ),
]


@pytest.mark.parametrize(("name", "scale", "message"), BAD)
def test_a_scale_that_cannot_be_taken(name: str, scale: Any, message: str) -> None:
    q = _calibrated(
        Mlp().eval(), exclude={"names": ["down"], "sites": ["forward.add_0.lhs"]}, sites={"residual_add": True}
    )
    before = q.scales()
    with pytest.raises(CalibrationError, match=message):
        q.load_scales({name: scale})
    assert q.scales().keys() == before.keys()
    assert all(torch.equal(q.scales()[key], value) for key, value in before.items())


def test_all_problems_are_listed() -> None:
    q = _calibrated(Mlp().eval())
    with pytest.raises(CalibrationError, match="2 scales cannot be loaded") as caught:
        q.load_scales({"nowhere": torch.tensor(1.0), f"{LINEAR}.input": torch.tensor(-1.0)})
    assert "nowhere" in str(caught.value)
    assert f"{LINEAR}.input" in str(caught.value)
