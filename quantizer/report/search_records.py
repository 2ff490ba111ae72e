"""The records of a fallback and of the search for it."""

from __future__ import annotations

from collections.abc import Sequence

from quantizer.report.record import EngineCheck
from quantizer.report.record import Evaluation
from quantizer.report.record import Fallback
from quantizer.sensitivity import Fallback as Chosen

__all__ = ["fallback_reason", "fallback_record"]


def fallback_record(chosen: Chosen, max_drop: float | None = None, checks: Sequence[EngineCheck] = ()) -> Fallback:
    """Return the record of a fallback: its groups, the reason, and all scores of the search if there was one.

    Args:
        chosen: the groups, and the search for them.
        max_drop: the budget that was asked for (None: that of the search).
        checks: the engines that were checked against the budget.
    """
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
