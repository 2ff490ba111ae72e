"""What was put back, and the search that found it, as records."""

from __future__ import annotations

from quantizer.report.record import Evaluation
from quantizer.report.record import Fallback
from quantizer.sensitivity import Fallback as Chosen

__all__ = ["fallback_record"]


def fallback_record(chosen: Chosen, reason: str) -> Fallback:
    """The groups with a reason for them, and every score of the search, if there was one."""
    front = chosen.pareto_front()
    return Fallback(
        groups=chosen.groups,
        reason=reason,
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
        max_drop=chosen.max_drop,
    )
