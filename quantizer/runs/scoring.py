"""Scores of models and engines on rows with labels; none is run on them twice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from weakref import WeakKeyDictionary

from quantizer.report import Score
from quantizer.report.compare import Resamples, write_resamples
from quantizer.runs.ranks.process_group import from_first_rank
from quantizer.runs.run_context import RunContext, Runs, predict, score_record
from quantizer.tasks import Predictions, Row
from quantizer.tasks.datasets.rows import content_of


class Scoring:
    """Scores on one set of rows, and differences to the float model."""

    def __init__(self, context: RunContext, rows: list[Row], resamples: int, folder: Path | None = None) -> None:
        self._context = context
        self._rows = rows
        self._resamples = resamples
        self._folder = folder
        self._known: WeakKeyDictionary[Runs, Predictions] = WeakKeyDictionary()
        self._base: WeakKeyDictionary[Runs, Predictions] = WeakKeyDictionary()

    def for_run(self, context: RunContext, resamples: int, folder: Path) -> Scoring:
        """Return a scorer for another run on the same model and rows, which knows what the float model predicts."""
        other = Scoring(context, self._rows, resamples, folder)
        # The same object for all, so that whichever run predicts first does so for the runs that follow.
        other._base = self._base
        return other

    def difference(self, which: str, engine: Runs | None) -> float | None:
        """Return the score of an engine less that of the float model; None without rows or engine."""
        if not self._rows or engine is None:
            return None
        task, base = self._context.task, self._predictions("float", self._context.model)
        return task.score(self._predictions(which, engine), self._rows) - task.score(base, self._rows)

    def take(self, forms: Mapping[str, Runs]) -> None:
        """Run models and engines on the rows; their scores are made of that later.

        Of several processes the first one may have run some of them alone, as for a choice of engines: the others
        leave these out, as no part of theirs is asked for.
        """
        for name in from_first_rank(lambda: self._left(forms), list[str]) if self._rows else ():
            self._predictions(name, forms[name])

    def _left(self, forms: Mapping[str, Runs]) -> list[str]:
        """Return the names of the forms that were not run yet."""
        return [name for name, form in forms.items() if form not in self._store(form)]

    def scores(self, forms: Mapping[str, Runs]) -> tuple[Score, ...]:
        """Return the scores of the float model, and of other models and engines by name; none without rows."""
        if not self._rows:
            return ()
        base = self._predictions("float", self._context.model)
        told = {"float": base, **{name: self._predictions(name, form) for name, form in forms.items()}}
        task, rows = self._context.task, self._rows
        if self._folder is not None:
            resampled = {name: task.resampled(one, rows, self._resamples) for name, one in told.items()}
            kept = Resamples(rows=content_of(rows), metric=task.metric_name, scores=resampled)
            write_resamples(kept, self._folder)
        return tuple(score_record(name, task, base, one, rows, self._resamples) for name, one in told.items())

    def _predictions(self, which: str, model: Runs) -> Predictions:
        known = self._store(model)
        if model not in known:
            known[model] = predict(self._context, which, model, self._rows)
        return known[model]

    def _store(self, model: Runs) -> WeakKeyDictionary[Runs, Predictions]:
        return self._base if model is self._context.model else self._known
