"""The measurement of sensitivity, the search of ``fallback.max_drop``, and the check of the engine against this budget.

The search scores candidates on tuning samples. A third of them is held back, to check the engine on unseen samples.

``budget_warnings`` warns of budgets below the resolution of the samples. With n samples, the accuracy has steps of 1/n.
If quantization changes a fraction p of the answers by chance, its standard deviation is sqrt(p / n).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from quantizer.algorithms.fallback import Fallback, fallback_reason
from quantizer.algorithms.sensitivity import Evaluation, fingerprint
from quantizer.algorithms.sensitivity.latency_costs import LatencyCosts
from quantizer.pipeline.context import RunContext, Runnable, as_predictor, bar
from quantizer.pipeline.scores import FunctionScorer, Metric
from quantizer.quantizer import Quantizer
from quantizer.report import text
from quantizer.tasks import Batch, Example
from quantizer.utils.distributed import is_mine
from quantizer.utils.fingerprint import Fingerprint
from quantizer.utils.progress import counted
from quantizer.utils.records import EngineCheck


def measure_sensitivity(context: RunContext, quantizer: Quantizer, proxy: nn.Module, batches: Sequence[Batch]) -> None:
    """Measure the sensitivity of a proxy's groups on batches; the measure ``metric`` needs none."""
    with context.timer("measure sensitivity"), torch.no_grad():
        with counted(batches, "batches", unit="batch") as steps:
            for number, batch in enumerate(steps):
                if is_mine(number):
                    proxy(**batch)
        # The measure ``metric`` only runs when the sensitivities are read.
        len(quantizer.sensitivity)


def search_fallback(
    context: RunContext,
    quantizer: Quantizer,
    proxy: nn.Module,
    metric: Metric,
    max_drop: float,
    *,
    max_evaluations: int = 25,
    min_groups: int = 0,
    costs: str | Mapping[str, float] | None = None,
    latency_costs: LatencyCosts | None = None,
) -> None:
    """Keep groups in float until the score drops by at most ``max_drop``; reuse scores of a resume file."""
    timer, scores = context.timer, context.resume.scores
    with timer("search fallback groups"):
        known = scores.under(fingerprint(quantizer.plan, metric, Fingerprint.of(context.model))).count
        note = f"resuming with {known} scores from" if known else "scores are kept until the run is complete in"
        timer.say(f"  {note} {scores.folder}")
        timer.tell(f"target: a drop of at most {max_drop:g}")
        chosen = quantizer.fallback(
            proxy,
            max_drop=max_drop,
            metric=metric,
            higher_is_better=metric.higher_is_better,
            max_evaluations=max_evaluations,
            min_groups=min_groups,
            costs=costs,
            latency_costs=latency_costs,
            cache=scores.folder,
            tell=_EvaluationPrinter(timer.tell, max_drop),
        )
        timer.tell(f"{text.counted(len(chosen.groups), 'group')} kept in float, {fallback_reason(chosen)}")


class _EvaluationPrinter:
    """Printer of the evaluations of a search, one line each."""

    def __init__(self, tell: Callable[[str], None], target: float) -> None:
        self._tell = tell
        self._target = target
        self._count = 0
        self._start = time.perf_counter()

    def __call__(self, evaluation: Evaluation) -> None:
        self._count += 1
        seconds, self._start = time.perf_counter() - self._start, time.perf_counter()
        verdict = "ok" if evaluation.drop <= self._target else "not ok"
        # Fixed-width columns; adding 0.0 turns -0.0 into 0.0.
        self._tell(
            f"try {self._count:>2}: {len(evaluation.groups):>3} groups in float, score {evaluation.score:.5f}, "
            f"drop {evaluation.drop + 0.0:>8.5f}, {verdict:>6}, {seconds:.1f} s"
        )


_ASSUMED_CHANGES = 0.01
"""Assumed fraction p of changed answers, which the message states. The INT8 demo changes 1.5%."""

_NORMAL_95 = 1.96


def budget_warnings(asked: float, samples: int, tuning: int, metric: str, option: str) -> Iterator[str]:
    """Yield a warning if a budget is below the resolution or the noise of the tuning samples.

    Args:
        asked: the budget.
        samples: the number of tuning samples that the search uses.
        tuning: the number of all tuning samples.
        metric: the name of the metric.
        option: the option of the budget, as the user wrote it.
    """
    if metric != "accuracy" or asked <= 0 or samples <= 0:
        return
    step, noise = 1 / samples, _NORMAL_95 * math.sqrt(_ASSUMED_CHANGES / samples)
    others = f" (of {tuning}; the others check the engine)" if samples < tuning else ""
    if asked < step:
        yield (
            f"{option}: {asked:g} is below one of the {samples} tuning samples of the search{others}, which is "
            f"{step:.4f} of the accuracy, so that only a drop of 0 meets it; use at least "
            f"{math.ceil(tuning / samples / asked)} tuning samples, or a larger drop"
        )
    elif asked < noise:
        yield (
            f"{option}: {asked:g} is within the noise of the {samples} tuning samples of the search{others}: if 1 of "
            f"100 answers changes, chance alone moves the accuracy by {noise:.4f} (95%)"
        )


CHECK_ON_ROWS, CHECK_BY_FUNCTION = "check the engine on held-out samples", "check the engine"
"""The name of the stage that checks an engine against its budget."""

_CHECKS = 3
"""Maximum number of engines built for one budget."""

_SHARE_MORE = 8
"""If a search would find a rejected plan again, one of this many groups falls back at least."""


def more_groups(rejected: Fallback | None, allowed: float, groups: int) -> int:
    """Return the least number of groups for the search after an engine missed its budget.

    The drop of the rejected plan on the samples of the search may be within the new limit. Then at least twice as many
    groups fall back, because the same plan would be found again.

    Args:
        rejected: the fallback of the rejected engine.
        allowed: the new limit of the search.
        groups: the number of all groups.
    """
    if rejected is None:
        return 0
    drops = {frozenset(entry.groups): entry.drop for entry in rejected.evaluations}
    if drops.get(frozenset(rejected.groups), math.inf) > allowed:
        return 0
    return max(2 * len(rejected.groups), math.ceil(groups / _SHARE_MORE))


_HELD_OUT = 3
"""One of this many tuning samples is held back from the search."""


def samples_searched(tuning: int, *, checked: bool) -> int:
    """Return the number of tuning samples that the search uses; the others check the engine."""
    return tuning - tuning // _HELD_OUT if checked else tuning


class EngineBudget:
    """The allowed drop of the engine's score, and the drop that the search may use to reach it.

    Attributes:
        asked: the budget; None without one.
        searched: the tuning samples of the search; all of them if no engine is checked.
        checks: the checked engines, in order.
    """

    def __init__(
        self,
        context: RunContext,
        asked: float | None,
        tuning: list[Example],
        *,
        checked: bool,
        function: FunctionScorer | None = None,
    ) -> None:
        """Split the tuning samples.

        Args:
            context: the model and its task.
            asked: the budget; None without one.
            tuning: the tuning samples.
            checked: the engine of the search is checked on this machine; not with training, which changes the engine.
            function: the scorer of a function, which has its own samples.
        """
        self.asked = asked
        self.checks: list[EngineCheck] = []
        checked = checked and asked is not None
        self.searched = [row for place, row in enumerate(tuning, start=1) if place % _HELD_OUT] if checked else tuning
        self._rows = tuning[_HELD_OUT - 1 :: _HELD_OUT] if checked else []
        self._function = function if checked else None
        self._context = context
        self._float_score: float | None = None
        self._allowed = self.asked or 0.0

    def warn(self, option: str) -> None:
        """Print a warning if the samples of the search cannot resolve the budget."""
        if self.asked is not None and self.searched:
            metric = self._context.task.metric_name
            tuning = len(self.searched) + len(self._rows)
            for line in budget_warnings(self.asked, len(self.searched), tuning, metric, option):
                self._context.timer.tell(f"warning: {line}")

    def next_drop(self, engine: Runnable | None, groups: int) -> float | None:
        """Return the drop allowed in the next search; None if the engine meets the budget, or is not checked.

        The budget of the search shrinks by the excess of the engine, down to 0. It ends after three engines.
        """
        if self.asked is None or engine is None or not (self._rows or self._function):
            return None
        timer, samples = self._context.timer, None if self._function else len(self._rows)
        with timer(CHECK_BY_FUNCTION if self._function else CHECK_ON_ROWS):
            drop = self._drop(engine)
        self.checks.append(EngineCheck(groups=groups, drop=drop, samples=samples))
        on_samples = "" if samples is None else f" on {samples} samples"
        result = f"the engine's drop{on_samples} is {drop:.5f}, and {self.asked:g} is allowed"
        if drop <= self.asked:
            timer.tell(result)
            return None
        if len(self.checks) == _CHECKS:
            timer.tell(f"{result}: the engine does not meet the budget; this is the best plan that was found")
            return None
        self._allowed = max(0.0, self._allowed - (drop - self.asked))
        timer.tell(f"{result}: the search continues with {self._allowed:.5f}")
        return self._allowed

    def _drop(self, engine: Runnable) -> float:
        """Return the drop of the engine's score below the float model's score."""
        if self._function is not None:
            gain = self._function.difference("engine", engine)
            assert gain is not None
            return 0.0 - gain if self._function.metric.higher_is_better else gain
        if self._float_score is None:
            self._float_score = self._score(self._context.model)
        sign = 1 if self._context.task.higher_is_better else -1
        return sign * (self._float_score - self._score(engine))

    def _score(self, model: Runnable) -> float:
        task = self._context.task
        with bar("held-out samples") as progress:
            return task.score(task.predict(as_predictor(model), self._rows, progress), self._rows)
