"""Cases of single operators and of layers in a row, in engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from outsiders.case import Case
from outsiders.pairs import check_pair, pairs


@pytest.mark.parametrize(("case", "backend"), pairs("operators"))
def test_case(case: Case, backend: str, tmp_path: Path) -> None:
    check_pair(case, backend, tmp_path)
