"""Every case of the corpus in every engine: a third of the pairs each time, all of them at night."""

from __future__ import annotations

import importlib
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from outsiders.case import Case, check

_HERE = Path(__file__).parent


def all_cases() -> Iterator[tuple[str, Case]]:
    """Every case by its file and name."""
    for file in sorted(_HERE.glob("*.py")):
        if file.stem not in ("__init__", "__main__", "case") and not file.stem.startswith("test_"):
            module = importlib.import_module(f"outsiders.{file.stem}")
            yield from ((f"{file.stem}-{name}", case) for name, case in module.CASES.items())


def _pairs() -> Iterator[object]:
    for name, case in all_cases():
        for place, backend in enumerate(case.backends):
            # By the name, so that a new case moves no other one into the night.
            daily = (zlib.crc32(name.encode()) + place) % 3 == 0
            marks = [] if daily else [pytest.mark.nightly]
            if backend in case.faults:
                marks.append(pytest.mark.xfail(strict=True, reason=case.faults[backend]))
            yield pytest.param(case, backend, id=f"{name}-{backend}", marks=marks)


@pytest.mark.parametrize(("case", "backend"), list(_pairs()))
def test_case(case: Case, backend: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd models make libraries warn; the figures are what counts
        check(case, backend, tmp_path)


def test_the_corpus_is_large() -> None:
    assert len(list(all_cases())) >= 120
