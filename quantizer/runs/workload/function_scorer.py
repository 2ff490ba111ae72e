"""Scores by a function that somebody gave: it takes the model, or what stands for it, and returns a number."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from quantizer.engines import Engine
from quantizer.errors import TaskError
from quantizer.report import Score
from quantizer.runs.run_context import RunContext
from quantizer.runs.workload.engine_module import EngineModule

__all__ = ["FunctionScorer"]


class FunctionScorer:
    """Scores by a function.

    Args:
        context: the float model.
        function: takes a module and returns its score; None: nothing is scored.
        output: what the float model returns.
        higher_is_better: whether a higher score is better.
    """

    def __init__(
        self,
        context: RunContext,
        function: Callable[[nn.Module], float] | None,
        output: Any,
        *,
        higher_is_better: bool,
    ) -> None:
        self._context = context
        self._function = function
        self._output = output
        self._higher_is_better = higher_is_better
        self._known: WeakKeyDictionary[nn.Module | Engine, float] = WeakKeyDictionary()

    def difference(self, which: str, engine: Engine | None) -> float | None:
        """Return the score of an engine less that of the float model; None without a function or an engine."""
        if self._function is None or engine is None:
            return None
        return self._score(which, engine) - self._score("float", self._context.model)

    def take(self, forms: Mapping[str, nn.Module | Engine]) -> None:
        """Score models and engines now."""
        for name, form in forms.items() if self._function is not None else ():
            self._score(name, form)

    def scores(self, forms: Mapping[str, nn.Module | Engine]) -> tuple[Score, ...]:
        """Return the scores of the float model, and of other models and engines by name; none without a function."""
        if self._function is None:
            return ()
        metric = getattr(self._function, "__name__", type(self._function).__name__)
        base = self._score("float", self._context.model)
        told = {"float": base, **{name: self._score(name, form) for name, form in forms.items()}}
        return tuple(
            Score(
                which=name,
                value=value,
                metric=metric,
                difference=None if name == "float" else value - base,
                higher_is_better=self._higher_is_better,
            )
            for name, value in told.items()
        )

    def _score(self, which: str, form: nn.Module | Engine) -> float:
        assert self._function is not None
        if form not in self._known:
            model = form if isinstance(form, nn.Module) else EngineModule(form, self._context.model, self._output)
            with self._context.timer(f"score the {which}"):
                score = float(self._function(model))
            if not math.isfinite(score):
                raise TaskError(f"the score of the {which} is {score}; expected a finite number")
            self._known[form] = score
        return self._known[form]
