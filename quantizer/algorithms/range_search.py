"""Choose one SmoothQuant alpha and one calibrator for the whole model, by the error of its output.

The stored batches are split in halves. On the first half, the search compares the default calibrator with some alphas.
It then varies the calibrator, and alpha by one step, until no neighbor of the best setting is better. Both are searched
together, because a clipped range is often worse without SmoothQuant and better with it. If attention then stays in
float, the calibrators are compared again with the chosen alpha. On the second half, the result must not be worse than
the default setting.

``leave_costly_attention`` keeps attention in float if quantizing it costs much of the output's SQNR. Softmax outputs
over many tokens are small, and a single one near 1 sets the range, so most of them would round to 0.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

from quantizer.algorithms.algorithm import Algorithm, Work
from quantizer.algorithms.settings import Settings
from quantizer.algorithms.smoothquant import ALPHAS, Smoothing
from quantizer.numerics.formats import qtype
from quantizer.observe.calibrators import Estimate
from quantizer.observe.range_group import RangeGroup
from quantizer.observe.statistics import Seen
from quantizer.plan.decide_operands import judged_as
from quantizer.plan.reasons import ReasonCode
from quantizer.plan.site_plan import Plan
from quantizer.utils.progress import counted, loop

_TOLERANCE_DB = 0.5
"""An earlier setting is preferred if its error is at most this much larger, because it clips other data less."""

_CHOOSING = "choosing ranges by the output"
"""The name of the search in progress lines."""

logger = logging.getLogger(__name__)


class Setting(NamedTuple):
    """A SmoothQuant alpha (None: no smoothing) and the index of a calibrator."""

    share: float | None
    estimate: int


class _Search:
    """The settings of one calibration, and the errors of the model's output with them."""

    def __init__(self, work: Work, smoothing: Smoothing | None, estimates: Sequence[Estimate]) -> None:
        self._work = work
        self._smoothing = smoothing
        self._estimates = estimates
        self._halves = work.kept.few().halves()
        self._groups: dict[float | None, dict[RangeGroup, str]] = {}
        self._amax: dict[tuple[RangeGroup, str, int], float] = {}
        self.errors: dict[Setting, float] = {}

    def take(self, setting: Setting) -> Plan:
        if self._smoothing is not None:
            self._smoothing.take(setting.share)
        if len(self._estimates) > 1:
            estimate = self._estimates[setting.estimate]
            for group, dtype in self._formats(setting.share).items():
                group.chosen = (self._estimated(group, dtype, setting.estimate), estimate.label)
        return self._work.plan()

    def _formats(self, share: float | None) -> dict[RangeGroup, str]:
        """Return the range groups with a scale and their formats, which depend on alpha only."""
        if share not in self._groups:
            self._groups[share] = _formats(self._work.plan(), self._work.observed)
        return self._groups[share]

    def _estimated(self, group: RangeGroup, dtype: str, place: int) -> float:
        """Return the amax of a group by estimate ``place``, cached because several alphas share groups."""
        key = group, dtype, place
        if key not in self._amax:
            self._amax[key] = self._estimates[place].amax(group.calibrator, dtype)
        return self._amax[key]

    def measure(self, setting: Setting) -> None:
        """Compute the error with a setting on the first half, until it exceeds the best one clearly."""
        self.errors[setting] = self._work.error.of_all_ranks(self.take(setting), self._halves[0], self._limit())

    def _limit(self) -> float:
        return min(self.errors.values(), default=math.inf) * 10 ** (_TOLERANCE_DB / 10)

    def best_of(self, settings: Sequence[Setting]) -> Setting:
        """Measure settings, and return the best one."""
        with counted([*dict.fromkeys(settings)], _CHOOSING, unit="setting") as steps:
            for setting in steps:
                self.measure(setting)
        return self.best()

    def best(self) -> Setting:
        """Return the setting with the least error, or a similar one with an earlier calibrator or smaller alpha."""
        limit = self._limit()
        return min(
            (setting for setting, error in self.errors.items() if error <= limit),
            key=lambda setting: (setting.estimate, setting.share or 0.0),
        )

    def is_worse(self, setting: Setting, than: Setting) -> bool:
        """Return whether a setting has a larger error than another on the second half."""
        other = self._work.error.of_all_ranks(self.take(than), self._halves[1])
        return self._work.error.of_all_ranks(self.take(setting), self._halves[1], other) > other


def _is_requested(settings: Settings) -> bool:
    return len(settings.estimates) > 1 or settings.smoothquant_alpha is not None


def _needs_batches(settings: Settings) -> bool:
    several_percentiles = settings.calibrator == "percentile" and len(settings.percentiles) > 1
    return several_percentiles or isinstance(settings.smoothquant_alpha, float)


def choose_ranges(plan: Plan, work: Work) -> Plan:
    """Choose ranges and SmoothQuant factors of the whole model, and whether attention is quantized."""
    settings, smoothing = work.settings, None
    shares: tuple[float | None, ...] = (None,)
    if settings.smoothquant_alpha is not None:
        shares = (None, *ALPHAS) if isinstance(settings.smoothquant_alpha, str) else (settings.smoothquant_alpha,)
        smoothing = Smoothing(work, plan, [share for share in shares if share is not None])
    estimates = settings.estimates if _has_static_range(plan) else settings.estimates[:1]
    if len(shares) > 1 or len(estimates) > 1:
        choose(work, smoothing, shares, estimates)
    elif smoothing is not None:
        smoothing.take(shares[0])
        leave_costly_attention(work, searched=False)
    return work.plan()


def _has_static_range(plan: Plan) -> bool:
    operands = (operand for entry in plan.values() for operand in entry.operands)
    return any(operand.role == "activation" and operand.scale is not None for operand in operands)


def choose(
    work: Work, smoothing: Smoothing | None, shares: Sequence[float | None], estimates: Sequence[Estimate]
) -> None:
    """Choose a SmoothQuant alpha and a calibrator, and whether attention is quantized; apply them to all records."""
    search = _Search(work, smoothing, estimates)
    plain = Setting(shares[0], 0)
    if work.kept.everywhere < 2:
        logger.warning(
            "ranges are not chosen by the model's output, because there is no second calibration batch to check the "
            "choice; %s is used; calibrate with two or more batches",
            _text(plain, estimates),
        )
        chosen = plain
    else:
        chosen = _best_setting(search, shares, estimates)
        search.take(chosen)
        if work.settings.calibrator == "output" and leave_costly_attention(work, searched=True):
            # The small values of a softmax favor ranges that clip values which other operands need.
            search = _Search(work, smoothing, estimates)
            chosen = search.best_of([chosen, *(Setting(chosen.share, estimate) for estimate in range(len(estimates)))])
        if chosen != plain and search.is_worse(chosen, than=plain):
            texts = _text(chosen, estimates), _text(plain, estimates)
            logger.info("%s is worse on other batches than %s, which is used", *texts)
            chosen = plain
    search.take(chosen)
    if smoothing is not None and chosen.share is None:
        smoothing.leave("the error of the model's output is smallest without")


def _best_setting(search: _Search, shares: Sequence[float | None], estimates: Sequence[Estimate]) -> Setting:
    """Return the best setting of a search that changes alpha or calibrator one step at a time.

    It begins with the first calibrator and some alphas.
    """
    first_shares = shares[:: max(1, len(shares) // 2)] if len(estimates) > 1 else shares
    todo = [Setting(share, 0) for share in first_shares]
    with loop(_CHOOSING, unit="setting") as progress:
        while todo:
            total = progress.done + len(todo)
            for setting in todo:
                search.measure(setting)
                progress.reach(progress.done + 1, total)
            least = min(search.errors, key=lambda setting: search.errors[setting])
            place = shares.index(least.share)
            neighbors = [
                *(Setting(least.share, estimate) for estimate in range(len(estimates))),
                *(Setting(share, least.estimate) for share in shares[max(0, place - 1) : place + 2]),
            ]
            todo = [setting for setting in neighbors if setting not in search.errors]
    return search.best()


def _formats(plan: Plan, observation: Seen) -> dict[RangeGroup, str]:
    formats: dict[RangeGroup, str] = {}
    for path, entry in plan.items():
        for operand in entry.operands:
            group = observation.records[path].operands[operand.name].range
            if group is not None and operand.scale is not None:
                for each in group.ranges:
                    formats.setdefault(each, judged_as(qtype(operand.dtype)).name)
    return formats


def _text(setting: Setting, estimates: Sequence[Estimate]) -> str:
    share = "no SmoothQuant" if setting.share is None else f"SmoothQuant {setting.share:g}"
    return f"{estimates[setting.estimate].label} with {share}"


_GAIN_DB, _GAIN_OF_SHARE_DB = 1.0, 20.0
"""The gain in SQNR of the output from which attention is not quantized, after a search: the second figure times the
share of attention in all multiply-adds, and at most the first. What is a small part of the work saves little time.

See docs/design/calibration.md for the measurement of these figures.
"""

_GAIN_UNSEARCHED_DB = 6.0
"""The same without a search: a smaller gain often vanishes on other samples."""


def leave_costly_attention(work: Work, *, searched: bool) -> bool:
    """Keep attention in float (``left``) if the output gains much from it; return whether it does."""
    plan, observation = work.plan(), work.observed
    groups = {
        operand.group
        for path, entry in plan.items()
        for operand in entry.operands
        if entry.quantized and entry.kind == "matmul" and observation.records[path].operands[operand.name].softmax
    }
    products = [path for path, entry in plan.items() if any(operand.group in groups for operand in entry.operands)]
    if not products or work.kept.everywhere < 2:
        return False
    batches = work.kept.few()
    rounded = work.error.of_all_ranks(plan, batches)
    for path in products:
        observation.records[path].left = ReasonCode.COSTLY_ATTENTION.text(cost="?")
    unquantized = work.error.of_all_ranks(work.plan(), batches)
    cost = 10 * math.log10(rounded / unquantized) if rounded and unquantized else 0.0
    multiply_adds = {path: entry.multiply_adds for path, entry in plan.items()}
    share = sum(multiply_adds[path] for path in products) / max(1, sum(multiply_adds.values()))
    is_costly = cost >= (min(_GAIN_DB, _GAIN_OF_SHARE_DB * share) if searched else _GAIN_UNSEARCHED_DB)
    for path in products:
        observation.records[path].left = ReasonCode.COSTLY_ATTENTION.text(cost=f"{cost:.1f}") if is_costly else None
    return is_costly


ALGORITHM = Algorithm(
    wanted=_is_requested,
    run=choose_ranges,
    channels=lambda settings: () if settings.smoothquant_alpha is None else ("linear",),
    needs_batches=_needs_batches,
)
