"""What holds for every algorithm that changes a plan: smoothing, corrected biases, equalization, and chosen codes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Snapshot, assert_same
from onnx_graphs import node_by_node
from torch import Tensor, nn
from torch.nn import functional as F

from quantizer import Quantizer
from quantizer.plan.apply import apply_plan, switch_on
from quantizer.proxy.build import build_proxy

pytestmark = pytest.mark.usefixtures("exact_byte_products", "learned_in_few_steps")


class Vectors(nn.Module):
    """A normalization with a loud channel, which two linears read, and two layers behind them: [N, 32] to [N, 24]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(32, 48)
        self.mid, self.last = nn.Linear(48, 32), nn.Linear(32, 24)
        with torch.no_grad():
            self.norm.weight[3] = 30.0
            self.gate.weight[:, 3] *= 0.05
            self.up.weight[:, 3] *= 0.05

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.last(F.gelu(self.mid(F.silu(self.gate(x)) * self.up(x))))


def images() -> nn.Module:
    """Convolutions whose channels differ by up to a thousand times: [N, 3, 10, 10] to [N, 8, 6, 6]."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 1))
    factors = torch.logspace(0, 3, 16)
    with torch.no_grad():
        model[0].weight.mul_(factors[:, None, None, None])
        model[0].bias.mul_(factors)
        model[2].weight.div_(factors[:, None, None])
    return model


FLOAT = {"preset": "plain", "backend": "onnxruntime", "sites": {"residual_add": False}}
INT4 = {"formats": [{"weights": "int4", "activations": "float"}]}
COARSE = {"calibrator": "percentile", "percentile": 90.0}
ALGORITHMS: dict[str, tuple[dict[str, Any], str]] = {
    "smooth": ({**FLOAT, "activations": {"calibrator": "max", "smoothquant_alpha": 0.5}}, "SmoothQuant 0.5"),
    "output": ({**FLOAT, "activations": {"calibrator": "output", "smoothquant_alpha": "auto"}}, "SmoothQuant 0."),
    "bias": ({**FLOAT, "activations": COARSE, "bias_correction": True}, "bias corrected"),
    "equalize": ({"backend": "onnxruntime", "weights": {"granularity": "per_tensor"}}, "equalized"),
    "awq": ({**FLOAT, **INT4, "weights": {"rounding": "awq"}}, "awq, alpha 0."),
    "gptq": ({**FLOAT, **INT4, "weights": {"rounding": "gptq"}}, "gptq, 0."),
    "gptq of int8": ({**FLOAT, "activations": {"calibrator": "max"}, "weights": {"rounding": "gptq"}}, "gptq, 0."),
    "reconstruct": ({**FLOAT, "activations": COARSE, "weights": {"rounding": "reconstruct"}}, "reconstruct, "),
}


@dataclass
class Case:
    """A model, its calibration, and data that it did not see."""

    model: nn.Module
    q: Quantizer
    data: list[Tensor]
    x: Tensor


def made(name: str, batches: int = 3, **config: Any) -> Case:
    torch.manual_seed(0)
    shape, model = ((8, 3, 10, 10), images()) if name == "equalize" else ((64, 32), Vectors())
    # Columns that are correlated, as those of trained networks are.
    mix = torch.randn(shape[-1], shape[-1]) * torch.logspace(0, -1, shape[-1])[:, None]
    data = [torch.randn(shape) @ mix for _ in range(5)]
    q = Quantizer(**{**ALGORITHMS[name][0], **config})
    q.calibrate(model.eval(), data[:batches], progress=False)
    return Case(model, q, data, data[-1])


@cache
def case(name: str) -> Case:
    """The calibration of an algorithm for tests that leave it as it is."""
    return made(name)


@torch.no_grad()
def frozen_output(one: Case, q: Quantizer | None = None) -> Tensor:
    found: Tensor = (q or one.q).quantize(one.model)(one.x)
    return found


NAMES = pytest.mark.parametrize("name", ALGORITHMS)


def assert_same_plan(first: Quantizer, second: Quantizer) -> None:
    assert list(first.plan) == list(second.plan)
    for path, one in first.plan.items():
        two = second.plan[path]
        assert_same((one.quantized, one.reason, one.bias_shift), (two.quantized, two.reason, two.bias_shift))
        for a, b in zip(one.operands, two.operands, strict=True):
            for field in ("scale", "zero_point", "smooth", "smooth_axis", "smoothing", "spread", "codes", "estimate"):
                assert_same((path, a.name, field, getattr(a, field)), (path, b.name, field, getattr(b, field)))


@NAMES
def test_off_it_is_the_model_which_stays_as_it_was(name: str) -> None:
    one = made(name)
    before, expected = Snapshot.of(one.model), one.model(one.x)
    assert ALGORITHMS[name][1] in " ".join(one.q.coverage.text().split())
    for proxy in (one.q.proxy(one.model), one.q.calib(one.model, resume=True), one.q.amp(one.model)):
        assert_same(proxy(one.x), expected)
    assert not torch.equal(frozen_output(one), expected)
    before.assert_unchanged(one.model)
    assert all(parameter.grad is None for parameter in one.model.parameters())


@NAMES
def test_a_folder_holds_it(name: str, tmp_path: Path) -> None:
    one = case(name)
    loaded = Quantizer.load(one.q.save(tmp_path / "saved"))
    assert_same_plan(loaded, one.q)
    assert str(loaded.coverage) == str(one.q.coverage)
    assert_same(frozen_output(one, loaded), frozen_output(one))


@NAMES
def test_a_proxy_that_rounds_copies_and_casts_compute_what_is_frozen(name: str) -> None:
    one = case(name)
    expected, frozen = frozen_output(one), one.q.quantize(one.model)
    proxy = build_proxy(one.model, eager_attention=True).eval()
    apply_plan(proxy, one.q.plan)
    assert_same(proxy(one.x), one.model(one.x))
    switch_on(proxy, one.q.plan)
    with torch.no_grad():
        assert_same(proxy(one.x), expected)
        assert_same(copy.deepcopy(frozen)(one.x), expected)
        double = copy.deepcopy(frozen).double()(one.x.double()).float()
    # A value at a border may be rounded to the other side.
    assert float((double - expected).norm()) < 0.05 * float(expected.norm())


@NAMES
def test_what_falls_back_is_float_and_gets_it_back(name: str) -> None:
    one = case(name)
    before = frozen_output(one)
    amp = one.q.amp(one.model)
    with torch.no_grad():
        amp(one.x)
        one.q.fallback(amp, ratio=1.0)
        assert_same(frozen_output(one), one.model(one.x))
    one.q.clear_fallback()
    assert_same(frozen_output(one), before)


@NAMES
def test_another_backend_has_its_own(name: str) -> None:
    one = case(name)
    # OpenVINO observes no results of convolutions.
    other = "onnxruntime-avx2" if name == "equalize" else "openvino"
    derived, own = one.q.for_backend(other), made(name, backend=other)
    assert_same(frozen_output(one, derived), frozen_output(own))
    assert_same_plan(derived, own.q)


@NAMES
def test_a_calibration_that_goes_on_is_one_over_all_data(name: str) -> None:
    parts, whole = made(name, 2), made(name, 4)
    before = frozen_output(parts)
    parts.q.calibrate(parts.model, parts.data[2:4], resume=True, progress=False)
    assert_same(frozen_output(parts), frozen_output(whole))
    assert not torch.equal(frozen_output(parts), before)


@NAMES
def test_a_file_computes_what_the_proxy_computes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="exporting needs enginequant[onnx]")
    one = case(name)
    path = one.q.export(one.q.quantize(one.model), tmp_path / "m.onnx", one.x)
    expected = frozen_output(one)
    found = torch.from_numpy(node_by_node(path, one.x)[0])
    # A value at a border may be rounded to the other side.
    assert float((found - expected).norm()) < 0.02 * float(expected.norm())
