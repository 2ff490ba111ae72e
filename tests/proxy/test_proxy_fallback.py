"""Measuring groups and keeping them in float: whole groups, reproducibly, and undone when asked."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from helpers import Mlp, assert_same, batch, tiny
from torch import Tensor, nn
from toy_nets import linear, net

from quantizer import Quantizer


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


def test_outputs_of_any_structure_are_measured() -> None:
    q, _ = _measured(
        net("{'a': [self.a(x)], 'b': (self.b(x + 1), None, x.long())}", a=linear(), b=linear()).eval(),
        torch.randn(8, 32),
    )
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


def test_a_group_is_named_for_its_sites() -> None:
    model = net("self.last(self.a(x) + self.b(x))", a=linear(), b=linear(), last=linear()).eval()
    q, _ = _measured(model, torch.randn(8, 32))
    assert {"{a,b}.forward.linear_0", "last.forward.linear_0"} <= _members(q).keys()


def test_coverage_says_why_a_group_is_float() -> None:
    _, q, amp = _bert()
    worst = q.sensitivity[0]
    q.fallback(amp, num=1)
    rows = {row.name: row for row in q.coverage}
    for site in worst.sites:
        assert "kept in float by fallback(num=1): rank 1" in rows[site].reason
    q.fallback(amp, ratio=1)
    for rank, row in enumerate(q.sensitivity, start=1):
        reasons = [
            operand.reason for site in row.sites for operand in q.plan[site].operands if operand.group == row.group
        ]
        assert set(reasons) == {f"kept in float by fallback(ratio=1): rank {rank}"}
        assert row.fallback


# -- choosing ------------------------------------------------------------------------------------------------------


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
