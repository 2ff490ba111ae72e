"""Scores of models and engines: of a task on labelled samples, or of a function; each model is scored once.

A function takes the model or an engine that is called like it. It returns a number, or one number per sample. In the
second case, the score is their mean, and its difference from the float model has a confidence interval.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from quantizer.config import RunConfig
from quantizer.errors import TaskError
from quantizer.pipeline.context import RunContext, Runnable, as_predictor, bar, predict, score_record
from quantizer.pipeline.engine_module import CallForm, EngineModule
from quantizer.pipeline.processes import from_first_rank
from quantizer.proxy.restored_state import untouched
from quantizer.report import Score
from quantizer.report.compare import Resamples, write_resamples
from quantizer.tasks import Example, Predictions, Task
from quantizer.tasks.datasets.examples import content_of
from quantizer.tasks.metrics import resampled_scores
from quantizer.utils.records import paired_interval


def scores_forms(config: RunConfig, *, here: bool) -> bool:
    """Return whether frozen models are scored: those of a training, and where the engine does not run ``here``.

    The outputs of an engine are compared with those of its proxy, so that a score of the proxy only serves a diagnosis.
    """
    return config.qat is not None or config.report.diagnose or not here


class Metric(Protocol):
    """A function that returns the score of a model."""

    higher_is_better: bool

    def __call__(self, model: nn.Module, /) -> float:
        """Return the score of a model."""


class TaskMetric:
    """The score of the task on tuning samples.

    Attributes:
        higher_is_better: whether a higher score is better.
        reads: a hash of the settings and the content of all samples, because files may change under the same name.
    """

    def __init__(
        self,
        settings: tuple[object, ...],
        task: Task,
        examples: Sequence[Example],
        head: Sequence[Example],
        runnable: Callable[[nn.Module], nn.Module],
    ) -> None:
        parts = (*settings, content_of(examples), content_of(head))
        self.reads = hashlib.sha256(repr(parts).encode()).hexdigest()
        self.higher_is_better = task.higher_is_better
        self._task = task
        self._rows = examples
        self._runnable = runnable

    def __call__(self, model: nn.Module) -> float:
        with bar("tuning samples") as progress:
            predictions = self._task.predict(as_predictor(self._runnable(model)), self._rows, progress)
        return self._task.score(predictions, self._rows)


ScoreFunction: TypeAlias = Callable[[nn.Module], Any]
"""A function that takes a module and returns its score, or the scores of its samples [N] in a fixed order."""


@dataclass(frozen=True)
class FunctionScore:
    """The score that a function returned for a model.

    Attributes:
        value: the score.
        per_sample: the scores of the samples [N], whose mean is the score; None if the function returns one number.
    """

    value: float
    per_sample: npt.NDArray[np.float64] | None = None


class FunctionMetric:
    """A user's function as the metric of a search."""

    def __init__(self, function: ScoreFunction, *, higher_is_better: bool) -> None:
        # The resume file of a search identifies the function's code by this attribute.
        self.__wrapped__ = function
        self.higher_is_better = higher_is_better
        name = getattr(function, "__name__", type(function).__name__)
        self.name = "score" if name == "<lambda>" else name

    def __call__(self, model: nn.Module, which: str = "quantized model") -> float:
        """Return the score of a model."""
        return self.checked_score(model, which).value

    def checked_score(self, model: nn.Module, which: str) -> FunctionScore:
        """Call the function on a model, and return its checked result.

        Raises:
            TaskError: the function does not return finite numbers.
        """
        with untouched(model):
            result = self.__wrapped__(model)
        expected = "expected a number, or one for each sample"
        try:
            values = np.asarray(result.detach().double().cpu() if isinstance(result, Tensor) else result)
            if values.dtype.kind not in "bfiu":
                raise TypeError("it is not a number")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TaskError(f"{self.name}() returned a {type(result).__name__}; {expected}") from error
        if not values.size or (values.ndim > 1 and values.size > 1):
            raise TaskError(f"{self.name}() returned values of the shape {list(values.shape)}; {expected}")
        values = values.astype(np.float64)
        if not np.isfinite(values).all():
            raise TaskError(f"the score of the {which} is {result!r}; expected a finite number")
        return FunctionScore(float(values.mean()), values if values.size > 1 else None)


class FunctionScorer:
    """Scores of models and engines by a user's function."""

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
        self._known: WeakKeyDictionary[Runnable, FunctionScore] = WeakKeyDictionary()

    @property
    def metric(self) -> FunctionMetric:
        """The function as the metric of a search; not cached, because the plan of the same model changes."""
        assert self._metric is not None, "a configuration without a metric has no search"
        return self._metric

    def for_run(self, context: RunContext, resamples: int, folder: Path) -> FunctionScorer:
        """Return a scorer for another run on the same model, which reuses the scores."""
        other = FunctionScorer(context, None, self.call, higher_is_better=True, resamples=resamples)
        other._metric, other._known = self._metric, self._known
        return other

    def difference(self, which: str, engine: Runnable | None) -> float | None:
        """Return the score of an engine minus the float model's score; None without a function or an engine."""
        if self._metric is None or engine is None:
            return None
        return self._score(which, engine).value - self._score("float", self._context.model).value

    def take(self, forms: Mapping[str, Runnable]) -> None:
        """Score models and engines now."""
        for name, form in forms.items() if self._metric is not None else ():
            self._score(name, form)

    def scores(self, forms: Mapping[str, Runnable]) -> tuple[Score, ...]:
        """Return the scores of the float model and of other models and engines by name; empty without a function."""
        if self._metric is None:
            return ()
        base = self._score("float", self._context.model)
        scores = {"float": base, **{name: self._score(name, form) for name, form in forms.items()}}
        return tuple(self._record(name, score, base) for name, score in scores.items())

    def _record(self, which: str, score: FunctionScore, base: FunctionScore) -> Score:
        interval = None
        if which != "float" and score.per_sample is not None and base.per_sample is not None:
            first, second = (
                resampled_scores(_mean, entry, entry, self._resamples) for entry in (base.per_sample, score.per_sample)
            )
            interval = paired_interval(first, second)
        return Score(
            form=which,
            value=score.value,
            metric=self.metric.name,
            difference=None if which == "float" else score.value - base.value,
            interval=interval,
            samples=None if score.per_sample is None else len(score.per_sample),
            higher_is_better=self.metric.higher_is_better,
        )

    def _score(self, which: str, form: Runnable) -> FunctionScore:
        if form not in self._known:
            model = form if isinstance(form, nn.Module) else EngineModule(form, self.call)
            with self._context.timer(f"score the {which}"):
                score = self.metric.checked_score(model, which)
            base = score if form is self._context.model else self._score("float", self._context.model)
            if _count(score) != _count(base):
                raise TaskError(
                    f"{self.metric.name}() returned {_count(score)} for the {which}, but {_count(base)} for the float "
                    "model; expected the same samples for both"
                )
            self._known[form] = score
        return self._known[form]


def _mean(scores: npt.NDArray[Any], _: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.asarray(scores.mean(axis=-1))


def _count(score: FunctionScore) -> str:
    return "a number" if score.per_sample is None else f"scores of {len(score.per_sample)} samples"


class Scoring:
    """Scores of a task on one set of samples, and differences from the float model."""

    def __init__(
        self, context: RunContext, examples: list[Example], resamples: int, folder: Path | None = None
    ) -> None:
        self._context = context
        self._rows = examples
        self._resamples = resamples
        self._folder = folder
        self._known: WeakKeyDictionary[Runnable, Predictions] = WeakKeyDictionary()
        self._base: WeakKeyDictionary[Runnable, Predictions] = WeakKeyDictionary()

    def for_run(self, context: RunContext, resamples: int, folder: Path) -> Scoring:
        """Return a scorer for another run on the same model and samples, which reuses the float predictions."""
        other = Scoring(context, self._rows, resamples, folder)
        # One shared object, so that the first run that predicts does so for all later runs.
        other._base = self._base
        return other

    def difference(self, which: str, engine: Runnable | None) -> float | None:
        """Return the score of an engine minus the float model's score; None without samples or an engine."""
        if not self._rows or engine is None:
            return None
        task, base = self._context.task, self._predictions("float", self._context.model)
        return task.score(self._predictions(which, engine), self._rows) - task.score(base, self._rows)

    def take(self, forms: Mapping[str, Runnable]) -> None:
        """Run models and engines on the samples; their scores follow later.

        The first of several processes may already have run some of them in a choice of engines; the others skip these.
        """
        for name in from_first_rank(lambda: self._pending(forms), list[str]) if self._rows else ():
            self._predictions(name, forms[name])

    def _pending(self, forms: Mapping[str, Runnable]) -> list[str]:
        """Return the names of models and engines that did not run yet."""
        return [name for name, form in forms.items() if form not in self._store(form)]

    def scores(self, forms: Mapping[str, Runnable]) -> tuple[Score, ...]:
        """Return the scores of the float model and of other models and engines by name; empty without samples."""
        if not self._rows:
            return ()
        base = self._predictions("float", self._context.model)
        predictions = {"float": base, **{name: self._predictions(name, form) for name, form in forms.items()}}
        task, examples = self._context.task, self._rows
        if self._folder is not None:
            resampled = {name: task.resampled(entry, examples, self._resamples) for name, entry in predictions.items()}
            resampling = Resamples(samples_hash=content_of(examples), metric=task.metric_name, scores=resampled)
            write_resamples(resampling, self._folder)
        return tuple(
            score_record(name, task, base, entry, examples, self._resamples) for name, entry in predictions.items()
        )

    def _predictions(self, which: str, model: Runnable) -> Predictions:
        known = self._store(model)
        if model not in known:
            known[model] = predict(self._context, which, model, self._rows)
        return known[model]

    def _store(self, model: Runnable) -> WeakKeyDictionary[Runnable, Predictions]:
        return self._base if model is self._context.model else self._known
