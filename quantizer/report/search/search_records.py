"""The records of a fallback and of the search for it."""

from __future__ import annotations

from collections.abc import Sequence

from quantizer.report.record import Evaluation, Fallback, Score
from quantizer.report.run_records import BudgetOutcome, EngineCheck
from quantizer.report.tables.headline import quantized_score
from quantizer.sensitivity import Fallback as Chosen


def fallback_record(
    chosen: Chosen,
    max_drop: float | None = None,
    checks: Sequence[EngineCheck] = (),
    scores: Sequence[Score] = (),
) -> Fallback:
    """Return the record of a fallback: its groups, the reason, and all scores of the search if there was one."""
    front = chosen.pareto_front()
    return Fallback(
        groups=chosen.groups,
        reason=fallback_reason(chosen),
        evaluations=tuple(
            Evaluation(
                groups=evaluation.groups,
                score=evaluation.score,
                drop=evaluation.drop,
                cost=evaluation.cost,
                front=evaluation in front,
                chosen=set(evaluation.groups) == set(chosen.groups),
            )
            for evaluation in chosen.evaluations
        ),
        float_score=chosen.float_score,
        max_drop=chosen.max_drop if max_drop is None else max_drop,
        checks=tuple(checks),
        outcome=budget_outcome(chosen, max_drop, checks, scores),
    )


def budget_outcome(
    chosen: Chosen, max_drop: float | None, checks: Sequence[EngineCheck], scores: Sequence[Score]
) -> BudgetOutcome | None:
    """Return whether a budget is met in the end; None if there was none. Arguments as of ``fallback_record``."""
    asked = chosen.max_drop if max_drop is None else max_drop
    if asked is None:
        return None
    drops = {frozenset(tried.groups): tried.drop for tried in chosen.evaluations}
    # Only the fallback of all groups may lack a score: it is the float model.
    tuning = drops.get(frozenset(chosen.groups), 0.0)
    scored = quantized_score(scores)
    if scored is None or scored.difference is None:
        last = checks[-1].drop if checks else tuning
        return BudgetOutcome(asked=asked, tuning=tuning, verdict="met" if last <= asked else "not met")
    # The difference of scores is a gain where more is better.
    sign = -1 if scored.higher_is_better else 1
    drop = sign * scored.difference
    low, high = sorted(sign * end for end in scored.interval or (scored.difference, scored.difference))
    verdict = "met" if drop <= asked else "not met"
    noisy = low <= asked < high
    return BudgetOutcome(
        asked=asked,
        tuning=tuning,
        which=scored.which,
        evaluation=drop,
        interval=None if scored.interval is None else (low, high),
        verdict=f"{verdict}, within noise" if noisy else verdict,
    )


def fallback_reason(chosen: Chosen) -> str:
    """Return the reason for the groups: the arguments of ``fallback()``, and the result of a search."""
    if chosen.float_score is None:
        return f"chosen by fallback({chosen.asked})"
    scores = {frozenset(evaluation.groups): evaluation.score for evaluation in chosen.evaluations}
    # Only the fallback of all groups may lack a score: it is the float model.
    reached = scores.get(frozenset(chosen.groups), chosen.float_score)
    missed = "" if chosen.met else "; the budget is not met, and this is the best plan found"
    return (
        f"found by fallback({chosen.asked}) in {1 + len(chosen.evaluations)} evaluations: {reached:.5f} on the "
        f"tuning rows, where the float model has {chosen.float_score:.5f}{missed}"
    )
