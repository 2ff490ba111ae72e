"""The choice of one share of smoothing and one estimate of ranges for the whole model, by the error of its output.

The kept batches are in two halves. On one the settings are compared: the first estimate with some of the shares, then
from the best setting on the other estimates and the shares beside, until none is better. The two cannot be chosen one
after the other: a clipped range is often worse without smoothing and better with it. On the other half the winner must
not be worse than the first estimate with the first share, which are used otherwise.

The choice to leave attention in float where rounding it costs more than everything else together.

The weights of a softmax over many tokens are small, and one of them near 1 sets the range of all: of a few hundred
tokens most then round to 0. No range mends that, and no factor can be moved elsewhere.
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
from quantizer.utils.progress import loop

_TOLERANCE_DB = 0.5
"""An earlier setting is preferred if its error is at most this much larger: it clips less of other data."""

logger = logging.getLogger(__name__)


class Setting(NamedTuple):
    """A share of smoothing (None: none) and the place of an estimate."""

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
        """Use a setting, and return the plan with it."""
        if self._smoothing is not None:
            self._smoothing.take(setting.share)
        if len(self._estimates) > 1:
            estimate = self._estimates[setting.estimate]
            for group, dtype in self._formats(setting.share).items():
                group.chosen = (self._estimated(group, dtype, setting.estimate), estimate.label)
        return self._work.plan()

    def _formats(self, share: float | None) -> dict[RangeGroup, str]:
        """Return the range groups with a scale, and their formats: with one share they are those of any estimate."""
        if share not in self._groups:
            self._groups[share] = _formats(self._work.plan(), self._work.observed)
        return self._groups[share]

    def _estimated(self, group: RangeGroup, dtype: str, place: int) -> float:
        """Return the amax of a group by the estimate at a place, computed once: several shares have the same group."""
        key = group, dtype, place
        if key not in self._amax:
            self._amax[key] = self._estimates[place].amax(group.calibrator, dtype)
        return self._amax[key]

    def measure(self, setting: Setting) -> None:
        """Compute the error with a setting on the first half, or so much of it that it cannot be the best."""
        self.errors[setting] = self._work.error.of_all_ranks(self.take(setting), self._halves[0], self._limit())

    def _limit(self) -> float:
        return min(self.errors.values(), default=math.inf) * 10 ** (_TOLERANCE_DB / 10)

    def best(self) -> Setting:
        """Return the setting with the least error, or one about as good, of an earlier estimate or a weaker share."""
        limit = self._limit()
        return min(
            (setting for setting, error in self.errors.items() if error <= limit),
            key=lambda setting: (setting.estimate, setting.share or 0.0),
        )

    def is_worse(self, setting: Setting, than: Setting) -> bool:
        """Return whether a setting has a larger error than another on the second half."""
        other = self._work.error.of_all_ranks(self.take(than), self._halves[1])
        return self._work.error.of_all_ranks(self.take(setting), self._halves[1], other) > other


def _is_wanted(settings: Settings) -> bool:
    return len(settings.estimates) > 1 or settings.smoothquant_alpha is not None


def _needs_batches(settings: Settings) -> bool:
    several = settings.calibrator == "percentile" and len(settings.percentiles) > 1
    return several or isinstance(settings.smoothquant_alpha, float)


def choose_ranges(plan: Plan, work: Work) -> Plan:
    """Choose the ranges and the migration of outliers of the whole model, and whether attention is not quantized."""
    settings, smoothing = work.settings, None
    shares: tuple[float | None, ...] = (None,)
    if settings.smoothquant_alpha is not None:
        shares = (None, *ALPHAS) if isinstance(settings.smoothquant_alpha, str) else (settings.smoothquant_alpha,)
        smoothing = Smoothing(work, plan, [share for share in shares if share is not None])
    estimates = settings.estimates if _has_static_range(plan) else settings.estimates[:1]
    if len(shares) > 1 or len(estimates) > 1:
        chosen = choose(work, smoothing, shares, estimates)
        # The small numbers of a softmax want ranges that clip what others need.
        if settings.calibrator == "output" and leave_costly_attention(work, searched=True):
            choose(work, smoothing, shares, estimates, start=chosen)
    elif smoothing is not None:
        smoothing.take(shares[0])
        leave_costly_attention(work, searched=False)
    return work.plan()


def _has_static_range(plan: Plan) -> bool:
    """Return whether a range of calibration is used for any activation."""
    operands = (operand for entry in plan.values() for operand in entry.operands)
    return any(operand.role == "activation" and operand.scale is not None for operand in operands)


def choose(
    work: Work,
    smoothing: Smoothing | None,
    shares: Sequence[float | None],
    estimates: Sequence[Estimate],
    *,
    start: Setting | None = None,
) -> Setting:
    """Choose a share of smoothing and an estimate, use them for all records, and return them."""
    search = _Search(work, smoothing, estimates)
    plain = Setting(shares[0], 0)
    if work.kept.everywhere < 2:
        logger.warning(
            "ranges are not chosen by the output of the model, as there is no second batch of calibration data to "
            "check the choice on: %s is used; calibrate with two batches or more",
            _text(plain, estimates),
        )
        chosen = plain
    else:
        chosen = _found(search, shares, estimates, start)
        if chosen != plain and search.is_worse(chosen, than=plain):
            told = _text(chosen, estimates), _text(plain, estimates)
            logger.info("%s is worse on other batches than %s, which is used", *told)
            chosen = plain
    search.take(chosen)
    if smoothing is not None and chosen.share is None:
        smoothing.leave("the output of the model comes out best without")
    return chosen


def _found(
    search: _Search, shares: Sequence[float | None], estimates: Sequence[Estimate], start: Setting | None
) -> Setting:
    """Return the best setting that a search comes to, a step in share or estimate at a time.

    Without a start it begins with the first estimate and some of the shares.
    """
    some = shares[:: max(1, len(shares) // 2)] if len(estimates) > 1 else shares
    todo = [Setting(share, 0) for share in some] if start is None else [start]
    with loop("choosing ranges by the output", unit="setting") as progress:
        while todo:
            total = progress.done + len(todo)
            for setting in todo:
                search.measure(setting)
                progress.reach(progress.done + 1, total)
            least = min(search.errors, key=lambda setting: search.errors[setting])
            place = shares.index(least.share)
            beside = [
                *(Setting(least.share, estimate) for estimate in range(len(estimates))),
                *(Setting(share, least.estimate) for share in shares[max(0, place - 1) : place + 2]),
            ]
            todo = [setting for setting in beside if setting not in search.errors]
    return search.best()


def _formats(plan: Plan, observation: Seen) -> dict[RangeGroup, str]:
    """Return the range groups of all activations with a scale, and the format in which each is judged."""
    found: dict[RangeGroup, str] = {}
    for path, entry in plan.items():
        for operand in entry.operands:
            group = observation.records[path].operands[operand.name].range
            if group is not None and operand.scale is not None:
                for each in group.ranges:
                    found.setdefault(each, judged_as(qtype(operand.dtype)).name)
    return found


def _text(setting: Setting, estimates: Sequence[Estimate]) -> str:
    share = "no smoothing" if setting.share is None else f"SmoothQuant {setting.share:g}"
    return f"{estimates[setting.estimate].label} with {share}"


_GAIN_DB = 1.0
"""The gain in the output's SQNR from which on attention is not quantized, after a search.

docs/design/calibration.md shows the measurement behind both figures.
"""

_GAIN_UNSEARCHED_DB = 6.0
"""The same where nothing was searched: with ranges as they come, a smaller gain is often none on other samples."""


def leave_costly_attention(work: Work, *, searched: bool) -> bool:
    """Set ``left`` of the products of all attentions if the output gains much where these are in float.

    Return whether they were set.
    """
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
    few = work.kept.few()
    rounded = work.error.of_all_ranks(plan, few)
    for path in products:
        observation.records[path].left = ReasonCode.COSTLY_ATTENTION.text(cost="?")
    left = work.error.of_all_ranks(work.plan(), few)
    cost = 10 * math.log10(rounded / left) if rounded and left else 0.0
    is_costly = cost >= (_GAIN_DB if searched else _GAIN_UNSEARCHED_DB)
    for path in products:
        observation.records[path].left = ReasonCode.COSTLY_ATTENTION.text(cost=f"{cost:.1f}") if is_costly else None
    return is_costly


ALGORITHM = Algorithm(
    wanted=_is_wanted,
    run=choose_ranges,
    channels=lambda settings: () if settings.smoothquant_alpha is None else ("linear",),
    needs_batches=_needs_batches,
)
