"""Scores by a function that somebody gave: it takes the model, or what stands for it.

It returns a number, or one for each row that it scored: the score is then their mean, and the rows tell how far chance
may move its difference to the float model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from quantizer.common.statistics import paired_interval
from quantizer.errors import TaskError
from quantizer.proxy.restored_state import untouched
from quantizer.report import Score
from quantizer.runs.run_context import RunContext, Runs
from quantizer.runs.saved.call_form import CallForm
from quantizer.runs.workload.engine_module import EngineModule
from quantizer.tasks.metrics import resampled_scores

ScoreFunction: TypeAlias = Callable[[nn.Module], Any]
"""A function that takes a module and returns its score, or those of rows [N] in a fixed order."""


@dataclass(frozen=True)
class FunctionScore:
    """Score that a function gave a model.

    Attributes:
        value: the score.
        rows: the scores of the rows [N], of which it is the mean; None: the function tells none.
    """

    value: float
    rows: npt.NDArray[np.float64] | None = None


class FunctionMetric:
    """A function as the metric of a search."""

    def __init__(self, function: ScoreFunction, *, higher_is_better: bool) -> None:
        # By this attribute the file with the scores of a search knows the code of the function.
        self.__wrapped__ = function
        self.higher_is_better = higher_is_better
        name = getattr(function, "__name__", type(function).__name__)
        self.name = "score" if name == "<lambda>" else name

    def __call__(self, model: nn.Module, which: str = "quantized model") -> float:
        """Return the score of a model; see ``told``."""
        return self.told(model, which).value

    def told(self, model: nn.Module, which: str) -> FunctionScore:
        """Return what the function says of a model."""
        with untouched(model):
            given = self.__wrapped__(model)
        wanted = "expected a number, or one for each row"
        try:
            values = np.asarray(given.detach().double().cpu() if isinstance(given, Tensor) else given)
            if values.dtype.kind not in "bfiu":
                raise TypeError("it is no number")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TaskError(f"{self.name}() returned a {type(given).__name__}; {wanted}") from error
        if not values.size or (values.ndim > 1 and values.size > 1):
            raise TaskError(f"{self.name}() returned values of the shape {list(values.shape)}; {wanted}")
        values = values.astype(np.float64)
        if not np.isfinite(values).all():
            raise TaskError(f"the score of the {which} is {given!r}; expected a finite number")
        return FunctionScore(float(values.mean()), values if values.size > 1 else None)


class FunctionScorer:
    """Scores by a function."""

    def __init__(
        self,
        context: RunContext,
        function: ScoreFunction | None,
        call: CallForm,
        *,
        higher_is_better: bool,
        resamples: int = 1000,
    ) -> None:
        self._context = context
        self._resamples = resamples
        self._metric = None if function is None else FunctionMetric(function, higher_is_better=higher_is_better)
        self.call = call
        self._known: WeakKeyDictionary[Runs, FunctionScore] = WeakKeyDictionary()

    @property
    def metric(self) -> FunctionMetric:
        """The function as the metric of a search, which keeps no score: a plan changes in one and the same model."""
        assert self._metric is not None, "a configuration without a metric has no search"
        return self._metric

    def for_run(self, context: RunContext, resamples: int, folder: Path) -> FunctionScorer:
        """Return a scorer for another run on the same model, which knows the scores of this one."""
        other = FunctionScorer(context, None, self.call, higher_is_better=True, resamples=resamples)
        other._metric, other._known = self._metric, self._known
        return other

    def difference(self, which: str, engine: Runs | None) -> float | None:
        """Return the score of an engine less that of the float model; None without a function or an engine."""
        if self._metric is None or engine is None:
            return None
        return self._score(which, engine).value - self._score("float", self._context.model).value

    def take(self, forms: Mapping[str, Runs]) -> None:
        """Score models and engines now."""
        for name, form in forms.items() if self._metric is not None else ():
            self._score(name, form)

    def scores(self, forms: Mapping[str, Runs]) -> tuple[Score, ...]:
        """Return the scores of the float model, and of other models and engines by name; none without a function."""
        if self._metric is None:
            return ()
        base = self._score("float", self._context.model)
        told = {"float": base, **{name: self._score(name, form) for name, form in forms.items()}}
        return tuple(self._record(name, score, base) for name, score in told.items())

    def _record(self, which: str, score: FunctionScore, base: FunctionScore) -> Score:
        interval = None
        if which != "float" and score.rows is not None and base.rows is not None:
            first, second = (resampled_scores(_mean, one, one, self._resamples) for one in (base.rows, score.rows))
            interval = paired_interval(first, second)
        return Score(
            which=which,
            value=score.value,
            metric=self.metric.name,
            difference=None if which == "float" else score.value - base.value,
            interval=interval,
            rows=None if score.rows is None else len(score.rows),
            higher_is_better=self.metric.higher_is_better,
        )

    def _score(self, which: str, form: Runs) -> FunctionScore:
        if form not in self._known:
            model = form if isinstance(form, nn.Module) else EngineModule(form, self.call)
            with self._context.timer(f"score the {which}"):
                told = self.metric.told(model, which)
            base = told if form is self._context.model else self._score("float", self._context.model)
            if _count(told) != _count(base):
                raise TaskError(
                    f"{self.metric.name}() returned {_count(told)} for the {which}, and {_count(base)} for the float "
                    "model; expected the same rows for both"
                )
            self._known[form] = told
        return self._known[form]


def _mean(scores: npt.NDArray[Any], _: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.asarray(scores.mean(axis=-1))


def _count(score: FunctionScore) -> str:
    return "a number" if score.rows is None else f"scores of {len(score.rows)} rows"
