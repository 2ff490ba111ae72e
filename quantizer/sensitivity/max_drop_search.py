"""A search for the smallest fallback whose score is at most ``max_drop`` worse than the float model's.

The groups come ranked by a cheap measure; here the metric decides. Bisection finds how many of the first groups must be
float. Then groups are quantized again while the score allows it, lowest error per cost first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from quantizer.common.progress import loop
from quantizer.common.records import GroupSensitivity
from quantizer.errors import SensitivityError
from quantizer.sensitivity.fallback import Evaluation, Fallback, fallback_of

Candidate = tuple[GroupSensitivity, float]

Tell = Callable[[Evaluation], object]
"""A function that is told each score of a search, with the groups that were float."""


def search(
    candidates: Sequence[Candidate],
    float_score: float,
    score: Callable[[tuple[str, ...]], float],
    *,
    max_drop: float,
    higher_is_better: bool,
    max_evaluations: int,
    tell: Tell | None = None,
) -> Fallback:
    """Return the smallest fallback that it finds within ``max_drop``; if it finds none, that with the smallest drop.

    The float model itself has a drop of 0, so a budget of 0 or more is met; one below 0 may not be.
    """
    _check(max_drop, max_evaluations, len(candidates))
    sign = 1 if higher_is_better else -1
    found: list[Evaluation] = []
    known: dict[tuple[str, ...], bool] = {}

    # Most searches end long before the largest number of scores: a bar towards it would not tell when.
    with loop("search", unit="score", done=1) as progress:

        def meets(kept: Sequence[Candidate]) -> bool:
            groups = tuple(part for entry, _ in kept for part in entry.parts)
            if groups not in known:
                value = score(groups)
                drop = sign * (float_score - value)
                found.append(Evaluation(groups=groups, score=value, drop=drop, cost=sum(cost for _, cost in kept)))
                known[groups] = drop <= max_drop
                progress.step()
                if tell is not None:
                    tell(found[-1])
            return known[groups]

        needed = _prefix(candidates, meets)
        kept = _without_needless(list(candidates[:needed]), meets, lambda: max_evaluations - 1 - len(found))
    if max_drop < 0 and not any(known.values()):
        best = min(found, key=lambda entry: (entry.drop, entry.cost))
        # Otherwise all are kept: that is the float model, which drops by 0.
        if best.drop <= 0:
            kept = [candidate for candidate in candidates if set(candidate[0].parts) <= set(best.groups)]
    record = fallback_of(sorted((entry for entry, _ in kept), key=lambda entry: entry.rank), f"max_drop={max_drop:g}")
    return replace(record, evaluations=tuple(found), float_score=float_score, max_drop=float(max_drop))


def _check(max_drop: float, max_evaluations: int, groups: int) -> None:
    if isinstance(max_drop, bool) or not isinstance(max_drop, int | float) or not math.isfinite(max_drop):
        raise SensitivityError(f"max_drop={max_drop!r}: expected a number")
    least = 2 + math.ceil(math.log2(groups + 1))
    if isinstance(max_evaluations, bool) or not isinstance(max_evaluations, int) or max_evaluations < least:
        raise SensitivityError(
            f"max_evaluations={max_evaluations!r}: bisecting {groups} groups takes up to {least} evaluations; expected "
            f"{least} or more"
        )


def _prefix(candidates: Sequence[Candidate], meets: Callable[[Sequence[Candidate]], bool]) -> int:
    """Return how many of the first groups must be float with all others quantized, by bisection."""
    if meets(candidates[:0]):
        return 0
    # With all groups float it is the float model, whose score is known.
    too_few, enough = 0, len(candidates)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if meets(candidates[:middle]):
            enough = middle
        else:
            too_few = middle
    return enough


def _without_needless(
    kept: list[Candidate], meets: Callable[[Sequence[Candidate]], bool], left: Callable[[], int]
) -> list[Candidate]:
    """Return the groups that must stay float: remove half of them at a time, and halves of a half that is needed.

    The last half comes first, since it has the lowest error per cost. All of it is repeated after a removal, since
    a score need not improve with more float groups.
    """
    before = -1
    while len(kept) != before:
        before = len(kept)
        waiting = _halves(kept)
        while waiting and left() > 0:
            part = waiting.pop()
            fewer = [candidate for candidate in kept if candidate not in part]
            if fewer and meets(fewer):
                kept = fewer
            elif len(part) > 1:
                waiting += _halves(part)
    return kept


def _halves(part: list[Candidate]) -> list[list[Candidate]]:
    middle = (len(part) + 1) // 2
    return [half for half in (part[:middle], part[middle:]) if half]
