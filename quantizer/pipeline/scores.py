"""The task's score as the metric of a search, on samples that the report does not use for scores.

Scores by a function that somebody gave: it takes the model, or what stands for it.

It returns a number, or one for each sample that it scored: the score is then their mean, and these tell how far chance
may move its difference to the float model.

Scores of models and engines on labelled samples; none is run on them twice.
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

from quantizer.errors import TaskError
from quantizer.pipeline.context import RunContext, Runs, as_predictor, bar, predict, score_record
from quantizer.pipeline.engine_module import CallForm, EngineModule
from quantizer.pipeline.processes import from_first_rank
from quantizer.proxy.restored_state import untouched
from quantizer.report import Score
from quantizer.report.compare import Resamples, write_resamples
from quantizer.tasks import Example, Predictions, Task
from quantizer.tasks.datasets.examples import content_of
from quantizer.tasks.metrics import resampled_scores
from quantizer.utils.records import paired_interval


class Metric(Protocol):
    """A function of a model that returns its score."""

    higher_is_better: bool

    def __call__(self, model: nn.Module, /) -> float:
        """Return the score of a model."""


class TaskMetric:
    """A function of a model that returns the task's score of it on the tuning samples.

    Attributes:
        higher_is_better: the direction that is better.
        reads: a hash of the settings and the content of all samples, since image files may change under the same name.
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
        self._examples = examples
        self._runnable = runnable

    def __call__(self, model: nn.Module) -> float:
        with bar("tuning samples") as progress:
            predictions = self._task.predict(as_predictor(self._runnable(model)), self._examples, progress)
        return self._task.score(predictions, self._examples)


ScoreFunction: TypeAlias = Callable[[nn.Module], Any]
"""A function that takes a module and returns its score, or those of samples [N] in a fixed order."""


@dataclass(frozen=True)
class FunctionScore:
    """Score that a function gave a model.

    Attributes:
        value: the score.
        per_sample: the scores of the samples [N], of which it is the mean; None: the function tells none.
    """

    value: float
    per_sample: npt.NDArray[np.float64] | None = None


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
        wanted = "expected a number, or one for each sample"
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
        if which != "float" and score.per_sample is not None and base.per_sample is not None:
            first, second = (
                resampled_scores(_mean, one, one, self._resamples) for one in (base.per_sample, score.per_sample)
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

    def _score(self, which: str, form: Runs) -> FunctionScore:
        if form not in self._known:
            model = form if isinstance(form, nn.Module) else EngineModule(form, self.call)
            with self._context.timer(f"score the {which}"):
                told = self.metric.told(model, which)
            base = told if form is self._context.model else self._score("float", self._context.model)
            if _count(told) != _count(base):
                raise TaskError(
                    f"{self.metric.name}() returned {_count(told)} for the {which}, and {_count(base)} for the float "
                    "model; expected the same samples for both"
                )
            self._known[form] = told
        return self._known[form]


def _mean(scores: npt.NDArray[Any], _: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.asarray(scores.mean(axis=-1))


def _count(score: FunctionScore) -> str:
    return "a number" if score.per_sample is None else f"scores of {len(score.per_sample)} samples"


class Scoring:
    """Scores on one set of samples, and differences to the float model."""

    def __init__(
        self, context: RunContext, examples: list[Example], resamples: int, folder: Path | None = None
    ) -> None:
        self._context = context
        self._examples = examples
        self._resamples = resamples
        self._folder = folder
        self._known: WeakKeyDictionary[Runs, Predictions] = WeakKeyDictionary()
        self._base: WeakKeyDictionary[Runs, Predictions] = WeakKeyDictionary()

    def for_run(self, context: RunContext, resamples: int, folder: Path) -> Scoring:
        """Return a scorer for another run on the same model and samples, which knows what the float model predicts."""
        other = Scoring(context, self._examples, resamples, folder)
        # The same object for all, so that whichever run predicts first does so for the runs that follow.
        other._base = self._base
        return other

    def difference(self, which: str, engine: Runs | None) -> float | None:
        """Return the score of an engine less that of the float model; None without samples or engine."""
        if not self._examples or engine is None:
            return None
        task, base = self._context.task, self._predictions("float", self._context.model)
        return task.score(self._predictions(which, engine), self._examples) - task.score(base, self._examples)

    def take(self, forms: Mapping[str, Runs]) -> None:
        """Run models and engines on the samples; their scores are made of that later.

        Of several processes the first one may have run some of them alone, as for a choice of engines: the others
        leave these out, as no part of theirs is asked for.
        """
        for name in from_first_rank(lambda: self._left(forms), list[str]) if self._examples else ():
            self._predictions(name, forms[name])

    def _left(self, forms: Mapping[str, Runs]) -> list[str]:
        """Return the names of the forms that were not run yet."""
        return [name for name, form in forms.items() if form not in self._store(form)]

    def scores(self, forms: Mapping[str, Runs]) -> tuple[Score, ...]:
        """Return the scores of the float model, and of other models and engines by name; none without samples."""
        if not self._examples:
            return ()
        base = self._predictions("float", self._context.model)
        told = {"float": base, **{name: self._predictions(name, form) for name, form in forms.items()}}
        task, examples = self._context.task, self._examples
        if self._folder is not None:
            resampled = {name: task.resampled(one, examples, self._resamples) for name, one in told.items()}
            kept = Resamples(samples_hash=content_of(examples), metric=task.metric_name, scores=resampled)
            write_resamples(kept, self._folder)
        return tuple(score_record(name, task, base, one, examples, self._resamples) for name, one in told.items())

    def _predictions(self, which: str, model: Runs) -> Predictions:
        known = self._store(model)
        if model not in known:
            known[model] = predict(self._context, which, model, self._examples)
        return known[model]

    def _store(self, model: Runs) -> WeakKeyDictionary[Runs, Predictions]:
        return self._base if model is self._context.model else self._known
