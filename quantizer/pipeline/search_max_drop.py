"""The search for groups that fall back to float: sensitivity on batches, and a choice within a drop of the score."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from quantizer.algorithms.fallback import fallback_reason
from quantizer.algorithms.sensitivity import Evaluation, fingerprint
from quantizer.algorithms.sensitivity.prices import Prices
from quantizer.config import RunConfig
from quantizer.pipeline.context import RunContext
from quantizer.pipeline.scores import Metric
from quantizer.quantizer import Quantizer
from quantizer.report import RunRecord, text
from quantizer.tasks import Batch, rows_at
from quantizer.utils.distributed import is_mine
from quantizer.utils.fingerprint import Fingerprint
from quantizer.utils.progress import counted

_BATCHES, _ROWS = 2, 8
"""On so many rows of so many batches causes are looked for, as each setting that is tried is calibrated on them."""


CAUSES = "look for causes"
"""The name of the stage."""


def has_causes(config: RunConfig) -> bool:
    """Return whether causes are looked for: where sensitivity is asked for, and nothing was trained."""
    return config.amp is not None and config.qat is None


def with_causes_of(
    record: RunRecord, context: RunContext, config: RunConfig, quantizer: Quantizer, batches: Sequence[Batch]
) -> RunRecord:
    """Return a record with the groups that cost most and their cures, or with the reason why the search failed.

    Nothing is looked for unless sensitivity is asked for, or after a training.
    """
    if not has_causes(config) or not batches:
        return record
    with context.timer(CAUSES):
        try:
            batches = batches[:_BATCHES]
            if context.feed.rows_apart:
                batches = [_beginning(batch) for batch in batches]
            return replace(record, causes=quantizer.causes(context.model, batches).rows)
        except Exception as error:  # noqa: BLE001 - the result is complete without them: no diagnosis may cost it
            problem = f"{type(error).__name__}: {error}"
    warnings.warn(f"the search for causes failed; the result is complete without it: {problem}", stacklevel=2)
    return replace(record, causes_problem=problem)


def _beginning(batch: Batch) -> Batch:
    return rows_at(batch, range(min(_ROWS, len(next(iter(batch.values()))))))


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
    prices: Prices | None = None,
) -> None:
    """Let groups fall back to float until the score is at most ``max_drop`` worse; reuse scores of a resume file."""
    timer, scores = context.timer, context.resume.scores
    with timer("search what goes back to float"):
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
            prices=prices,
            cache=scores.folder,
            tell=_Tries(timer.tell, max_drop),
        )
        timer.tell(f"{text.counted(len(chosen.groups), 'group')} put back to float, {fallback_reason(chosen)}")


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
