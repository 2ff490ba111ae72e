"""The search for groups that fall back to float: sensitivity on batches, and a choice within a drop of the score.

A budget of the score: what tuning samples can tell of a drop, and whether the built engine keeps to it too.

Tuning samples cannot show every drop, as one sample is a step of the score and chance moves it.

Legend: n is the number of scored samples, p the share of them whose answer quantization changes. An accuracy moves in
steps of 1 / n. If nothing is lost, as many of the changed answers become right as wrong, and the score still moves: its
standard deviation is the root of p / n.

The engine is scored on tuning samples that the search for fallback did not see.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from quantizer.algorithms.fallback import fallback_reason
from quantizer.algorithms.sensitivity import Evaluation, fingerprint
from quantizer.algorithms.sensitivity.latency_costs import LatencyCosts
from quantizer.config import RunConfig
from quantizer.pipeline.context import RunContext, Runs, as_predictor, bar
from quantizer.pipeline.scores import FunctionScorer, Metric
from quantizer.quantizer import Quantizer
from quantizer.report import RunRecord, text
from quantizer.tasks import Batch, Example, rows_at
from quantizer.utils.distributed import is_mine
from quantizer.utils.fingerprint import Fingerprint
from quantizer.utils.progress import counted
from quantizer.utils.records import EngineCheck

_BATCHES, _SAMPLES = 2, 8
"""On so many samples of so many batches causes are looked for, as each setting that is tried is calibrated on them."""


DIAGNOSE = "diagnose"
"""The name of the stage."""


def wants_diagnosis(config: RunConfig) -> bool:
    """Return whether causes are looked for: where sensitivity is asked for, and nothing was trained."""
    return config.amp is not None and config.qat is None


def with_diagnosis(
    record: RunRecord, context: RunContext, config: RunConfig, quantizer: Quantizer, batches: Sequence[Batch]
) -> RunRecord:
    """Return a record with the groups that cost most and their fixes, or with the reason why the search failed.

    Nothing is looked for unless sensitivity is asked for, or after a training.
    """
    if not wants_diagnosis(config) or not batches:
        return record
    with context.timer(DIAGNOSE):
        try:
            batches = batches[:_BATCHES]
            if context.feed.samples_independent:
                batches = [_beginning(batch) for batch in batches]
            return replace(record, diagnoses=quantizer.diagnose(context.model, batches).rows)
        except Exception as error:  # noqa: BLE001 - the result is complete without them: no diagnosis may cost it
            problem = f"{type(error).__name__}: {error}"
    warnings.warn(f"the diagnosis failed; the result is complete without it: {problem}", stacklevel=2)
    return replace(record, diagnosis_error=problem)


def _beginning(batch: Batch) -> Batch:
    return rows_at(batch, range(min(_SAMPLES, len(next(iter(batch.values()))))))


def measure_sensitivity(context: RunContext, quantizer: Quantizer, proxy: nn.Module, batches: Sequence[Batch]) -> None:
    """Rank the groups of a proxy that ``amp()`` returned, on batches; the measure ``metric`` needs none."""
    with context.timer("measure sensitivity"), torch.no_grad():
        with counted(batches, "batches", unit="batch") as steps:
            for number, batch in enumerate(steps):
                if is_mine(number):
                    proxy(**batch)
        # The measure ``metric`` runs only when the ranking is read.
        len(quantizer.sensitivity)


def search_fallback(
    context: RunContext,
    quantizer: Quantizer,
    proxy: nn.Module,
    metric: Metric,
    max_drop: float,
    *,
    max_evaluations: int = 25,
    costs: str | Mapping[str, float] | None = None,
    latency_costs: LatencyCosts | None = None,
) -> None:
    """Let groups fall back to float until the score is at most ``max_drop`` worse; reuse scores of a resume file."""
    timer, scores = context.timer, context.resume.scores
    with timer("search fallback groups"):
        known = scores.under(fingerprint(quantizer.plan, metric, Fingerprint.of(context.model))).count
        kept = f"going on with {known} scores of" if known else "until the run is complete, each score is kept in"
        timer.say(f"  {kept} {scores.folder}")
        timer.tell(f"target: a drop of at most {max_drop:g}")
        chosen = quantizer.fallback(
            proxy,
            max_drop=max_drop,
            metric=metric,
            higher_is_better=metric.higher_is_better,
            max_evaluations=max_evaluations,
            costs=costs,
            latency_costs=latency_costs,
            cache=scores.folder,
            tell=_Tries(timer.tell, max_drop),
        )
        timer.tell(f"{text.counted(len(chosen.groups), 'group')} kept in float, {fallback_reason(chosen)}")


class _Tries:
    """Teller of the tries of a search, a line each."""

    def __init__(self, tell: Callable[[str], None], target: float) -> None:
        self._tell = tell
        self._target = target
        self._count = 0
        self._start = time.perf_counter()

    def __call__(self, tried: Evaluation) -> None:
        self._count += 1
        seconds, self._start = time.perf_counter() - self._start, time.perf_counter()
        judged = "ok" if tried.drop <= self._target else "not ok"
        # Fixed places, so that tries stand below each other; -0.0 would be a gain.
        self._tell(
            f"try {self._count:>2}: {len(tried.groups):>3} groups in float, score {tried.score:.5f}, "
            f"drop {tried.drop + 0.0:>8.5f}, {judged:>6}, {seconds:.1f} s"
        )


_CHANGED = 0.01
"""p before anything ran: an assumption, of which the message tells. The demo's INT8 changes 1.5% of the answers."""

_NORMAL_95 = 1.96


def budget_warnings(asked: float, samples: int, metric: str, option: str) -> Iterator[str]:
    """Yield why a budget is finer than its samples can show, in a sentence; nothing if they can."""
    if metric != "accuracy" or asked <= 0 or samples <= 0:
        return
    step, noise = 1 / samples, _NORMAL_95 * math.sqrt(_CHANGED / samples)
    if asked < step:
        yield (
            f"{option}: {asked:g} is finer than one of the {samples} tuning samples that the search sees, which is "
            f"{step:.4f} of the accuracy: nothing but a drop of 0 meets it; give {math.ceil(1 / asked)} or more, or "
            "allow more"
        )
    elif asked < noise:
        yield (
            f"{option}: {asked:g} is within the noise of the {samples} tuning samples that the search sees: where 1 "
            f"answer "
            f"in 100 changes, chance alone moves the accuracy by {noise:.4f} (95%)"
        )


CHECK_ON_SAMPLES, CHECK_BY_FUNCTION = "check the engine on samples that the search did not see", "check the engine"
"""The stage in which an engine is held to its budget."""

_CHECKS = 3
"""How often an engine is built for one budget."""

_SHARE = 3
"""One of so many tuning samples is held back from the search."""


def samples_searched(tuning: int, *, checked: bool) -> int:
    """Return how many of the tuning samples the search sees, where engines are checked on the others."""
    return tuning - tuning // _SHARE if checked else tuning


class EngineBudget:
    """The drop of an engine's score that is allowed, and what the search may drop so that the engine meets it.

    Attributes:
        asked: the budget; None: there is none.
        searched: the tuning samples for the search; all of them if no engine is to be checked.
        checks: the engines that were checked, in order.
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
        """
        Args:
            context: the model and its task.
            asked: the budget; None: there is none.
            tuning: the tuning samples.
            checked: whether an engine of what the search finds runs here; with training, other engines are built.
            function: scores engines where the function alone knows the samples.
        """
        self.asked = asked
        self.checks: list[EngineCheck] = []
        checked = checked and asked is not None
        self.searched = (
            [example for place, example in enumerate(tuning, start=1) if place % _SHARE] if checked else tuning
        )
        self._examples = tuning[_SHARE - 1 :: _SHARE] if checked else []
        self._function = function if checked else None
        self._context = context
        self._float_score: float | None = None
        self._allowed = self.asked or 0.0

    def warn(self, option: str) -> None:
        """Print a warning where the samples of the search cannot show a drop as small as the budget."""
        if self.asked is not None and self.searched:
            metric = self._context.task.metric_name
            for line in budget_warnings(self.asked, len(self.searched), metric, option):
                self._context.timer.tell(f"warning: {line}")

    def next_drop(self, engine: Runs | None, groups: int) -> float | None:
        """Return the drop that the search is allowed now; None if the engine meets the budget, or nothing is checked.

        The search's budget shrinks by what the engine exceeds its own, down to 0; after three engines it ends.
        """
        if self.asked is None or engine is None or not (self._examples or self._function):
            return None
        timer, samples = self._context.timer, None if self._function else len(self._examples)
        with timer(CHECK_BY_FUNCTION if self._function else CHECK_ON_SAMPLES):
            drop = self._drop(engine)
        self.checks.append(EngineCheck(groups=groups, drop=drop, samples=samples))
        told = "" if samples is None else f" on {samples} samples"
        said = f"the engine's drop{told} is {drop:.5f}, and {self.asked:g} is allowed"
        if drop <= self.asked:
            timer.tell(said)
            return None
        if self._allowed == 0 or len(self.checks) == _CHECKS:
            timer.tell(f"{said}: the budget is not met on the engine, and this is the best plan found")
            return None
        self._allowed = max(0.0, self._allowed - (drop - self.asked))
        timer.tell(f"{said}: the search goes on with {self._allowed:.5f}")
        return self._allowed

    def _drop(self, engine: Runs) -> float:
        """Return how much worse the engine is than the float model."""
        if self._function is not None:
            gain = self._function.difference("engine", engine)
            assert gain is not None
            return 0.0 - gain if self._function.metric.higher_is_better else gain
        if self._float_score is None:
            self._float_score = self._score(self._context.model)
        sign = 1 if self._context.task.higher_is_better else -1
        return sign * (self._float_score - self._score(engine))

    def _score(self, model: Runs) -> float:
        task = self._context.task
        with bar("samples to check on") as progress:
            return task.score(task.predict(as_predictor(model), self._examples, progress), self._examples)
