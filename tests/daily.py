"""Which cases of a parametrized test run each time, and which at night alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def some_daily(cases: Sequence[Any], count: int) -> list[Any]:
    """The first cases of ``pytest.mark.parametrize``, and the others for the night: each is one more of a kind."""
    rest = [case if isinstance(case, tuple) else (case,) for case in cases[count:]]
    return [*cases[:count], *(pytest.param(*case, marks=pytest.mark.nightly) for case in rest)]
