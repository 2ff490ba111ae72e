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

TOPICS = {
    "operators": ("activations", "convolutions", "layers_in_a_row"),
    "models": ("attention", "expanded_weights", "recurrent", "shared_modules"),
    "calls": ("graphs_of_engines", "inputs", "outputs", "references", "sizes", "types"),
}
"""The topics of each file of tests: processes of pytest-xdist run a file each, so that none may take minutes."""


def all_cases() -> Iterator[tuple[str, Case]]:
    """Every case by its file and name."""
    for file in sorted(_HERE.glob("*.py")):
        if file.stem not in ("__init__", "__main__", "case", "pairs") and not file.stem.startswith("test_"):
            module = importlib.import_module(f"outsiders.{file.stem}")
            yield from ((f"{file.stem}-{name}", case) for name, case in module.CASES.items())


def pairs(tests: str) -> list[object]:
    """Return the cases of the topics of a file of tests, each with every backend, as parameters of pytest."""
    found = []
    for name, case in all_cases():
        if name.partition("-")[0] not in TOPICS[tests]:
            continue
        for place, backend in enumerate(case.backends):
            # By the name, so that a new case moves no other one into the night.
            daily = (zlib.crc32(name.encode()) + place) % 3 == 0
            marks = [] if daily else [pytest.mark.nightly]
            if backend in case.faults:
                marks.append(pytest.mark.xfail(strict=True, reason=case.faults[backend]))
            found.append(pytest.param(case, backend, id=f"{name}-{backend}", marks=marks))
    return found


def check_pair(case: Case, backend: str, folder: Path) -> None:
    """Hold a case to its figures in an engine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd models make libraries warn; the figures are what counts
        check(case, backend, folder)
