"""Cases of attention, of recurrent layers, and of weights and modules that are used twice, in engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from outsiders.case import Case
from outsiders.pairs import check_pair, pairs


@pytest.mark.parametrize(("case", "backend"), pairs("models"))
def test_case(case: Case, backend: str, tmp_path: Path) -> None:
    check_pair(case, backend, tmp_path)
