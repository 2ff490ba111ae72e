"""Measuring groups and putting them back: whole groups, reproducibly, and undone when asked."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from helpers import ConvNet, Mlp, Snapshot, assert_same, batch, tiny
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.errors import ProxyError, SensitivityError


def _measured(model: nn.Module, *data: Any, **options: Any) -> tuple[Quantizer, nn.Module]:
    q = Quantizer(preset="plain", **{"backend": "openvino", **options})
    q.calibrate(model, data)
    amp = q.amp(model)
    with torch.no_grad():
        for item in data:
            amp(**item) if isinstance(item, dict) else amp(item)
    return q, amp


def _bert(**options: Any) -> tuple[nn.Module, Quantizer, nn.Module]:
    pytest.importorskip("transformers", reason="makes a transformers model: install enginequant[hf]")
    model = tiny("bert", "sdpa")
    return model, *_measured(model, batch("bert", padded=True), batch("bert", seed=5), **options)


def _members(q: Quantizer) -> dict[str, set[tuple[str, str]]]:
    """Operands of each group, from the plan."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for path, site in q.plan.items():
        for operand in site.operands:
            if operand.group is not None:
                found[operand.group].add((path, operand.name))
    return found


# -- measuring -----------------------------------------------------------------------------------------------------


def test_the_amp_proxy_gives_the_eager_float_output() -> None:
    _, _, amp = _bert()
    eager = tiny("bert", "eager")
    inputs = batch("bert", padded=True)
    with torch.no_grad():
        assert_same(amp(**inputs), eager(**inputs))
        assert_same(amp(**inputs, output_hidden_states=True), eager(**inputs, output_hidden_states=True))


def test_the_float_model_is_the_same_to_the_bit_afterwards() -> None:
    model = tiny("bert", "sdpa")
    inputs = batch("bert", padded=True)
    with torch.no_grad():
        expected = model(**inputs)
        before = Snapshot.of(model)
        q, amp = _measured(model, inputs)
        q.fallback(amp, num=3)
        q.quantize(model)(**inputs)
        q.clear_fallback()
        before.assert_unchanged(model)
        assert_same(model(**inputs), expected)


def test_a_groups_error_is_that_of_a_model_with_it_alone() -> None:
    """The definition, by hand: relative squared error of the output with one linear rounded."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    x = torch.randn(16, 32)
    q, _ = _measured(model, x)
    q.amp(model, measure="output")(x)
    for row in q.sensitivity:
        alone = Quantizer(preset="plain", backend="openvino", include={"sites": list(row.sites)})
        alone.calibrate(model, [x])
        with torch.no_grad():
            expected, output = model(x).double(), alone.quantize(model)(x).double()
        error = float((output - expected).square().sum() / expected.square().sum())
        assert row.error == pytest.approx(error, rel=1e-6)
        assert row.error > 0


def test_errors_are_relative_and_averaged() -> None:
    model = nn.Sequential(nn.Linear(32, 32)).eval()
    x = torch.randn(16, 32)
    once, _ = _measured(model, x)
    twice, _ = _measured(model, x, x)
    assert twice.sensitivity[0].error == pytest.approx(once.sensitivity[0].error)
    larger = nn.Sequential(nn.Linear(32, 32)).eval()
    larger.load_state_dict({name: value * 8 for name, value in model.state_dict().items()})
    scaled, _ = _measured(larger, x)
    assert scaled.sensitivity[0].error == pytest.approx(once.sensitivity[0].error, rel=1e-5)


def test_the_order_of_batches_does_not_matter() -> None:
    model = ConvNet().eval()
    data = [torch.randn(2, 3, 16, 16) for _ in range(3)]
    q, _ = _measured(model, *data)
    first = q.sensitivity
    again, _ = _measured(model, *reversed(data))
    assert [row.group for row in first] == [row.group for row in again.sensitivity]
    for one, two in zip(first, again.sensitivity, strict=True):
        assert one.error == pytest.approx(two.error)


def test_the_ranking_is_sorted_and_complete() -> None:
    _, q, _ = _bert()
    rows = list(q.sensitivity)
    assert [row.rank for row in rows] == list(range(1, len(rows) + 1))
    assert [row.error for row in rows] == sorted((row.error for row in rows), reverse=True)
    quantized = {row.name for row in q.coverage.quantized}
    assert {site for row in rows for site in row.sites} == quantized
    assert len({row.group for row in rows}) == len(rows)


def test_the_ranking_as_a_table_and_a_plot(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib", reason="plots need enginequant[report]")
    _, q, amp = _bert()
    q.fallback(amp, num=1)
    table = q.sensitivity
    assert "groups by the divergence of the output" in table.title()
    assert "<table" in table._repr_html_()
    assert sum(row.fallback for row in table) == 1
    table.plot().save(str(tmp_path / "bars.svg"))
    assert "<svg" in (tmp_path / "bars.svg").read_text()


def test_measuring_in_train_mode_is_refused() -> None:
    model = Mlp().eval()
    q = Quantizer(preset="plain")
    q.calibrate(model, [torch.randn(8, 32)])
    amp = q.amp(model)
    with pytest.raises(SensitivityError, match=r"train mode.*call \.eval\(\)"):
        amp.train()(torch.randn(8, 32))


def test_an_output_of_zeros() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False)).eval()
    q = Quantizer(preset="plain")
    q.calibrate(model, [torch.randn(8, 32)])
    with pytest.raises(SensitivityError, match="all zeros on this batch"):
        q.amp(model)(torch.zeros(8, 32))


def test_an_output_without_floats() -> None:
    class Argmax(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).argmax(-1)

    model = Argmax().eval()
    q = Quantizer(preset="plain")
    q.calibrate(model, [torch.randn(8, 32)])
    with pytest.raises(SensitivityError, match="holds no floating-point tensor"):
        q.amp(model)(torch.randn(8, 32))


def test_outputs_of_any_structure_are_measured() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(32, 32)
            self.b = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"a": [self.a(x)], "b": (self.b(x + 1), None, x.long())}

    q, _ = _measured(Nested().eval(), torch.randn(8, 32))
    assert len(q.sensitivity) == 2
    assert all(row.error > 0 for row in q.sensitivity)


# -- groups --------------------------------------------------------------------------------------------------------


def test_groups_follow_the_fusions() -> None:
    _, q, _ = _bert(sites={"residual_add": True})
    members = _members(q)
    for layer in range(2):
        attention = f"encoder.layer.{layer}.attention.self"
        projections = {
            (f"{attention}.{name}.forward.linear_0", operand)
            for name in ("query", "key", "value")
            for operand in ("input", "weight")
        }
        assert projections in members.values()
        products = {
            key for key in set().union(*members.values()) if key[0].startswith(attention) and "matmul" in key[0]
        }
        assert len(products) == 4
        assert products in members.values()
    adds = [group for group, operands in members.items() if any(".add_" in path for path, _ in operands)]
    assert adds
    assert all(len(members[group]) == 1 for group in adds)


@pytest.mark.parametrize("num", [1, 2, 5, 9])
def test_a_group_is_never_half_quantized(num: int) -> None:
    model, q, amp = _bert(sites={"residual_add": True})
    members = _members(q)
    q.fallback(amp, num=num)
    frozen = q.quantize(model)
    sites = {site.path: site for site in frozen.modules() if type(site).__name__ == "Site"}
    states = {
        group: {sites[path].quantizer_of(name).enabled and sites[path].active for path, name in operands}
        for group, operands in members.items()
    }
    assert all(len(state) == 1 for state in states.values()), states
    assert sum(state == {False} for state in states.values()) == num
    # A product has all its operands in low precision, or none.
    for site in sites.values():
        if site.operation.kind != "residual_add":
            assert len({site.quantizer_of(operand.name).enabled for operand in site.operation.operands}) == 1


def test_what_was_put_back_runs_in_float() -> None:
    model, q, amp = _bert()
    q.fallback(amp, ratio=1)
    assert not q.coverage.quantized
    inputs = batch("bert", padded=True)
    with torch.no_grad():
        assert_same(dict(q.quantize(model)(**inputs)), dict(tiny("bert", "eager")(**inputs)))


def test_coverage_says_why_a_group_is_float() -> None:
    _, q, amp = _bert()
    worst = q.sensitivity[0]
    q.fallback(amp, num=1)
    rows = {row.name: row for row in q.coverage}
    for site in worst.sites:
        assert "put back by fallback(num=1): rank 1" in rows[site].reason
    q.fallback(amp, ratio=1)
    for rank, row in enumerate(q.sensitivity, start=1):
        reasons = [
            operand.reason for site in row.sites for operand in q.plan[site].operands if operand.group == row.group
        ]
        assert set(reasons) == {f"put back by fallback(ratio=1): rank {rank}"}
        assert row.fallback


# -- choosing ------------------------------------------------------------------------------------------------------


def test_fallback_takes_the_worst_groups() -> None:
    _, q, amp = _bert()
    ranking = [row.group for row in q.sensitivity]
    assert q.fallback(amp, num=3).groups == tuple(ranking[:3])
    assert q.fallback(amp, num=0).groups == ()
    assert q.fallback(amp, ratio=0.0).groups == ()
    assert q.fallback(amp, ratio=1.0).groups == tuple(ranking)
    half = q.fallback(amp, ratio=0.5).groups
    assert half == tuple(ranking[: (len(ranking) + 1) // 2])


def test_a_repeated_call_gives_the_same_answer() -> None:
    _, q, amp = _bert()
    config = q.config
    first = q.fallback(amp, num=2)
    coverage = str(q.coverage)
    assert q.fallback(amp, num=2) == first
    assert str(q.coverage) == coverage
    q.clear_fallback()
    assert q.fallback(amp, num=2) == first
    assert len(set(first.groups)) == 2
    assert q.config is config


@pytest.mark.promise("q.clear_fallback() undoes it")
def test_clear_fallback_undoes_it() -> None:
    model, q, amp = _bert()
    inputs = batch("bert", padded=True)
    with torch.no_grad():
        coverage, output = str(q.coverage), q.quantize(model)(**inputs)
        q.fallback(amp, num=3)
        assert str(q.coverage) != coverage
        q.clear_fallback()
        q.clear_fallback()
        assert str(q.coverage) == coverage
        assert_same(q.quantize(model)(**inputs), output)


def test_a_new_calibration_forgets_the_fallback() -> None:
    model, q, amp = _bert()
    q.fallback(amp, num=3)
    q.calibrate(model, [batch("bert")])
    assert not [row for row in q.coverage if row.reason.startswith("put back")]
    with pytest.raises(ProxyError, match=r"fallback\(\) takes the proxy that amp\(\)"):
        q.fallback(amp, num=1)


def test_resumed_calibration_keeps_the_fallback() -> None:
    model = Mlp().eval()
    x = torch.randn(8, 32)
    q, amp = _measured(model, x)
    q.fallback(amp, num=1)
    q.calibrate(model, [x * 50], resume=True)
    assert sum(row.fallback for row in q.sensitivity) == 1
    assert q.quantize(model)(x * 50).isfinite().all()


def test_fallback_wins_back_what_it_costs() -> None:
    model, q, amp = _bert(sites={"residual_add": True})
    inputs = batch("bert", padded=True)

    def error() -> float:
        output = q.quantize(model)(**inputs).last_hidden_state
        expected = tiny("bert", "eager")(**inputs).last_hidden_state
        return float((output - expected).norm() / expected.norm())

    with torch.no_grad():
        everything = error()
        q.fallback(amp, num=6)
        assert error() < everything


# -- mistakes ------------------------------------------------------------------------------------------------------


def test_another_amp_proxy() -> None:
    model = Mlp().eval()
    x = torch.randn(8, 32)
    q, amp = _measured(model, x)
    _, foreign = _measured(model, x)
    for wrong in (foreign, model, q.calib(model, resume=True), q.quantize(model), None):
        with pytest.raises(
            ProxyError, match=r"fallback\(\) takes the proxy that amp\(\) of this same Quantizer returned"
        ):
            q.fallback(wrong, num=1)  # type: ignore[arg-type]
    q.amp(model)
    with pytest.raises(ProxyError, match="returned last"):
        q.fallback(amp, num=1)


def test_before_any_data() -> None:
    model = Mlp().eval()
    q = Quantizer(preset="plain")
    q.calibrate(model, [torch.randn(8, 32)])
    amp = q.amp(model)
    with pytest.raises(SensitivityError, match="nothing was measured yet: run the proxy"):
        q.fallback(amp, num=1)
    with pytest.raises(SensitivityError, match="nothing was measured yet"):
        q.sensitivity  # noqa: B018


def test_sensitivity_before_amp() -> None:
    with pytest.raises(SensitivityError, match=r"nothing was measured yet: run the proxy that amp\(\) returns"):
        Quantizer(preset="plain").sensitivity  # noqa: B018


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "takes one of num, ratio, names, max_drop, min_speedup; got num=None, ratio=None"),
        ({"num": 1, "ratio": 0.5}, "takes one of num, ratio, names, max_drop, min_speedup; got num=1, ratio=0.5"),
        ({"num": -1}, "num=-1: expected a whole number of groups, 0 or more"),
        ({"num": 1.5}, "num=1.5: expected a whole number"),
        ({"num": True}, "num=True: expected a whole number"),
        ({"num": 99}, "num=99: there are only 4 quantized groups to put back"),
        ({"ratio": -0.1}, "ratio=-0.1: expected a share between 0 and 1"),
        ({"ratio": 1.1}, "ratio=1.1: expected a share between 0 and 1"),
        ({"ratio": float("nan")}, "ratio=nan: expected a share"),
    ],
)
def test_numbers_out_of_bounds(asked: dict[str, Any], message: str) -> None:
    q, amp = _measured(Mlp().eval(), torch.randn(8, 32), sites={"residual_add": True})
    with pytest.raises(SensitivityError, match=message.replace("(", r"\(")):
        q.fallback(amp, **asked)
    assert len(q.coverage.quantized) == 3


def test_an_interrupted_batch_is_not_counted() -> None:
    class Interrupts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)
            self.calls = [0]

        def forward(self, x: Tensor, stop: bool = False) -> Tensor:
            self.calls[0] += 1
            if stop and self.calls[0] > 4:
                raise KeyboardInterrupt("by hand")
            return self.linear(self.linear(x).relu())

    model = Interrupts().eval()
    x = torch.randn(8, 32)
    q, amp = _measured(model, x)
    before = [(row.group, row.error) for row in q.sensitivity]
    amp.calls[0] = 4  # type: ignore[index, union-attr]
    with pytest.raises(KeyboardInterrupt, match="by hand"):
        amp(x * 2, stop=True)
    assert [(row.group, row.error) for row in q.sensitivity] == before
    assert not any(getattr(site, "active", False) for site in amp.modules())
    assert_same(amp(x), model(x))
