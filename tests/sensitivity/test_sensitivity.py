"""Relative errors against brute force, and the groups that they kept in float."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from helpers import Mlp, batch, tiny
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from quantizer import Quantizer
from quantizer.algorithms.sensitivity import Fallback, GroupSensitivity, by_rank
from quantizer.errors import ProxyError, SensitivityError
from quantizer.numerics import torch_operators as ops


def _quantizer(model: nn.Module, data: list[Any], **options: Any) -> Quantizer:
    return make_calibrated(model, data, **{"backend": "openvino", **options})


def _errors(quantizer: Quantizer) -> dict[str, float]:
    return {row.group: row.error for row in quantizer.sensitivity}


# -- the formula ---------------------------------------------------------------------------------------------------


def test_the_relative_error_is_that_of_brute_force() -> None:
    model, x = Mlp().eval(), torch.randn(16, 32)
    quantizer = _quantizer(model, [x], sites={"residual_add": True})
    amp = quantizer.amp(model, measure="output")
    with torch.no_grad():
        assert torch.equal(amp(x), model(x))
    scales = {(site.name, o.name): (o.scale, o.axis) for site in quantizer.plan.values() for o in site.operands}

    def rounded(value: Tensor, site: str, operand: str) -> Tensor:
        return ops.fake_quantize(value, *(scales[(site, operand)][:1]), "int8", scales[(site, operand)][1])

    up, down, add = "up.forward.linear_0", "down.forward.linear_0", "forward.add_0"
    with torch.no_grad():
        hidden = model.act(model.up(x))
        tail = model.down(hidden)
        outputs = {
            up: x
            + model.down(
                model.act(F.linear(rounded(x, up, "input"), rounded(model.up.weight, up, "weight"), model.up.bias))
            ),
            down: x
            + F.linear(rounded(hidden, down, "input"), rounded(model.down.weight, down, "weight"), model.down.bias),
            f"{add}.lhs": rounded(x, add, "lhs") + tail,
            f"{add}.rhs": x + rounded(tail, add, "rhs"),
        }
        y = (x + tail).double()
    expected = {
        group: float((output.double() - y).square().sum() / y.square().sum()) for group, output in outputs.items()
    }
    found = _errors(quantizer)
    assert set(found) == set(expected)
    for group, error in expected.items():
        assert found[group] == pytest.approx(error, rel=1e-6), group
    ranking = [row.group for row in quantizer.sensitivity]
    assert ranking == sorted(expected, key=lambda group: -expected[group])
    assert [row.rank for row in quantizer.sensitivity] == [1, 2, 3, 4]


def test_the_order_and_size_of_the_data_do_not_matter() -> None:
    model = Mlp().eval()
    batches = [torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    quantizer = _quantizer(model, batches)
    results = []
    for data in (batches, batches[::-1]):
        amp = quantizer.amp(model)
        with torch.no_grad():
            for x in data:
                amp(x)
        results.append(_errors(quantizer))
    assert results[0].keys() == results[1].keys()
    for group, error in results[0].items():
        assert results[1][group] == pytest.approx(error, rel=1e-12)


def test_a_relative_error_does_not_grow_with_the_output_or_the_data() -> None:
    torch.manual_seed(3)
    x = torch.randn(16, 32)
    errors = []
    for factor, repeat in ((1.0, 1), (1024.0, 1), (1.0, 3)):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)).eval()
        with torch.no_grad():
            model[2].weight.mul_(factor)
            model[2].bias.mul_(factor)
        quantizer = _quantizer(model, [x])
        amp = quantizer.amp(model, measure="output")
        with torch.no_grad():
            for _ in range(repeat):
                amp(x.repeat(repeat, 1))
        errors.append(_errors(quantizer))
    for group, error in errors[0].items():
        for other in errors[1:]:
            assert other[group] == pytest.approx(error, rel=1e-5)


def test_padding_is_left_out() -> None:
    model = tiny("bert")
    data = [batch("bert", padded=True, seed=seed) for seed in range(2)]
    quantizer = _quantizer(model, data)
    amp = quantizer.amp(model, measure="output")
    with torch.no_grad():
        amp(**data[0])
    expected = _errors(quantizer)
    # Twice the columns, all of them padding: nobody reads what the model makes of them.
    wide = {name: F.pad(value, (0, 8), value=1 if name == "input_ids" else 0) for name, value in data[0].items()}
    assert wide["attention_mask"].sum() == data[0]["attention_mask"].sum()
    amp = quantizer.amp(model, measure="output")
    with torch.no_grad():
        amp(**wide)
    found = _errors(quantizer)
    for group, error in expected.items():
        assert found[group] == pytest.approx(error, rel=1e-3), group


# -- interruptions and misuse --------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupted_batch_leaves_the_averages(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    model, x = Mlp().eval(), torch.randn(8, 32)
    quantizer = _quantizer(model, [x])
    amp = quantizer.amp(model)
    with torch.no_grad():
        amp(x)
    before = _errors(quantizer)
    calls = 0
    original = ops.fake_quantize

    def interrupted(*arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(ops, "fake_quantize", interrupted)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        amp(x * 5)
    monkeypatch.undo()
    assert _errors(quantizer) == before
    with torch.no_grad():
        assert torch.equal(amp(x), model(x))
    for group, error in before.items():
        assert _errors(quantizer)[group] == pytest.approx(error, rel=1e-12)


@pytest.mark.parametrize("which", ["calib", "older", "other", "float"])
def test_fallback_takes_the_proxy_of_the_last_amp(which: str) -> None:
    model, x = Mlp().eval(), torch.randn(8, 32)
    quantizer, other = _quantizer(model, [x]), _quantizer(model, [x])
    older, amp = quantizer.amp(model), quantizer.amp(model)
    with torch.no_grad():
        older(x), amp(x)
    wrong = {"calib": quantizer.calib(model, resume=True), "older": older, "other": other.amp(model), "float": model}
    with pytest.raises(ProxyError, match=r"fallback\(\) expects the proxy that the last amp\(\) of this Quantizer"):
        quantizer.fallback(wrong[which], num=1)


# -- choosing ------------------------------------------------------------------------------------------------------


def _entry(rank: int, error: float) -> GroupSensitivity:
    return GroupSensitivity(
        rank=rank, group=f"g{rank}", kind="linear", error=error, sites=(f"g{rank}",), parts=(f"g{rank}",)
    )


RANKING = [_entry(n, 1 / n) for n in range(1, 8)]


@given(num=st.integers(0, 7))
def test_num_takes_the_most_sensitive(num: int) -> None:
    chosen = by_rank(RANKING, num=num)
    assert chosen.groups == tuple(f"g{n}" for n in range(1, num + 1))
    assert chosen.asked == f"num={num}"


@pytest.mark.parametrize(
    ("ratio", "count"), [(0, 0), (0.0, 0), (1e-9, 1), (1 / 7, 1), (0.15, 2), (0.5, 4), (6 / 7, 6), (1, 7), (1.0, 7)]
)
def test_ratio_is_rounded_up(ratio: float, count: int) -> None:
    chosen = by_rank(RANKING, ratio=ratio)
    assert len(chosen.groups) == count


@pytest.mark.parametrize("size", [3, 7, 10, 49, 100])
def test_a_ratio_of_whole_groups_is_that_many(size: int) -> None:
    ranking = [_entry(n, 1.0) for n in range(size)]
    for count in range(size + 1):
        assert len(by_rank(ranking, ratio=count / size).groups) == count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num": 8}, "num=8: only 7 groups are quantized"),
        ({"num": -1}, "num=-1: expected a whole number of groups, 0 or more"),
        ({"num": True}, "num=True: expected a whole number"),
        ({"num": 1.0}, "num=1.0: expected a whole number"),
        ({"num": "2"}, "num='2': expected a whole number"),
        ({"ratio": -0.1}, "ratio=-0.1: expected a share between 0 and 1"),
        ({"ratio": 1.1}, "ratio=1.1: expected a share between 0 and 1"),
        ({"ratio": float("nan")}, "ratio=nan: expected a share between 0 and 1"),
        ({"ratio": True}, "ratio=True: expected a share between 0 and 1"),
        ({"ratio": "0.5"}, "ratio='0.5': expected a share between 0 and 1"),
    ],
)
def test_what_cannot_be_chosen(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SensitivityError, match=message):
        by_rank(RANKING, **options)


def test_equal_errors_keep_one_order() -> None:
    assert Fallback(groups=("b", "a"), asked="num=2", ranks=(1, 2)).reasons() == {
        "b": "kept in float by fallback(num=2): rank 1",
        "a": "kept in float by fallback(num=2): rank 2",
    }


# -- groups --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["bert", "mpnet", "distilbert"])
def test_groups_are_never_half_quantized(architecture: str) -> None:
    model = tiny(architecture)
    data = batch(architecture)
    quantizer = _quantizer(model, [data], sites={"residual_add": True})
    amp = quantizer.amp(model)
    with torch.no_grad():
        amp(**data)
    total = len(quantizer.sensitivity)
    members = {row.group: set(row.sites) for row in quantizer.sensitivity}
    for num in range(total + 1):
        chosen = quantizer.fallback(amp, num=num)
        assert len(set(chosen.groups)) == num
        for site in quantizer.plan.values():
            states = {operand.quantized for operand in site.operands}
            assert site.kind == "residual_add" or len(states) <= 1, site.name
            for operand in site.operands:
                if operand.group in members:
                    assert operand.quantized == (operand.group not in chosen.groups)
    attention = [sites for sites in members.values() if len(sites) == 3]
    assert len(attention) == 2, "query, key and value of each layer belong together"
    assert not any(row.quantized for row in quantizer.coverage)
    frozen = quantizer.quantize(model)
    with torch.no_grad():
        for ours, theirs in zip(frozen(**data).values(), model(**data).values(), strict=True):
            assert torch.equal(ours, theirs)


def test_fallback_replaces_and_can_be_undone() -> None:
    model, x = Mlp().eval(), torch.randn(8, 32)
    quantizer = _quantizer(model, [x], sites={"residual_add": True})
    before = {name: site.reason for name, site in quantizer.plan.items()}
    config = quantizer.config.model_dump()
    amp = quantizer.amp(model)
    with torch.no_grad():
        amp(x)
    first = [quantizer.fallback(amp, num=2).groups for _ in range(2)]
    assert first[0] == first[1]
    assert len(quantizer.fallback(amp, num=1).groups) == 1
    assert [row.fallback for row in quantizer.sensitivity] == [True, False, False, False]
    assert quantizer.config.model_dump() == config
    quantizer.clear_fallback()
    assert quantizer.chosen_fallback is None
    assert {name: site.reason for name, site in quantizer.plan.items()} == before


def test_a_new_calibration_forgets_the_fallback() -> None:
    model, x = Mlp().eval(), torch.randn(8, 32)
    quantizer = _quantizer(model, [x])
    amp = quantizer.amp(model)
    with torch.no_grad():
        amp(x)
    quantizer.fallback(amp, num=1)
    quantizer.calibrate(model, [x])
    assert quantizer.chosen_fallback is None
    with pytest.raises(SensitivityError, match="nothing was measured yet"):
        _ = quantizer.sensitivity
