"""``docs/check.md`` lists the rules that there are, with the severities that they have."""

from __future__ import annotations

from pathlib import Path

import pytest

import quantizer.check
from quantizer.check.checked_file import rules
from quantizer.plan.targets import profile

PAGE = (Path(__file__).parents[2] / "docs" / "check.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].strip("`"): cells
    for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines())
    if len(cells) == 6 and cells[0].startswith("`")
}

assert quantizer.check.__all__  # importing it registers the rules


@pytest.mark.parametrize("name", rules.names())
def test_a_rule_is_explained(name: str) -> None:
    _, holds, why, *severities = ROWS[name]
    assert holds == (rules[name].__doc__ or "").splitlines()[0]
    assert why
    targets = ("tensorrt", "openvino", "onnxruntime")
    assert severities == [profile(target).graph_rules.severities.get(name, "-") for target in targets]


def test_no_other_rule_is_listed() -> None:
    assert set(ROWS) == set(rules.names())
