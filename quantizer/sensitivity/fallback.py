"""Choosing the groups that go back to float."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantizer.errors import SensitivityError
from quantizer.sensitivity.measure import GroupError

__all__ = ["Fallback", "choose"]

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Fallback:
    """The groups put back, most sensitive first, and how they were chosen."""

    groups: tuple[str, ...]
    asked: str

    def reasons(self) -> dict[str, str]:
        """Why each group is float, by group."""
        return {group: f"put back by fallback({self.asked}): rank {rank}" for rank, group in enumerate(self.groups, 1)}


def choose(ranking: Sequence[GroupError], *, num: int | None = None, ratio: float | None = None) -> Fallback:
    """The ``num`` most sensitive groups, or the ``ratio`` of all groups (rounded up).

    Raises:
        SensitivityError: not exactly one of the two was given, or it is out of bounds.
    """
    if (num is None) == (ratio is None):
        raise SensitivityError(f"fallback() takes num or ratio, one of the two; got num={num}, ratio={ratio}")
    if ratio is not None:
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
            raise SensitivityError(f"ratio={ratio!r}: expected a share between 0 and 1")
        # 0.07 * 100 is a little more than 7.
        count, asked = math.ceil(ratio * len(ranking) - _ROUNDING), f"ratio={ratio:g}"
    else:
        assert num is not None
        if isinstance(num, bool) or not isinstance(num, int) or num < 0:
            raise SensitivityError(f"num={num!r}: expected a whole number of groups, 0 or more")
        if num > len(ranking):
            raise SensitivityError(f"num={num}: there are only {len(ranking)} quantized groups to put back")
        count, asked = num, f"num={num}"
    return Fallback(groups=tuple(entry.group for entry in ranking[:count]), asked=asked)
