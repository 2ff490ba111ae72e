"""Cases of inputs, outputs, sizes and types, and of what a forward refers to, in engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from outsiders.case import Case
from outsiders.pairs import TOPICS, all_cases, check_pair, pairs


@pytest.mark.parametrize(("case", "backend"), pairs("calls"))
def test_case(case: Case, backend: str, tmp_path: Path) -> None:
    check_pair(case, backend, tmp_path)


def test_the_corpus_is_large_and_each_topic_is_in_a_file() -> None:
    names = [name for name, _ in all_cases()]
    assert len(names) >= 120
    assert sorted({name.partition("-")[0] for name in names}) == sorted(sum(TOPICS.values(), ()))
