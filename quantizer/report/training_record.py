"""The records of a quantization-aware training."""

from __future__ import annotations

from dataclasses import dataclass

from quantizer.report.record_base import Record


@dataclass(frozen=True, kw_only=True)
class TrainingScore(Record):
    """A score on the tuning rows before or during training."""

    step: int
    """The number of steps before this score; 0 is the score of PTQ."""
    score: float
    """The metric."""
    best: bool = False
    """Whether the model of this score was kept."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun(Record):
    """The quantization-aware training."""

    metric: str
    """Name of the metric."""
    higher_is_better: bool
    """Whether a higher value is better."""
    planned: int
    """The number of steps that were planned."""
    losses: tuple[float, ...]
    """The loss of each step: the distance of the outputs of its batch from those of the float model."""
    learning_rates: tuple[float, ...]
    """The learning rate of each step."""
    scores: tuple[TrainingScore, ...]
    """The scores on the tuning rows, in order."""
    float_score: float
    """The float model's score on the tuning rows."""
    stopped: str | None = None
    """Why training ended before the planned steps; null if it did not."""
