"""A training, as a record."""

from __future__ import annotations

from typing import Protocol

from quantizer.report.record import TrainingRun
from quantizer.report.record import TrainingScore

__all__ = ["training_record"]


class _Course(Protocol):
    """What came of a training."""

    steps: int
    float_score: float
    losses: list[float]
    rates: list[float]
    scores: list[tuple[int, float]]
    best: int
    stopped: str | None


def training_record(course: _Course, metric: str, higher_is_better: bool) -> TrainingRun:
    """The steps and scores of a training."""
    return TrainingRun(
        metric=metric,
        higher_is_better=higher_is_better,
        planned=course.steps,
        losses=tuple(course.losses),
        learning_rates=tuple(course.rates),
        scores=tuple(TrainingScore(step=step, score=s, best=step == course.best) for step, s in course.scores),
        float_score=course.float_score,
        stopped=course.stopped,
    )
