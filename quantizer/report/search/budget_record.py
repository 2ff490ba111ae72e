"""The records of a budget of accuracy: the engines that were held to it, and what came of it in the end."""

from __future__ import annotations

from dataclasses import dataclass

from quantizer.report.record_base import Record


@dataclass(frozen=True, kw_only=True)
class EngineCheck(Record):
    """The score of an engine that is held to a budget, on rows that the search for its fallback did not see."""

    allowed: float
    """How much worse than the float score the search let the score of the quantized model be."""
    groups: int
    """How many groups had fallen back to float."""
    drop: float
    """How much worse the engine's score is than the float model's; negative if it is better."""
    rows: int | None
    """The number of rows; null: a function of the user's own scored it, as it scored the search."""


@dataclass(frozen=True, kw_only=True)
class BudgetOutcome(Record):
    """Outcome of a budget of accuracy; a drop is how much worse a score is than the float model's."""

    asked: float
    """The drop that was allowed."""
    tuning: float
    """The drop of the chosen plan on the tuning rows that the search saw."""
    which: str | None = None
    """The form of the model that was scored on the evaluation rows, the nearest to the engine; null: none was."""
    evaluation: float | None = None
    """Its drop on the evaluation rows, which nothing was chosen by; null if it was not scored."""
    interval: tuple[float, float] | None = None
    """95% bootstrap interval [low, high] of that drop; null if it was not computed."""
    verdict: str
    """``met`` or ``not met``, by the evaluation, else by the engine's rows, else by the tuning rows; with ``, within
    noise`` where the interval has the budget in it, so that other rows may say otherwise."""

    @property
    def is_missed(self) -> bool:
        """True if the budget is not met."""
        return self.verdict.startswith("not met")

    @property
    def is_within_noise(self) -> bool:
        """True if other rows may say otherwise."""
        return self.verdict.endswith("within noise")
