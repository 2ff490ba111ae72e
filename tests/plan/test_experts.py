"""Mixtures of experts: grouped products are sites, with a range for each expert's weight."""

from __future__ import annotations

import functools
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy_nets import net

from quantizer import Quantizer
from quantizer.check import check_file
from quantizer.engines import BuildOptions, build_engine, load_engine
from quantizer.errors import CalibrationError
from quantizer.plan.site_plan import OperandPlan
from quantizer.rewrite.operations import grouped_mm
from quantizer.tasks.metrics import sqnr_db

EXPERTS, WIDTH, INNER = 4, 32, 64
_ROWS = 24


class Experts(nn.Module):
    """Grouped products of rows that are sorted by their expert, with square second weights."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH, generator=generator) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, INNER, generator=generator) * 0.2)
        with torch.no_grad():
            # The weights of one expert are far larger than those of the others.
            self.up[1] *= 30

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        hidden = F.relu(F.grouped_mm(x, self.up.transpose(-2, -1), offs=ends))
        return F.grouped_mm(hidden, self.down, offs=ends)


def batch(seed: int, ends: tuple[int, ...] = (6, 12, 12, _ROWS)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(_ROWS, WIDTH, generator=generator), "ends": torch.tensor(ends, dtype=torch.int32)}


def calibrated(model: nn.Module, backend: str = "openvino", **options: object) -> Quantizer:
    quantizer = Quantizer(backend=backend, preset="plain", **options)
    quantizer.calibrate(model, [batch(1), batch(2)], progress=False)
    return quantizer


def weights(quantizer: Quantizer) -> list[OperandPlan]:
    return [operand for entry in quantizer.plan.values() for operand in entry.operands if operand.role == "weight"]


def test_operator_is_torchs_grouped_product() -> None:
    given = batch(0)
    weight = Experts().up.detach().transpose(-2, -1)
    ours = grouped_mm(given["x"], weight, given["ends"])
    torch.testing.assert_close(ours, F.grouped_mm(given["x"], weight, offs=given["ends"]))


def test_off_is_identical() -> None:
    model = Experts()
    assert torch.equal(Quantizer(preset="plain").proxy(model)(**batch(0)), model(**batch(0)))


@pytest.mark.parametrize(
    ("granularity", "shapes"), [("per_channel", [(4, 1, 64), (4, 1, 64)]), ("per_tensor", [(4,), (4,)])]
)
def test_each_expert_has_ranges_of_its_own(granularity: str, shapes: list[tuple[int, ...]]) -> None:
    model = Experts()
    quantizer = calibrated(model, weights={"granularity": granularity})
    assert quantizer.coverage.share == 1
    assert [tuple(operand.scale.shape) for operand in weights(quantizer) if operand.scale is not None] == shapes
    expected, given = model(**batch(3)), quantizer.quantize(model)(**batch(3))
    assert sqnr_db(expected.detach().numpy(), given.detach().numpy()) > 30


def test_experts_without_a_row_are_named_and_quantized() -> None:
    quantizer = calibrated(Experts())
    notes = {operand.note for operand in weights(quantizer)}
    assert notes == {"no calibration sample reached 1 of 4 experts (2); the range comes from the other experts"}
    model = Experts()
    reached = batch(4, (3, 6, 18, _ROWS))
    given = calibrated(model).quantize(model)(**reached)
    assert sqnr_db(model(**reached).detach().numpy(), given.detach().numpy()) > 25


def test_saved_and_loaded(tmp_path: Path) -> None:
    model = Experts()
    quantizer = calibrated(model)
    given = quantizer.quantize(model)(**batch(3))
    quantizer.save(tmp_path / "q")
    again = Quantizer.load(tmp_path / "q")
    assert torch.equal(again.quantize(model)(**batch(3)), given)
    assert {operand.note for operand in weights(again)} == {operand.note for operand in weights(quantizer)}


def test_training_reaches_the_weights_of_experts() -> None:
    model = Experts()
    trained = calibrated(model).qat(model)
    trained.train()
    trained(**batch(3)).square().mean().backward()
    grad = trained.up.grad
    assert grad is not None
    assert grad[0].abs().sum() > 0
    assert grad[2].abs().sum() == 0


@pytest.mark.usefixtures("exact_byte_products")
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_engine_gives_the_proxys_outputs(backend: str, tmp_path: Path) -> None:
    pytest.importorskip(backend)
    model = Experts()
    quantizer = calibrated(model, backend)
    frozen = quantizer.quantize(model)
    path = quantizer.export(frozen, tmp_path / "model.onnx", batch(1))
    assert list(check_file(path, backend)) == []
    engine = load_engine(backend, build_engine(backend, path, tmp_path / "engine", BuildOptions()).path)
    # Other rows for each expert than at the export, and one expert without any.
    for given in (batch(3), batch(5, (0, 1, 20, _ROWS))):
        (made,) = engine({name: value.numpy() for name, value in given.items()}).values()
        assert sqnr_db(frozen(**given).detach().numpy(), np.asarray(made)) > 60


class Registry(UserDict[str, Any]):
    """Functions by name, as transformers holds those of its experts."""


def up(self: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, self.weight)


CHOICES = Registry(up=up)


def chosen(forward: Any, choices: Registry = CHOICES) -> Any:
    @functools.wraps(forward)
    def choose(self: nn.Module, x: Tensor) -> Tensor:
        return choices.get(self.choice, forward)(self, x)

    return choose


class Choosing(nn.Module):
    """A module whose decorator chooses what runs from a registry."""

    def __init__(self, choice: str) -> None:
        super().__init__()
        self.choice = choice
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    @chosen
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).relu()


@pytest.mark.parametrize(("choice", "name"), [("up", "up.linear_0"), ("none", "forward.linear_0")])
def test_what_a_decorator_chooses_from_a_registry_is_a_site(choice: str, name: str) -> None:
    model, x = Choosing(choice), batch(1)["x"]
    before = dict(CHOICES)
    quantizer = Quantizer(backend="openvino", preset="plain")
    quantizer.calibrate(model, [{"x": x}], progress=False)
    assert [path for path, entry in quantizer.plan.items() if entry.quantized] == [name]
    assert quantizer.coverage.share == 1
    assert torch.equal(quantizer.proxy(model)(x), model(x))
    assert dict(CHOICES) == before


class Mixture(nn.Module):
    """A mixture as transformers writes them: the router's choice is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.experts = Experts()

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        order = index.flatten().argsort()
        ends = torch.bincount(index.flatten(), minlength=EXPERTS).cumsum(0).to(torch.int32)
        return F.grouped_mm(x[order // index.shape[1]], self.experts.up.transpose(-2, -1), offs=ends)


def routed() -> nn.Module:
    """A mixture behind a router that sends all to the first two experts."""
    return net("self.mixture(x, torch.zeros(len(x), 2, dtype=torch.long) + torch.arange(2))", mixture=Mixture())


@pytest.mark.parametrize(("all_experts", "unreached"), [(False, 2), (True, 0)])
def test_all_experts_see_every_token(all_experts: bool, unreached: int) -> None:
    model = routed()
    quantizer = Quantizer(backend="openvino", preset="plain", activations={"all_experts": all_experts})
    rows = [{"x": batch(seed)["x"]} for seed in (1, 2)]
    calib = quantizer.calib(model)
    assert torch.equal(calib(**rows[0]), model(**rows[0]))
    quantizer.quantize(model)
    found = [f"reached {unreached} of" in (operand.note or "") for operand in weights(quantizer)]
    assert found == [unreached > 0]


def test_all_experts_of_another_kind_are_refused() -> None:
    quantizer = Quantizer(backend="openvino", preset="plain", activations={"all_experts": True})
    calib = quantizer.calib(Experts())
    with pytest.raises(CalibrationError, match="expected one argument with expert indices"):
        calib(**batch(1))
