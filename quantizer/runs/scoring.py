"""Scores of models and engines on rows with labels; none is run on them twice."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from torch import nn

from quantizer.engines import Engine
from quantizer.report import Score
from quantizer.runs.run_context import RunContext
from quantizer.runs.run_context import predict
from quantizer.runs.run_context import score_record
from quantizer.tasks import Predictions
from quantizer.tasks import Row

__all__ = ["Scoring"]


class Scoring:
    """Scores on one set of rows, and differences to the float model.

    Args:
        context: the float model and its task.
        rows: the rows; without any, there are no scores.
        resamples: the resamples behind each interval.
    """

    def __init__(self, context: RunContext, rows: list[Row], resamples: int) -> None:
        self._context = context
        self._rows = rows
        self._resamples = resamples
        self._known: WeakKeyDictionary[nn.Module | Engine, Predictions] = WeakKeyDictionary()

    def difference(self, which: str, engine: Engine | None) -> float | None:
        """Return the score of an engine less that of the float model; None without rows or engine.

        Args:
            which: what it is, in words.
            engine: the engine; None: it does not run here.
        """
        if not self._rows or engine is None:
            return None
        task, base = self._context.task, self._predictions("float", self._context.model)
        return task.score(self._predictions(which, engine), self._rows) - task.score(base, self._rows)

    def take(self, forms: Mapping[str, nn.Module | Engine]) -> None:
        """Run models and engines on the rows; their scores are made of that later."""
        for name, form in forms.items() if self._rows else ():
            self._predictions(name, form)

    def scores(self, forms: Mapping[str, nn.Module | Engine]) -> tuple[Score, ...]:
        """Return the scores of the float model, and of other models and engines by name; none without rows."""
        if not self._rows:
            return ()
        base = self._predictions("float", self._context.model)
        told = {"float": base, **{name: self._predictions(name, form) for name, form in forms.items()}}
        task, rows = self._context.task, self._rows
        return tuple(score_record(name, task, base, one, rows, self._resamples) for name, one in told.items())

    def _predictions(self, which: str, model: nn.Module | Engine) -> Predictions:
        if model not in self._known:
            self._known[model] = predict(self._context, which, model, self._rows)
        return self._known[model]
