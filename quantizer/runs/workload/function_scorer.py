"""Scores by a function that somebody gave: it takes the model, or what stands for it, and returns a number."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias
from weakref import WeakKeyDictionary

from torch import nn

from quantizer.engines import Engine
from quantizer.errors import TaskError
from quantizer.report import Score
from quantizer.runs.run_context import RunContext
from quantizer.runs.saved.call_form import CallForm
from quantizer.runs.workload.engine_module import EngineModule

__all__ = ["FunctionMetric", "FunctionScorer", "ScoreFunction"]

ScoreFunction: TypeAlias = Callable[[nn.Module], float]
"""A function that takes a module and returns its score."""


class FunctionMetric:
    """A function as the metric of a search.

    Args:
        function: takes a module and returns its score.
        higher_is_better: whether a higher score is better.
    """

    def __init__(self, function: ScoreFunction, *, higher_is_better: bool) -> None:
        # By this attribute the file with the scores of a search knows the code of the function.
        self.__wrapped__ = function
        self.higher_is_better = higher_is_better
        name = getattr(function, "__name__", type(function).__name__)
        self.name = "score" if name == "<lambda>" else name

    def __call__(self, model: nn.Module, which: str = "quantized model") -> float:
        """Return the score of a model.

        Args:
            model: the model.
            which: what it is, in words.

        Raises:
            TaskError: the function returns no finite number.
        """
        given = self.__wrapped__(model)
        try:
            score = float("nan" if isinstance(given, str) else given)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TaskError(f"{self.name}() returned a {type(given).__name__}; expected a number") from error
        if not math.isfinite(score):
            raise TaskError(f"the score of the {which} is {given!r}; expected a finite number")
        return score


class FunctionScorer:
    """Scores by a function.

    Args:
        context: the float model.
        function: takes a module and returns its score; None: nothing is scored.
        call: how the float model is called, and what it returns.
        higher_is_better: whether a higher score is better.
    """

    def __init__(
        self,
        context: RunContext,
        function: ScoreFunction | None,
        call: CallForm,
        *,
        higher_is_better: bool,
    ) -> None:
        self._context = context
        self._metric = None if function is None else FunctionMetric(function, higher_is_better=higher_is_better)
        self.call = call
        self._known: WeakKeyDictionary[nn.Module | Engine, float] = WeakKeyDictionary()

    @property
    def metric(self) -> FunctionMetric:
        """The function as the metric of a search, which keeps no score: a plan changes in one and the same model."""
        assert self._metric is not None, "a configuration without a metric has no search"
        return self._metric

    def for_run(self, context: RunContext, resamples: int, folder: Path) -> FunctionScorer:
        """Return a scorer for another run on the same model, which knows the scores of this one."""
        other = FunctionScorer(context, None, self.call, higher_is_better=True)
        other._metric, other._known = self._metric, self._known
        return other

    def difference(self, which: str, engine: Engine | None) -> float | None:
        """Return the score of an engine less that of the float model; None without a function or an engine."""
        if self._metric is None or engine is None:
            return None
        return self._score(which, engine) - self._score("float", self._context.model)

    def take(self, forms: Mapping[str, nn.Module | Engine]) -> None:
        """Score models and engines now."""
        for name, form in forms.items() if self._metric is not None else ():
            self._score(name, form)

    def scores(self, forms: Mapping[str, nn.Module | Engine]) -> tuple[Score, ...]:
        """Return the scores of the float model, and of other models and engines by name; none without a function."""
        if self._metric is None:
            return ()
        base = self._score("float", self._context.model)
        told = {"float": base, **{name: self._score(name, form) for name, form in forms.items()}}
        return tuple(
            Score(
                which=name,
                value=value,
                metric=self.metric.name,
                difference=None if name == "float" else value - base,
                higher_is_better=self.metric.higher_is_better,
            )
            for name, value in told.items()
        )

    def _score(self, which: str, form: nn.Module | Engine) -> float:
        if form not in self._known:
            model = form if isinstance(form, nn.Module) else EngineModule(form, self.call)
            with self._context.timer(f"score the {which}"):
                self._known[form] = self.metric(model, which)
        return self._known[form]
