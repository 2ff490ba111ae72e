"""Including and excluding: exactly the sites that a rule names, and the coverage says which rule did it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.errors import ConfigError
from quantizer.plan.selection import matches
from quantizer.utils.records import Site


class Attention(nn.Module):
    """Query, key and value of one input, and two products of activations, in the class itself."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(32, 32)
        self.key = nn.Linear(32, 32)
        self.value = nn.Linear(32, 32)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.matmul(self.query(x), self.key(x).transpose(-1, -2))
        return self.out(torch.matmul(scores.softmax(-1), self.value(x)))


class SpecialAttention(Attention):
    """A subclass that changes nothing."""


class Block(nn.Module):
    """Attention and a feed-forward part, each with a residual add."""

    def __init__(self, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.attention = attention()
        self.feed = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.feed(x)


class Model(nn.Module):
    """Twelve blocks, so that names such as ``layer.1`` and ``layer.10`` both exist."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block(SpecialAttention if place == 3 else Attention) for place in range(12))
        self.head = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x)
        return self.head(x)


X = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
SITES = 12 * 10 + 1


def _covered(**options: Any) -> list[Site]:
    q = Quantizer(preset="plain", backend="openvino", **options)
    model = Model().eval()
    q.calibrate(model, [X])
    # Coverage and the frozen model must say the same.
    frozen = q.quantize(model)
    held = {row.name for row in q.coverage.quantized}
    active = {site.path for site in frozen.modules() if getattr(site, "active", False)}
    assert held == active
    return list(q.coverage)


@cache
def _quantized_without_rules() -> frozenset[str]:
    return frozenset(row.name for row in _covered(sites={"residual_add": True}) if row.quantized)


def _excluded(**rules: Any) -> dict[str, str | None]:
    """Sites that are float because of the rules, with the rule."""
    without = _quantized_without_rules()
    rows = _covered(sites={"residual_add": True}, **rules)
    assert {row.name for row in rows} >= without
    lost = {row.name: row.rule for row in rows if not row.quantized and row.name in without}
    assert {row.name for row in rows if row.reason == "excluded by rule"} == set(lost)
    return lost


# -- types ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "count", "among", "names"),
    [
        ({"module_types": ["Attention"]}, 72, "layer.0.attention.forward.matmul_0", "layer.*.attention.**"),
        ({"module_types": ["Attention"]}, 72, "layer.0.attention.query.forward.linear_0", "layer.*.attention.**"),
        # Subclasses, but not their bases.
        ({"module_types": ["SpecialAttention"]}, 6, "layer.3.attention.forward.matmul_1", "layer.3.attention.**"),
        *(
            ({"module_types": [spelled]}, 73, "head.forward.linear_0", "**.linear_0")
            for spelled in ("torch.nn.Linear", "nn.Linear", "torch.nn.modules.linear.Linear", "Linear")
        ),
        ({"module_types": ["Model"]}, SITES, "head.forward.linear_0", "**"),
        ({"names": ["layer.1"]}, 10, "layer.1.forward.add_0", "layer.1.**"),
        ({"names": ["layer.*.attention"]}, 72, "layer.0.attention.forward.matmul_0", "layer.*.attention.**"),
        ({"names": ["**.query"]}, 12, "layer.0.attention.query.forward.linear_0", "**.query.**"),
        ({"names": ["layer.1*.feed"]}, 6, "layer.11.feed.0.forward.linear_0", "layer.1*.feed.**"),
        ({"names": ["layer.**.attention"]}, 72, "layer.0.attention.forward.matmul_0", "layer.*.attention.**"),
        ({"sites": ["**.matmul_*"]}, 24, "layer.0.attention.forward.matmul_0", "**.matmul_*"),
    ],
    ids=str,
)
def test_what_a_rule_leaves_float(rules: dict[str, list[str]], count: int, among: str, names: str) -> None:
    lost = _excluded(exclude=rules)
    assert len(lost) == count
    assert among in lost
    assert all(matches(names, name) for name in lost)
    ((kind, (pattern,)),) = rules.items()
    assert set(lost.values()) == {f"exclude.{kind}: {pattern}"}


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("layer.1", "layer.1", True),
        ("layer.1", "layer.10", False),
        ("layer.1", "encoder.layer.1", False),
        ("layer.1", "layer.1.attention", False),
        ("layer.*", "layer.10", True),
        ("layer.*", "layer.10.attention", False),
        ("layer.1*", "layer.11", True),
        ("*", "layer.1", False),
        ("**", "layer.1", True),
        ("**", "layer", True),
        ("**.dense", "dense", True),
        ("**.dense", "a.b.dense", True),
        ("**.dense", "a.dense.b", False),
        ("a.**.dense", "a.dense", True),
        ("a.**.dense", "a.b.c.dense", True),
        ("a.**", "a", True),
        ("a.**", "b.a", False),
        ("**.a.**.b", "x.a.a.b", True),
        ("LAYER.1", "layer.1", False),
    ],
)
def test_patterns(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


def test_all_patterns_that_match_nothing_are_reported_at_once() -> None:
    rules = {"names": ["nope", "layer.99"], "module_types": ["Nope"], "sites": ["**.nope_0"]}
    with pytest.raises(ConfigError, match="8 problems") as caught:
        Quantizer(preset="plain", exclude=rules, include=rules).calib(Model())
    assert sum("quantizer.exclude." in problem for problem in caught.value.problems) == 4
    assert sum("quantizer.include." in problem for problem in caught.value.problems) == 4


# -- sites ---------------------------------------------------------------------------------------------------------


def test_a_site() -> None:
    lost = _excluded(exclude={"sites": ["layer.2.attention.forward.matmul_1"]})
    assert lost == {"layer.2.attention.forward.matmul_1": "exclude.sites: layer.2.attention.forward.matmul_1"}


def test_one_operand_of_an_add() -> None:
    q = Quantizer(
        preset="plain",
        backend="openvino",
        sites={"residual_add": True},
        exclude={"sites": ["layer.0.forward.add_1.lhs"]},
    )
    model = Model().eval()
    q.calibrate(model, [X])
    operands = {operand.name: operand for operand in q.plan["layer.0.forward.add_1"].operands}
    assert not operands["lhs"].quantized
    assert operands["lhs"].reason == "excluded by rule"
    assert operands["rhs"].quantized
    assert q.plan["layer.0.forward.add_1"].quantized
    q.quantize(model)(X)


def test_the_first_rule_is_named_when_two_match() -> None:
    lost = _excluded(exclude={"names": ["layer.0"], "sites": ["layer.0.forward.add_0"]})
    assert lost["layer.0.forward.add_0"] == "exclude.names: layer.0"


def test_a_second_rule_for_the_same_site_is_no_problem() -> None:
    rules = {"names": ["layer.0", "layer.0.attention"], "module_types": ["Block"], "sites": ["layer.0.forward.add_0"]}
    assert _excluded(exclude=rules)


# -- include -------------------------------------------------------------------------------------------------------


def _quantized(**rules: Any) -> set[str]:
    return {row.name for row in _covered(sites={"residual_add": False}, **rules) if row.quantized}


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ({"names": ["layer.0.attention.query"]}, ["layer.0.attention.query.forward.linear_0"]),
        ({"sites": ["layer.7.**.matmul_*"]}, [f"layer.7.attention.forward.matmul_{place}" for place in range(2)]),
    ],
)
def test_what_is_included(rules: dict[str, list[str]], names: list[str]) -> None:
    assert _quantized(include=rules) == set(names)


def test_what_is_not_included_says_so() -> None:
    assert len(_quantized(include={"module_types": ["Linear"]})) == 73
    rows = _covered(include={"names": ["head"]})
    assert {row.rule for row in rows if not row.quantized} == {"not matched by include"}


def test_exclude_beats_include_on_the_same_module() -> None:
    rules = {"names": ["layer.0.attention"]}
    assert _quantized(include=rules, exclude=rules) == set()
    narrowed = _quantized(include=rules, exclude={"names": ["layer.0.attention.query"]})
    assert len(narrowed) == 5
    assert "layer.0.attention.query.forward.linear_0" not in narrowed
    wider = _quantized(include={"names": ["layer.0.attention.query"]}, exclude={"names": ["layer.0"]})
    assert wider == set()


def test_including_one_operand_of_an_add() -> None:
    q = Quantizer(
        preset="plain",
        backend="openvino",
        sites={"residual_add": True},
        include={"sites": ["layer.0.forward.add_1.rhs", "head.**"]},
    )
    q.calibrate(Model().eval(), [X])
    held = {operand.name for operand in q.plan["layer.0.forward.add_1"].operands if operand.quantized}
    assert held == {"rhs"}


# -- kinds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "count"), [("linear", 73), ("matmul", 24)])
def test_a_kind_is_switched_off(kind: str, count: int) -> None:
    rows = [row for row in _covered(sites={kind: False}) if row.kind == kind]
    assert len(rows) == count
    assert not any(row.quantized for row in rows)
    assert {row.rule for row in rows} == {f"sites.{kind}: false"}


def _residuals(setting: object, x: Tensor = X) -> list[Site]:
    q = Quantizer(preset="plain", backend="openvino", sites={"residual_add": setting})
    q.calibrate(Model().eval(), [x])
    return [row for row in q.coverage if row.kind == "residual_add"]


def test_residual_add_true_and_false() -> None:
    assert len([row for row in _residuals(True) if row.quantized]) == 24
    assert not [row for row in _residuals(False) if row.quantized]
    assert {row.rule for row in _residuals(False)} == {"sites.residual_add: false"}


def spiky() -> nn.Module:
    """An add whose left operand has a few values some thousand times larger than the rest."""
    return net("x + self.first(x)", first=linear())


def test_residual_add_auto_goes_by_the_operands_own_ratio() -> None:
    x = torch.randn(64, 32)
    x[:, 0] *= 3000
    model = spiky().eval()
    with torch.no_grad():
        model.first.weight.mul_(torch.tensor([0.0] + [1.0] * 31))
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [x])
    operands = {operand.name: operand for operand in q.plan["forward.add_0"].operands}
    assert not operands["lhs"].quantized or (operands["lhs"].sqnr_db or 0) >= 30
    assert operands["rhs"].quantized
    assert (operands["rhs"].sqnr_db or 0) >= 30
    for operand in operands.values():
        if not operand.quantized:
            assert "SQNR in int8 is" in (operand.reason or "")


def test_residual_add_auto_refuses_outliers() -> None:
    """Most of the energy lies in the small values, and one outlier stretches the range."""
    x = torch.randn(4000, 32)
    x[0, 0] = 500.0
    model = spiky().eval()
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    q.calibrate(model, [x])
    operand = q.plan["forward.add_0"].operands[0]
    assert not operand.quantized
    assert operand.sqnr_db is not None
    assert operand.sqnr_db < 30
    assert "below the limit of 33 dB" in (operand.reason or "")
    # The measured ratio is that of the data.
    rounded = torch.fake_quantize_per_tensor_affine(x, float(operand.scale), 0, -128, 127)  # type: ignore[arg-type]
    true = 10 * torch.log10(x.square().sum() / (x - rounded).square().sum())
    assert operand.sqnr_db == pytest.approx(float(true), abs=1.5)
