"""Including and excluding: exactly the sites that a rule names, and the coverage says which rule did it."""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from typing import Any

import pytest
import torch
from helpers import Mlp, batch, tiny
from torch import Tensor, nn

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


def test_a_type_covers_what_is_inside_functional_products_included() -> None:
    lost = _excluded(exclude={"module_types": ["Attention"]})
    assert len(lost) == 12 * 6
    assert "layer.0.attention.forward.matmul_0" in lost
    assert "layer.0.attention.query.forward.linear_0" in lost
    assert "layer.0.feed.0.forward.linear_0" not in lost
    assert set(lost.values()) == {"exclude.module_types: Attention"}


def test_a_type_covers_its_subclasses_but_not_its_bases() -> None:
    lost = _excluded(exclude={"module_types": ["SpecialAttention"]})
    assert len(lost) == 6
    assert all(name.startswith("layer.3.attention.") for name in lost)


@pytest.mark.parametrize("wanted", ["torch.nn.Linear", "nn.Linear", "torch.nn.modules.linear.Linear", "Linear"])
def test_a_dotted_type(wanted: str) -> None:
    lost = _excluded(exclude={"module_types": [wanted]})
    assert len(lost) == 12 * 6 + 1
    assert all(name.endswith("linear_0") for name in lost)


@pytest.mark.parametrize("wanted", ["Linea", "linear", "tensorflow.Linear", "torch.Attention", "Linear.torch"])
def test_a_type_that_matches_nothing(wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"exclude\.module_types.*matches nothing: no module of this type"):
        Quantizer(preset="plain", exclude={"module_types": [wanted]}).calib(Model())


def test_the_type_of_the_root_covers_everything() -> None:
    assert len(_excluded(exclude={"module_types": ["Model"]})) == SITES


# -- names ---------------------------------------------------------------------------------------------------------


def test_names_match_whole_segments() -> None:
    lost = _excluded(exclude={"names": ["layer.1"]})
    assert lost
    assert {name.split(".")[1] for name in lost} == {"1"}
    assert set(lost.values()) == {"exclude.names: layer.1"}


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


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("layer.*.attention", 72), ("**.query", 12), ("layer.1*.feed", 6), ("layer.**.attention", 72)],
)
def test_wildcards(pattern: str, count: int) -> None:
    assert len(_excluded(exclude={"names": [pattern]})) == count


def test_a_name_that_matches_nothing_gets_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"'layer\.0\.atention' matches nothing.*did you mean 'layer\.0\.attention'"):
        Quantizer(preset="plain", exclude={"names": ["layer.0.atention"]}).calib(Model())


def test_all_patterns_that_match_nothing_are_reported_at_once() -> None:
    rules = {"names": ["nope", "layer.99"], "module_types": ["Nope"], "sites": ["**.nope_0"]}
    with pytest.raises(ConfigError, match="8 problems") as caught:
        Quantizer(preset="plain", exclude=rules, include=rules).calib(Model())
    assert sum("quantizer.exclude." in problem for problem in caught.value.problems) == 4
    assert sum("quantizer.include." in problem for problem in caught.value.problems) == 4


def test_inspect_reports_them_too() -> None:
    with pytest.raises(ConfigError, match="'nope' matches nothing"):
        Quantizer(preset="plain", exclude={"names": ["nope"]}).inspect(Model())


def test_a_failed_calib_leaves_the_quantizer_usable() -> None:
    q = Quantizer(preset="plain", exclude={"names": ["nope"]})
    with pytest.raises(ConfigError, match="'nope' matches nothing"):
        q.calib(Model())


# -- sites ---------------------------------------------------------------------------------------------------------


def test_a_site() -> None:
    lost = _excluded(exclude={"sites": ["layer.2.attention.forward.matmul_1"]})
    assert lost == {"layer.2.attention.forward.matmul_1": "exclude.sites: layer.2.attention.forward.matmul_1"}


def test_a_site_pattern() -> None:
    assert len(_excluded(exclude={"sites": ["**.matmul_*"]})) == 24


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


def test_one_operand_of_a_product_cannot_be_chosen() -> None:
    with pytest.raises(ConfigError, match="matches nothing: no site of this name"):
        Quantizer(preset="plain", exclude={"sites": ["layer.0.attention.forward.matmul_0.lhs"]}).calib(Model())


def test_a_module_among_the_sites_leads_to_its_site() -> None:
    said = r"'linear' matches nothing: no site .*; it is a module, for exclude\.names, with the site "
    model = nn.Sequential(OrderedDict(linear=nn.Linear(8, 8)))
    with pytest.raises(ConfigError, match=rf"{said}'linear\.forward\.linear_0'$"):
        Quantizer(preset="plain", exclude={"sites": ["linear"]}).calib(model)


def test_the_first_rule_is_named_when_two_match() -> None:
    lost = _excluded(exclude={"names": ["layer.0"], "sites": ["layer.0.forward.add_0"]})
    assert lost["layer.0.forward.add_0"] == "exclude.names: layer.0"


def test_a_second_rule_for_the_same_site_is_no_problem() -> None:
    rules = {"names": ["layer.0", "layer.0.attention"], "module_types": ["Block"], "sites": ["layer.0.forward.add_0"]}
    assert _excluded(exclude=rules)


# -- include -------------------------------------------------------------------------------------------------------


def _quantized(**rules: Any) -> set[str]:
    return {row.name for row in _covered(sites={"residual_add": False}, **rules) if row.quantized}


def test_including_a_leaf_by_name() -> None:
    assert _quantized(include={"names": ["layer.0.attention.query"]}) == {"layer.0.attention.query.forward.linear_0"}


def test_including_a_leaf_by_type() -> None:
    assert len(_quantized(include={"module_types": ["Linear"]})) == 73


def test_including_a_site() -> None:
    assert _quantized(include={"sites": ["layer.7.**.matmul_*"]}) == {
        "layer.7.attention.forward.matmul_0",
        "layer.7.attention.forward.matmul_1",
    }


def test_what_is_not_included_says_so() -> None:
    rows = _covered(include={"names": ["head"]})
    assert {row.rule for row in rows if not row.quantized} == {"not among the included"}


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


def test_conv_is_switched_off() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16 * 9, 16)).eval()
    q = Quantizer(preset="plain", sites={"conv": False})
    q.calibrate(model, [torch.randn(2, 16, 5, 5)])
    assert {row.kind for row in q.coverage.quantized} == {"linear"}


def _residuals(setting: object, x: Tensor = X) -> list[Site]:
    q = Quantizer(preset="plain", backend="openvino", sites={"residual_add": setting})
    q.calibrate(Model().eval(), [x])
    return [row for row in q.coverage if row.kind == "residual_add"]


def test_residual_add_true_and_false() -> None:
    assert len([row for row in _residuals(True) if row.quantized]) == 24
    assert not [row for row in _residuals(False) if row.quantized]
    assert {row.rule for row in _residuals(False)} == {"sites.residual_add: false"}


class Spiky(nn.Module):
    """An add whose left operand has a few values some thousand times larger than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first(x)


def test_residual_add_auto_goes_by_the_operands_own_ratio() -> None:
    x = torch.randn(64, 32)
    x[:, 0] *= 3000
    model = Spiky().eval()
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
            assert "INT8 does not hold it: SQNR" in (operand.reason or "")


def test_residual_add_auto_refuses_outliers() -> None:
    """Most of the energy lies in the small values, and one outlier stretches the range."""
    x = torch.randn(4000, 32)
    x[0, 0] = 500.0
    model = Spiky().eval()
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    q.calibrate(model, [x])
    operand = q.plan["forward.add_0"].operands[0]
    assert not operand.quantized
    assert operand.sqnr_db is not None
    assert operand.sqnr_db < 30
    assert "below 33 dB" in (operand.reason or "")
    # The measured ratio is that of the data.
    rounded = torch.fake_quantize_per_tensor_affine(x, float(operand.scale), 0, -128, 127)  # type: ignore[arg-type]
    true = 10 * torch.log10(x.square().sum() / (x - rounded).square().sum())
    assert operand.sqnr_db == pytest.approx(float(true), abs=1.5)


# -- a real model --------------------------------------------------------------------------------------------------


def test_a_transformers_model() -> None:
    pytest.importorskip("transformers", reason="makes a transformers model: install enginequant[hf]")
    model = tiny("bert-classification", "sdpa")
    rules = {"module_types": ["BertPooler"], "names": ["classifier", "bert.encoder.layer.1.attention"]}
    q = Quantizer(preset="plain", exclude=rules)
    q.calibrate(model, [batch("bert", padded=True)])
    by_rule: dict[str, set[str]] = {}
    for row in q.coverage:
        if row.rule is not None:
            by_rule.setdefault(row.rule, set()).add(row.name)
    assert by_rule["exclude.module_types: BertPooler"] == {"bert.pooler.dense.forward.linear_0"}
    assert by_rule["exclude.names: classifier"] == {"classifier.forward.linear_0"}
    attention = by_rule["exclude.names: bert.encoder.layer.1.attention"]
    assert sum("matmul" in name for name in attention) == 2
    assert sum("linear" in name for name in attention) == 4
    assert "bert.encoder.layer.0.attention.self.query.forward.linear_0" in {row.name for row in q.coverage.quantized}


def test_a_rule_is_not_matched_by_a_site() -> None:
    """Sites are children of their modules, but no modules of the user's."""
    with pytest.raises(ConfigError, match="matches nothing"):
        Quantizer(preset="plain", exclude={"module_types": ["Site"]}).calib(Mlp())
    with pytest.raises(ConfigError, match="matches nothing"):
        Quantizer(preset="plain", exclude={"names": ["up.site_forward_linear_0"]}).calib(Mlp())
    with pytest.raises(ConfigError, match="matches nothing"):
        Quantizer(preset="plain", exclude={"module_types": ["OperandQuantizer"]}).calib(Mlp())
    with pytest.raises(ConfigError, match="matches nothing"):
        Quantizer(preset="plain", exclude={"names": ["**._input_quantizer"]}).calib(Mlp())
