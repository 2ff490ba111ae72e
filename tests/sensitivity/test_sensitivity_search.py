"""fallback(): by name, by cost, and the search under a budget, with what it remembers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Snapshot, batch, tiny
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from quantizer import Quantizer
from quantizer.algorithms.fallback import fallback_reason
from quantizer.algorithms.sensitivity import (
    Evaluation,
    Fallback,
    GroupSensitivity,
    by_name,
    fingerprint,
    per_cost,
    search,
)
from quantizer.algorithms.sensitivity.latency_costs import LatencyCosts
from quantizer.errors import SensitivityError
from quantizer.plan.site_plan import OperandPlan, SitePlan
from quantizer.utils.fingerprint import Fingerprint


def _ranking(errors: list[float], multiply_adds: int = 1) -> list[GroupSensitivity]:
    return [
        GroupSensitivity(
            rank=rank,
            group=f"g{rank}",
            kind="linear",
            error=error,
            sites=(),
            parts=(f"g{rank}",),
            multiply_adds=multiply_adds * rank,
        )
        for rank, error in enumerate(errors, 1)
    ]


def _search(
    drops: list[float],
    max_drop: float,
    *,
    max_evaluations: int = 25,
    min_groups: int = 0,
    higher_is_better: bool = True,
) -> tuple[Fallback, list[tuple[str, ...]]]:
    """A search where each group that is quantized costs its own drop."""
    ranking = _ranking(drops)
    cost = {entry.group: entry.error for entry in ranking}
    asked: list[tuple[str, ...]] = []

    def score(groups: tuple[str, ...]) -> float:
        asked.append(groups)
        drop = math.fsum(value for name, value in cost.items() if name not in groups)
        return 10 - drop if higher_is_better else 10 + drop

    found = search(
        per_cost(ranking, None),
        10.0,
        score,
        max_drop=max_drop,
        higher_is_better=higher_is_better,
        max_evaluations=max_evaluations,
        min_groups=min_groups,
    )
    return found, asked


# -- the search ----------------------------------------------------------------------------------------------------


@given(
    drops=st.lists(st.integers(0, 100), min_size=1, max_size=60),
    max_drop=st.integers(0, 400),
    higher=st.booleans(),
    evaluations=st.integers(8, 40),
)
def test_the_budget_is_always_met(drops: list[int], max_drop: int, higher: bool, evaluations: int) -> None:
    drops = sorted(drops, reverse=True)
    found, asked = _search(
        [float(drop) for drop in drops], float(max_drop), max_evaluations=evaluations, higher_is_better=higher
    )
    left = [drop for rank, drop in enumerate(drops, 1) if f"g{rank}" not in found.groups]
    assert sum(left) <= max_drop
    # The float model's own score was the first evaluation.
    assert len(asked) + 1 <= evaluations
    assert [entry.groups for entry in found.evaluations] == asked
    assert len(set(asked)) == len(asked), "no score is taken twice"


def test_no_group_falls_back_where_none_must() -> None:
    found, asked = _search([3.0, 2.0, 1.0], 6.0)
    assert found.groups == ()
    assert asked == [()]


@pytest.mark.parametrize(("least", "max_drop", "count"), [(2, 6.0, 2), (1, 1.0, 2), (3, 6.0, 3), (9, 6.0, 3)])
def test_a_least_number_of_groups_falls_back(least: int, max_drop: float, count: int) -> None:
    found, asked = _search([3.0, 2.0, 1.0], max_drop, min_groups=least)
    assert found.groups == ("g1", "g2", "g3")[:count]
    assert all(len(groups) >= least for groups in asked)


def test_groups_that_are_not_needed_are_won_back() -> None:
    # The first group of the ranking costs nothing in truth: the ranking was wrong about it.
    ranking = _ranking([9.0, 8.0, 7.0, 0.1])
    truth = {"g1": 0.0, "g2": 5.0, "g3": 5.0, "g4": 0.0}

    def score(groups: tuple[str, ...]) -> float:
        return -sum(value for name, value in truth.items() if name not in groups)

    found = search(per_cost(ranking, None), 0.0, score, max_drop=1.0, higher_is_better=True, max_evaluations=25)
    assert found.groups == ("g2", "g3")
    assert found.ranks == (2, 3)
    assert found.float_score == 0.0
    assert found.reasons()["g3"] == "kept in float by fallback(max_drop=1): rank 3"


def test_a_group_is_tried_again_after_others_went() -> None:
    """Scores need not grow with what is kept in float: here the first group is enough, but not together with the
    second."""

    def score(groups: tuple[str, ...]) -> float:
        return 0.0 if "g1" in groups and groups != ("g1", "g2") else -2.0

    found = search(
        per_cost(_ranking([4.0, 3.0, 2.0, 1.0]), None),
        0.0,
        score,
        max_drop=1.0,
        higher_is_better=True,
        max_evaluations=25,
    )
    assert found.groups == ("g1",)


@pytest.mark.parametrize(
    ("gains", "max_drop", "groups"),
    [
        # What is quantized is worse than float: all is float, which drops by 0.
        ({"g1": -1.0, "g2": -1.0}, -0.5, ("g1", "g2")),
        # Quantizing g2 gains, but not what is asked for.
        ({"g1": -1.0, "g2": 0.3}, -0.5, ("g1",)),
        ({"g1": -1.0, "g2": 0.7}, -0.5, ("g1",)),
        ({"g1": 0.4, "g2": 0.3}, -0.5, ()),
    ],
)
def test_a_budget_that_no_plan_meets_gives_the_best_one(
    gains: dict[str, float], max_drop: float, groups: tuple[str, ...]
) -> None:
    def score(kept_in_float: tuple[str, ...]) -> float:
        return 10 + sum(gain for name, gain in gains.items() if name not in kept_in_float)

    ranking = per_cost(_ranking([2.0, 1.0]), None)
    found = search(ranking, 10.0, score, max_drop=max_drop, higher_is_better=True, max_evaluations=25)
    assert found.groups == groups
    reached = 10.0 - score(groups)
    assert found.met == (reached <= max_drop)
    said = fallback_reason(found)
    assert ("the budget is not met, this is the best plan found" in said) == (not found.met)
    assert f"{10 - reached:.5f} on the tuning samples" in said


def test_a_score_that_is_better_than_float_is_no_drop() -> None:
    found = search(
        per_cost(_ranking([1.0, 0.5]), None),
        0.0,
        lambda groups: 3.0,
        max_drop=0.0,
        higher_is_better=True,
        max_evaluations=4,
    )
    assert found.groups == ()


@given(
    points=st.lists(
        st.tuples(st.floats(0, 10, allow_nan=False), st.floats(-5, 5, allow_nan=False)), min_size=1, max_size=30
    )
)
def test_the_pareto_front_is_what_no_other_beats(points: list[tuple[float, float]]) -> None:
    evaluations = tuple(Evaluation(groups=(), score=-drop, drop=drop, cost=cost) for cost, drop in points)
    front = Fallback(groups=(), asked="", evaluations=evaluations).pareto_front()
    for entry in evaluations:
        beaten = any(
            other.cost <= entry.cost
            and other.drop <= entry.drop
            and (other.cost, other.drop) != (entry.cost, entry.drop)
            for other in evaluations
        )
        assert beaten != any((kept.cost, kept.drop) == (entry.cost, entry.drop) for kept in front)
    assert [entry.cost for entry in front] == sorted(entry.cost for entry in front)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_drop": float("nan")}, "max_drop=nan: expected a number"),
        ({"max_drop": True}, "max_drop=True: expected a number"),
        (
            {"max_drop": 1.0, "max_evaluations": 3},
            "max_evaluations=3: expected at least 4",
        ),
        ({"max_drop": 1.0, "max_evaluations": 9.5}, "max_evaluations=9.5: expected at least 4"),
    ],
)
def test_budgets_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SensitivityError, match=message):
        _search([3.0, 2.0, 1.0], **options)


# -- costs ---------------------------------------------------------------------------------------------------------


def test_what_wins_most_for_its_cost_comes_first() -> None:
    ranking = _ranking([4.0, 3.0, 2.0])
    ordered = per_cost(ranking, {"g1": 8.0, "g2": 2.0, "g3": 1.0})
    assert [(entry.group, cost) for entry, cost in ordered] == [("g3", 1.0), ("g2", 2.0), ("g1", 8.0)]
    assert [entry.group for entry, _ in per_cost(ranking, "multiply_adds")] == ["g1", "g2", "g3"]
    assert [cost for _, cost in per_cost(ranking, "multiply_adds")] == [1.0, 2.0, 3.0]
    assert [entry.group for entry, _ in per_cost(ranking, {"g1": 1, "g2": 0, "g3": 1})] == ["g2", "g1", "g3"]


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ("latency", "costs='latency': expected 'multiply_adds' or a mapping"),
        ({"g1": 1.0}, "costs: the group 'g2' has no cost; expected one number for each of the 2 groups"),
        ({"g1": 1.0, "g2": 1.0, "g9": 1.0}, "costs: 'g9' is not a group"),
        ({"g1": 1.0, "g2": -1.0}, "costs: 'g2' has -1.0; expected a number >= 0"),
        ({"g1": 1.0, "g2": float("inf")}, "costs: 'g2' has inf; expected a number >= 0"),
        ({"g1": 1.0, "g2": "3"}, "costs: 'g2' has '3'; expected a number >= 0"),
    ],
)
def test_costs_that_are_none(costs: Any, message: str) -> None:
    with pytest.raises(SensitivityError, match=message):
        per_cost(_ranking([2.0, 1.0]), costs)


# -- names ---------------------------------------------------------------------------------------------------------

OPERANDS = {
    "a.{q,k}.forward.linear_0": ["a.q.forward.linear_0.input", "a.k.forward.linear_0.input"],
    "a.forward.add_0.lhs": ["a.forward.add_0.lhs"],
    "a.forward.add_0.rhs": ["a.forward.add_0.rhs"],
    "b.forward.linear_0": ["b.forward.linear_0.input", "b.forward.linear_0.weight"],
}


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["a.{q,k}.forward.linear_0"], ["a.{q,k}.forward.linear_0"]),
        (["a"], ["a.{q,k}.forward.linear_0", "a.forward.add_0.lhs", "a.forward.add_0.rhs"]),
        (["a.forward.add_0"], ["a.forward.add_0.lhs", "a.forward.add_0.rhs"]),
        (["a.forward.add_0.rhs"], ["a.forward.add_0.rhs"]),
        (["a.q", "a.k"], ["a.{q,k}.forward.linear_0"]),
        (["**.linear_0"], ["a.{q,k}.forward.linear_0", "b.forward.linear_0"]),
        (["*"], list(OPERANDS)),
        ([], []),
    ],
)
def test_names(names: list[str], groups: list[str]) -> None:
    found = by_name(OPERANDS, names)
    assert list(found.groups) == groups
    assert found.reasons() == dict.fromkeys(groups, f"kept in float by fallback(names={names})")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["c"], "'c' matches no quantized group, module, site or operand"),
        (["a.f"], "'a.f' matches no quantized group"),
        (["a.q"], r"the group a.{q,k}.forward.linear_0 changes .* but a.k.forward.linear_0.input is not named"),
        (["b.forward.linear_0.input"], "the group b.forward.linear_0 changes precision as a whole"),
        ("a", "names='a': expected a list of names"),
        ([1], r"names=\[1\]: expected a list of names"),
    ],
)
def test_names_that_cannot_fall_back(names: Any, message: str) -> None:
    with pytest.raises(SensitivityError, match=message):
        by_name(OPERANDS, names)


# -- on a model ----------------------------------------------------------------------------------------------------


class Metric:
    """Minus the error of the output; counts its calls, and may stop the search at one of them."""

    def __init__(self, model: nn.Module, data: dict[str, torch.Tensor], stop_at: int | None = None) -> None:
        with torch.no_grad():
            self.expected = model(**data).last_hidden_state
        self.data = data
        self.stop_at = stop_at
        self.calls = 0

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> float:
        self.calls += 1
        if self.calls == self.stop_at:
            raise KeyboardInterrupt
        found = model(**self.data).last_hidden_state
        return -float((found - self.expected).square().mean())


def _measured() -> tuple[nn.Module, dict[str, torch.Tensor], Quantizer, nn.Module]:
    model, data = tiny("bert"), batch("bert")
    quantizer = Quantizer(preset="plain", backend="openvino", sites={"residual_add": True})
    quantizer.calibrate(model, [data])
    amp = quantizer.amp(model)
    with torch.no_grad():
        amp(**data)
    return model, data, quantizer, amp


def _max_drop(quantizer: Quantizer, model: nn.Module, metric: Callable[[nn.Module], float]) -> float:
    """A third of what all groups lose."""
    quantizer.clear_fallback()
    return -metric(quantizer.quantize(model)) / 3


def test_a_search_on_a_model_meets_the_budget_and_changes_nothing_else() -> None:
    model, data, quantizer, amp = _measured()
    before, config = Snapshot.of(model), quantizer.config.model_dump()
    metric = Metric(model, data)
    max_drop = _max_drop(quantizer, model, metric)
    metric.calls = 0
    found = quantizer.fallback(amp, max_drop=max_drop, metric=metric)
    assert 0 < len(found.groups) < len(quantizer.sensitivity)
    assert metric.calls == len(found.evaluations) + 1 <= 25
    assert -metric(quantizer.quantize(model)) <= max_drop
    again = quantizer.fallback(amp, max_drop=max_drop, metric=metric)
    assert again == found
    before.assert_unchanged(model)
    assert quantizer.config.model_dump() == config
    assert len(found.pareto_front()) >= 2


@pytest.mark.nightly
def test_a_search_that_was_stopped_goes_on_where_it_stood(tmp_path: Path) -> None:
    model, data, quantizer, amp = _measured()
    whole = Metric(model, data)
    max_drop = _max_drop(quantizer, model, whole)
    whole.calls = 0
    expected = quantizer.fallback(amp, max_drop=max_drop, metric=whole)
    for stop_at in range(1, whole.calls + 1):
        cache = tmp_path / str(stop_at)
        stopped, rest = Metric(model, data, stop_at), Metric(model, data)
        with pytest.raises(KeyboardInterrupt):
            quantizer.fallback(amp, max_drop=max_drop, metric=stopped, cache=cache)
        assert cache.exists() == (stop_at > 1)
        # A new process would measure again, and find the same.
        *_, other, other_amp = _measured()
        assert other.fallback(other_amp, max_drop=max_drop, metric=rest, cache=cache) == expected
        assert stopped.calls + rest.calls == whole.calls + 1, "only the score that was interrupted is taken again"
    assert not list(tmp_path.rglob(".*")), "nothing half-written is left"


def test_scores_of_another_calibration_are_not_taken(tmp_path: Path) -> None:
    model, data, quantizer, amp = _measured()
    metric = Metric(model, data)
    max_drop = _max_drop(quantizer, model, metric)
    quantizer.fallback(amp, max_drop=max_drop, metric=metric, cache=tmp_path / "scores")
    metric.calls = 0
    quantizer.fallback(amp, max_drop=max_drop, metric=metric, cache=tmp_path / "scores")
    assert metric.calls == 0
    quantizer.load_scales({name: scale * 1.5 for name, scale in quantizer.scales().items()})
    amp = quantizer.amp(model)
    with torch.no_grad():
        amp(**data)
    quantizer.fallback(amp, max_drop=max_drop, metric=metric, cache=tmp_path / "scores")
    assert metric.calls > 0


def _scaled(model: nn.Module, factor: float) -> float:
    return factor * float(next(model.parameters()).sum())


@pytest.mark.parametrize(
    "change",
    [
        {"codes": torch.ones(2, 2, dtype=torch.int8)},
        {"smooth": torch.ones(2)},
        {"spread": torch.ones(2)},
        {"zero_point": 3},
        {"block_size": 2},
        {"axis": 0},
        {"dynamic": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_scores_are_those_of_a_plan_that_computes_the_same(change: dict[str, Any]) -> None:
    operand = OperandPlan(name="weight", role="weight", quantized=True, scale=torch.ones(()))
    site = {"operation": "linear", "kind": "linear", "host_type": "Linear", "file": "", "line": 1, "reason": ""}
    plans = [
        {"site": SitePlan(name="site", quantized=True, operands=(one,), **site)}  # type: ignore[arg-type]
        for one in (operand, replace(operand, **change))
    ]
    weights = Fingerprint.of(nn.Linear(2, 2))
    assert len({fingerprint(plan, len, weights) for plan in plans}) == 2


def test_metrics_are_told_apart_by_their_code() -> None:
    metrics: list[Callable[[nn.Module], float]] = [
        lambda model: _scaled(model, 1),
        lambda model: _scaled(model, 2),
        lambda model: max(_scaled(model, factor) for factor in (1, 2)),
        lambda model, factor=3: _scaled(model, factor),
        lambda model, factor=4: _scaled(model, factor),
        partial(_scaled, factor=1),
        partial(_scaled, factor=2),
    ]
    weights = Fingerprint.of(nn.Linear(2, 2))
    assert len({fingerprint({}, metric, weights) for metric in metrics}) == len(metrics)
    assert fingerprint({}, partial(_scaled, factor=2), weights) == fingerprint({}, metrics[-1], weights)
    assert fingerprint({}, metrics[-1], Fingerprint.of(nn.Linear(2, 2))) != fingerprint({}, metrics[-1], weights)


@pytest.mark.parametrize("name", ["", "notes"])
def test_what_others_wrote_is_left_alone(tmp_path: Path, name: str) -> None:
    model, data, quantizer, amp = _measured()
    path = tmp_path / "scores"
    other = path / name
    other.parent.mkdir(exist_ok=True)
    other.write_text("mine", encoding="utf-8")
    with pytest.raises(SensitivityError, match=r"(is not a folder;|contains 'notes', which quantizer did not write,)"):
        quantizer.fallback(amp, max_drop=1.0, metric=Metric(model, data), cache=path)
    assert other.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda model: float("nan"), "the metric returned nan for the float model; expected a finite number"),
        (lambda model: "0.9", "the metric returned str for the float model; expected one number"),
        (lambda model: None, "the metric returned NoneType for the float model; expected one number"),
        (lambda model: torch.zeros(2), "the metric returned Tensor for the float model; expected one number"),
        (lambda model: 1 / 0, "the metric raised ZeroDivisionError for the float model: division by zero"),
        (None, r"fallback\(max_drop=...\) needs metric="),
    ],
)
def test_metrics_that_are_none(metric: Any, message: str) -> None:
    _, _, quantizer, amp = _measured()
    with pytest.raises(SensitivityError, match=message):
        quantizer.fallback(amp, max_drop=0.1, metric=metric)
    assert quantizer.chosen_fallback is None


@pytest.mark.parametrize(
    "given", [{}, {"num": 1, "names": ["x"]}, {"ratio": 1, "names": ["x"]}, {"max_drop": 1, "names": ["x"]}]
)
def test_exactly_one_way_to_choose(given: dict[str, Any]) -> None:
    _, _, quantizer, amp = _measured()
    said = r"fallback\(\) takes one of num, ratio, names, max_drop, min_speedup; got num="
    with pytest.raises(SensitivityError, match=said):
        quantizer.fallback(amp, **given)
    with pytest.raises(SensitivityError, match=said):
        quantizer.fallback(**given)


def test_names_on_a_model() -> None:
    _, _, quantizer, amp = _measured()
    chosen = quantizer.fallback(amp, names=["encoder.layer.0"])
    inside = [site for site in quantizer.plan.values() if site.name.startswith("encoder.layer.0.")]
    assert not any(site.quantized for site in inside)
    assert any(site.quantized for site in quantizer.plan.values())
    with pytest.raises(SensitivityError, match=r"names: the group .*\{query,key,value\}"):
        quantizer.fallback(amp, names=["encoder.layer.1.attention.self.query"])
    assert quantizer.chosen_fallback == chosen
    quantizer.clear_fallback()
    assert all(site.quantized for site in quantizer.plan.values() if site.kind == "linear" and "layer.0" in site.name)


def test_names_need_no_sensitivity(tmp_path: Path) -> None:
    model, data, quantizer, amp = _measured()
    by_ranking = quantizer.fallback(amp, names=["encoder.layer.0"])
    quantizer.clear_fallback()
    assert quantizer.fallback(names=["encoder.layer.0"]) == by_ranking
    quantizer.clear_fallback()
    quantizer.save(tmp_path / "q")
    loaded = Quantizer.load(tmp_path / "q")
    assert loaded.fallback(names=["encoder.layer.0"]) == by_ranking
    assert not any(site.quantized for site in loaded.plan.values() if site.name.startswith("encoder.layer.0."))
    loaded.quantize(model)(**data)
    slower = LatencyCosts(groups={}, low_us=1.0, float_us=2.0, where="here")
    assert loaded.fallback(None, names=["encoder.layer.1"], latency_costs=slower).groups


@pytest.mark.parametrize("given", [{"num": 1}, {"ratio": 0.5}, {"max_drop": 0.1}, {"min_speedup": 2.0}])
def test_other_choices_need_sensitivity(given: dict[str, Any]) -> None:
    _, _, quantizer, _ = _measured()
    (name,) = given
    with pytest.raises(SensitivityError, match=rf"fallback\({name}=...\) needs the proxy that amp\(\) returned"):
        quantizer.fallback(**given)


def test_saved_and_loaded(tmp_path: Path) -> None:
    model, data, quantizer, amp = _measured()
    metric = Metric(model, data)
    quantizer.fallback(amp, max_drop=_max_drop(quantizer, model, metric), metric=metric)
    quantizer.save(tmp_path / "q")
    loaded = Quantizer.load(tmp_path / "q")
    assert loaded.chosen_fallback == quantizer.chosen_fallback
    assert {name: site.reason for name, site in loaded.plan.items()} == {
        name: site.reason for name, site in quantizer.plan.items()
    }


@pytest.mark.parametrize("damage", [{"groups": 3}, {"evaluations": [{"groups": []}]}, {"more": 1}, {"asked": None}])
def test_a_damaged_record(damage: dict[str, Any]) -> None:
    record = Fallback(groups=("a",), asked="num=1", ranks=(1,))
    assert Fallback.from_document(record.document()) == record
    with pytest.raises(SensitivityError, match="the record of a fallback is damaged"):
        Fallback.from_document({**record.document(), **damage})
