"""Groups that fall back to float: by rank, by name, or by a search under a budget.

A cheap measure ranks the groups; the metric decides. Bisection finds how many of the first groups must be float. Then
groups are quantized again while the score allows it, lowest error per cost first.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quantizer.errors import SensitivityError
from quantizer.plan.reasons import ReasonCode
from quantizer.plan.selection import matches
from quantizer.plan.site_plan import Plan
from quantizer.utils.plain_values import decoded
from quantizer.utils.progress import loop
from quantizer.utils.records import BudgetOutcome, EngineCheck, FallbackRecord, GroupSensitivity, Score, quantized_score
from quantizer.utils.records import Evaluation as Tried

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A score that a search measured.

    Attributes:
        groups: the groups that were float.
        score: the value of the metric.
        drop: how much worse the score is than the float model's, in units of the metric.
        cost: the sum of the costs of ``groups``.
    """

    groups: tuple[str, ...]
    score: float
    drop: float
    cost: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Fallback:
    """The groups that fall back to float, and how they were chosen.

    Attributes:
        groups: the groups that are float for accuracy, most sensitive first.
        asked: the arguments of ``fallback()``, as text.
        ranks: the rank of each group; empty if the groups were chosen by name.
        evaluations: the scores that a search measured, in order.
        float_score: the score of the float model; None without a search.
        max_drop: the drop that the search allowed.
        slower: other groups that are float because low precision makes them slower, with the reason of each.
        min_speedup: the required speedup over the float model.
        speedup: the predicted speedup over the float model.
    """

    groups: tuple[str, ...]
    asked: str
    ranks: tuple[int, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    float_score: float | None = None
    max_drop: float | None = None
    slower: Mapping[str, str] = field(default_factory=dict)
    min_speedup: float | None = None
    speedup: float | None = None

    def __repr__(self) -> str:
        parts = [f"{self.asked}: {len(self.groups)} {'group' if len(self.groups) == 1 else 'groups'} in float"]
        parts += [f"{len(self.slower)} more that would be slower"] if self.slower else []
        parts += [f"{len(self.evaluations)} scores"] if self.evaluations else []
        return f"Fallback({', '.join([*parts, *([] if self.met else ['not met'])])})"

    @property
    def met(self) -> bool:
        """True unless the drop exceeds the budget of the search, or the plan is too slow. All groups in float drop by
        0."""
        if self.min_speedup is not None:
            return self.speedup is not None and self.speedup >= self.min_speedup
        drops = {frozenset(entry.groups): entry.drop for entry in self.evaluations}
        return self.max_drop is None or drops.get(frozenset(self.groups), 0.0) <= self.max_drop

    def reasons(self) -> dict[str, str]:
        """Return the reason why each group is float, by group."""
        ranks = self.ranks or (None,) * len(self.groups)
        chosen = {
            group: (ReasonCode.FALLBACK if rank is None else ReasonCode.RANKED).text(asked=self.asked, rank=rank)
            for group, rank in zip(self.groups, ranks, strict=True)
        }
        return {**chosen, **self.slower}

    def document(self) -> dict[str, Any]:
        """Return the record as lists, numbers and text, for a file."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Fallback:
        """Return the record from the values of ``document()``."""
        try:
            fallback: Fallback = decoded(cls, document, "fallback")
            if fallback.ranks and len(fallback.ranks) != len(fallback.groups):
                raise ValueError(
                    f"fallback.ranks: expected {len(fallback.groups)}, one per group, got {len(fallback.ranks)}"
                )
        except ValueError as error:
            raise SensitivityError(f"the record of a fallback is damaged: {error}") from error
        return fallback

    def pareto_front(self) -> tuple[Evaluation, ...]:
        """Return the evaluations that no other beats in both cost and drop, cheapest first."""
        front: list[Evaluation] = []
        for evaluation in sorted(self.evaluations, key=lambda entry: (entry.cost, entry.drop)):
            if not front or evaluation.drop < front[-1].drop:
                front.append(evaluation)
        return tuple(front)


def by_rank(ranking: Sequence[GroupSensitivity], *, num: int | None = None, ratio: float | None = None) -> Fallback:
    """Return the fallback of the first ``num`` groups, or of the share ``ratio`` of all groups (rounded up)."""
    if ratio is not None:
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
            raise SensitivityError(f"ratio={ratio!r}: expected a share between 0 and 1")
        # In floating point 0.07 * 100 is slightly above 7, which must not be rounded up to 8.
        count, asked = math.ceil(ratio * len(ranking) - _ROUNDING), f"ratio={ratio:g}"
    else:
        if isinstance(num, bool) or not isinstance(num, int) or num < 0:
            raise SensitivityError(f"num={num!r}: expected a whole number of groups, 0 or more")
        if num > len(ranking):
            raise SensitivityError(f"num={num}: only {len(ranking)} groups are quantized")
        count, asked = num, f"num={num}"
    return fallback_of(ranking[:count], asked)


def fallback_of(entries: Sequence[GroupSensitivity], asked: str) -> Fallback:
    """Return the fallback of the groups of some rows of a ranking."""
    return Fallback(
        groups=tuple(part for entry in entries for part in entry.parts),
        asked=asked,
        ranks=tuple(entry.rank for entry in entries for _ in entry.parts),
    )


def operands_of(plan: Plan) -> dict[str, list[str]]:
    """Return the quantized operands (``SITE.OPERAND``) of each group of a plan."""
    operands: dict[str, list[str]] = defaultdict(list)
    for site in plan.values():
        for operand in site.operands:
            if operand.quantized and operand.group is not None:
                operands[operand.group].append(f"{site.name}.{operand.name}")
    return operands


def fallback_for_target(fallback: Fallback, plan: Plan, backend: str | None, other: Plan) -> Fallback:
    """Return the fallback of one plan for another plan, of another backend or after more calibration data.

    Groups differ between targets, or if other operands share a range. A group of the other plan falls back if any of
    its operands fell back in the first plan. The result has no scores and no times, because they belong to the first
    plan.
    """
    operands = operands_of(plan)
    ranks = dict(zip(fallback.groups, fallback.ranks, strict=False))
    rank_of_operand = {name: ranks.get(group) for group in fallback.groups for name in operands.get(group, ())}
    rank_of_group: dict[str, int | None] = {}
    for group, names in operands_of(other).items():
        hits = [name for name in rank_of_operand if name in set(names)]
        if hits:
            rank_of_group[group] = rank_of_operand[hits[0]]
    of_rank = tuple(rank for rank in rank_of_group.values() if rank is not None)
    return Fallback(
        groups=tuple(rank_of_group),
        asked=fallback.asked if backend is None else f"{fallback.asked}, chosen for {backend}",
        ranks=of_rank if len(of_rank) == len(rank_of_group) else (),
    )


def by_name(operands: Mapping[str, Sequence[str]], names: Sequence[str]) -> Fallback:
    """Return the fallback of the groups whose operands ``names`` cover.

    Raises:
        SensitivityError: a name matches nothing, or covers a part of a group only.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise SensitivityError(f"names={names!r}: expected a list of names")
    covered: set[str] = set()
    for name in names:
        hits = set(operands.get(name, ())) or {
            operand for members in operands.values() for operand in members if _covers(name, operand)
        }
        if not hits:
            raise SensitivityError(
                f"names: {name!r} matches no quantized group, module, site or operand; q.coverage lists them"
            )
        covered |= hits
    groups = [group for group, members in operands.items() if covered & set(members)]
    for group in groups:
        missing = [operand for operand in operands[group] if operand not in covered]
        if missing:
            raise SensitivityError(
                f"names: the group {group} changes precision as a whole, but {missing[0]} is not named; name the "
                f"group, or all of {', '.join(operands[group])}"
            )
    return Fallback(groups=tuple(groups), asked=f"names={list(names)}")


def per_cost(
    ranking: Sequence[GroupSensitivity], costs: str | Mapping[str, float] | None
) -> list[tuple[GroupSensitivity, float]]:
    """Return the groups with their costs, highest error per cost first."""
    if costs is None:
        return [(entry, 1.0) for entry in ranking]
    if isinstance(costs, str):
        if costs != "multiply_adds":
            raise SensitivityError(f"costs={costs!r}: expected 'multiply_adds' or a mapping of groups to numbers")
        costs = {entry.group: float(entry.multiply_adds) for entry in ranking}
    names = {entry.group for entry in ranking}
    strange, missing = sorted(set(costs) - names), sorted(names - set(costs))
    if strange or missing:
        problem = f"{strange[0]!r} is not a group" if strange else f"the group {missing[0]!r} has no cost"
        raise SensitivityError(f"costs: {problem}; expected one number for each of the {len(names)} groups")
    for name, cost in costs.items():
        if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < math.inf:
            raise SensitivityError(f"costs: {name!r} has {cost!r}; expected a number >= 0")
    # A residual add has no multiply-adds; groups without cost come first.
    ordered = sorted(
        ranking, key=lambda entry: -(entry.error / costs[entry.group] if costs[entry.group] > 0 else math.inf)
    )
    return [(entry, float(costs[entry.group])) for entry in ordered]


def _covers(pattern: str, operand: str) -> bool:
    segments = operand.split(".")
    return any(matches(pattern, ".".join(segments[:end])) for end in range(1, len(segments) + 1))


def fallback_record(
    chosen: Fallback,
    max_drop: float | None = None,
    checks: Sequence[EngineCheck] = (),
    scores: Sequence[Score] = (),
) -> FallbackRecord:
    """Return the record of a fallback: its groups, the reason, and all scores of a search."""
    front = chosen.pareto_front()
    return FallbackRecord(
        groups=chosen.groups,
        reason=fallback_reason(chosen),
        evaluations=tuple(
            Tried(**asdict(tried), pareto_optimal=tried in front, chosen=set(tried.groups) == set(chosen.groups))
            for tried in chosen.evaluations
        ),
        float_score=chosen.float_score,
        max_drop=chosen.max_drop if max_drop is None else max_drop,
        checks=tuple(checks),
        outcome=budget_outcome(chosen, max_drop, checks, scores),
    )


def budget_outcome(
    chosen: Fallback, max_drop: float | None, checks: Sequence[EngineCheck], scores: Sequence[Score]
) -> BudgetOutcome | None:
    """Return whether the budget is met; None without a budget. Arguments as of ``fallback_record``."""
    budget = chosen.max_drop if max_drop is None else max_drop
    if budget is None:
        return None
    drops = {frozenset(tried.groups): tried.drop for tried in chosen.evaluations}
    # Only the fallback of all groups may lack a score, because it is the float model.
    tuning = drops.get(frozenset(chosen.groups), 0.0)
    scored = quantized_score(scores)
    if scored is None or scored.difference is None:
        last = checks[-1].drop if checks else tuning
        return BudgetOutcome(max_drop=budget, tuning_drop=tuning, verdict="met" if last <= budget else "not met")
    # The difference of scores is a gain if higher scores are better.
    sign = -1 if scored.higher_is_better else 1
    drop = sign * scored.difference
    low, high = sorted(sign * end for end in scored.interval or (scored.difference, scored.difference))
    verdict = "met" if drop <= budget else "not met"
    noisy = low <= budget < high
    return BudgetOutcome(
        max_drop=budget,
        tuning_drop=tuning,
        form=scored.form,
        evaluation_drop=drop,
        interval=None if scored.interval is None else (low, high),
        verdict=f"{verdict}, within noise" if noisy else verdict,
    )


def fallback_reason(chosen: Fallback) -> str:
    """Return the reason for the groups: the arguments of ``fallback()``, and the result of a search."""
    if chosen.float_score is None:
        return f"chosen by fallback({chosen.asked})"
    scores = {frozenset(evaluation.groups): evaluation.score for evaluation in chosen.evaluations}
    # Only the fallback of all groups may lack a score, because it is the float model.
    reached = scores.get(frozenset(chosen.groups), chosen.float_score)
    missed = "" if chosen.met else "; the budget is not met, this is the best plan found"
    return (
        f"found by fallback({chosen.asked}) in {1 + len(chosen.evaluations)} evaluations: {reached:.5f} on the "
        f"tuning samples; the float model has {chosen.float_score:.5f}{missed}"
    )


Candidate = tuple[GroupSensitivity, float]

Tell = Callable[[Evaluation], object]
"""A callback for each evaluation of a search."""


def search(
    candidates: Sequence[Candidate],
    float_score: float,
    score: Callable[[tuple[str, ...]], float],
    *,
    max_drop: float,
    higher_is_better: bool,
    max_evaluations: int,
    min_groups: int = 0,
    tell: Tell | None = None,
) -> Fallback:
    """Return the smallest fallback found within ``max_drop``; if there is none, the one with the smallest drop.

    The float model itself has a drop of 0, so a budget of 0 or more can always be met. At least ``min_groups`` groups
    fall back, or all of fewer.
    """
    _check(max_drop, max_evaluations, len(candidates))
    least = min(min_groups, len(candidates))
    sign = 1 if higher_is_better else -1
    evaluations: list[Evaluation] = []
    known: dict[tuple[str, ...], bool] = {}

    # Most searches end long before ``max_evaluations``, so the progress bar has no total.
    with loop("search", unit="score", done=1) as progress:

        def meets(in_float: Sequence[Candidate]) -> bool:
            groups = tuple(part for entry, _ in in_float for part in entry.parts)
            if groups not in known:
                value = score(groups)
                drop = sign * (float_score - value)
                evaluations.append(
                    Evaluation(groups=groups, score=value, drop=drop, cost=sum(cost for _, cost in in_float))
                )
                known[groups] = drop <= max_drop
                progress.step()
                if tell is not None:
                    tell(evaluations[-1])
            return known[groups]

        needed = _prefix(candidates, meets, least)
        needed_groups = list(candidates[:needed])
        in_float = _without_needless(needed_groups, meets, lambda: max_evaluations - 1 - len(evaluations), least)
    if max_drop < 0 and not any(known.values()):
        best = min(evaluations, key=lambda entry: (entry.drop, entry.cost))
        # Otherwise all groups stay in float, which drops by 0.
        if best.drop <= 0:
            in_float = [candidate for candidate in candidates if set(candidate[0].parts) <= set(best.groups)]
    record = fallback_of(
        sorted((entry for entry, _ in in_float), key=lambda entry: entry.rank), f"max_drop={max_drop:g}"
    )
    return replace(record, evaluations=tuple(evaluations), float_score=float_score, max_drop=float(max_drop))


def _check(max_drop: float, max_evaluations: int, groups: int) -> None:
    if isinstance(max_drop, bool) or not isinstance(max_drop, int | float) or not math.isfinite(max_drop):
        raise SensitivityError(f"max_drop={max_drop!r}: expected a number")
    least = 2 + math.ceil(math.log2(groups + 1))
    if isinstance(max_evaluations, bool) or not isinstance(max_evaluations, int) or max_evaluations < least:
        raise SensitivityError(
            f"max_evaluations={max_evaluations!r}: expected at least {least}, which a bisection of {groups} groups may "
            "take"
        )


def _prefix(candidates: Sequence[Candidate], meets: Callable[[Sequence[Candidate]], bool], least: int) -> int:
    """Return how many of the first groups must be float while all others are quantized, by bisection."""
    if least == len(candidates) > 0 or meets(candidates[:least]):
        return least
    # All groups in float are the float model, whose score is known.
    too_few, enough = least, len(candidates)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if meets(candidates[:middle]):
            enough = middle
        else:
            too_few = middle
    return enough


def _without_needless(
    in_float: list[Candidate],
    meets: Callable[[Sequence[Candidate]], bool],
    budget_left: Callable[[], int],
    least: int,
) -> list[Candidate]:
    """Return the groups that must stay in float: try to quantize halves, then halves of a needed half.

    The last half comes first, because it has the lowest error per cost. The loop repeats after a removal, because a
    score need not improve with more float groups.
    """
    before = -1
    while len(in_float) != before:
        before = len(in_float)
        waiting = _halves(in_float)
        while waiting and budget_left() > 0:
            part = waiting.pop()
            fewer = [candidate for candidate in in_float if candidate not in part]
            if len(fewer) >= max(least, 1) and meets(fewer):
                in_float = fewer
            elif len(part) > 1:
                waiting += _halves(part)
    return in_float


def _halves(part: list[Candidate]) -> list[list[Candidate]]:
    middle = (len(part) + 1) // 2
    return [half for half in (part[:middle], part[middle:]) if half]
