"""Reasons and rules: a sentence is read back as the code and the fields that it was made of."""

from __future__ import annotations

import ast
from pathlib import Path
from string import Formatter

import pytest

import quantizer
from quantizer.plan.reasons import ReasonCode, RuleKind

CODES: list[ReasonCode | RuleKind] = [*ReasonCode, *RuleKind]
SAMPLES = {
    "why": "kept in float by fallback(num=2): rank 1",
    "sizes": "16, 32, 64",
    "text": "lhs: of no template",
}
PACKAGE = Path(quantizer.__file__).parent


@pytest.mark.parametrize("code", CODES, ids=str)
def test_a_sentence_is_read_back(code: ReasonCode | RuleKind) -> None:
    names = [name for _, name, _, _ in Formatter().parse(code.value) if name is not None]
    fields = {name: SAMPLES.get(name, f"{name}.1") for name in names}
    text = code.text(**fields)
    found, values = type(code).read(text)
    assert (found, values) == (code, fields)
    assert found.text(**values) == text
    assert type(code).of(text) is code


def test_no_two_codes_have_one_template() -> None:
    assert len(ReasonCode) == len(ReasonCode.__members__)
    assert len(RuleKind) == len(RuleKind.__members__)


@pytest.mark.parametrize("text", ["", "int8: lhs; rhs not: SQNR in int8 is 3.0 dB, below the limit of 33 dB", "a\nb"])
def test_what_no_template_makes_is_kept(text: str) -> None:
    assert ReasonCode.read(text) == (ReasonCode.OTHER, {"text": text})
    assert RuleKind.read(text) == (RuleKind.OTHER, {"text": text})


def test_a_reason_within_a_reason_is_read_too() -> None:
    inner = ReasonCode.SQNR.text(dtype="int8", sqnr="12.3", limit="30")
    outer = ReasonCode.ONE_SIDED_ADD.text(skipping="lhs", why=inner, target="tensorrt")
    code, fields = ReasonCode.read(outer)
    assert (code, ReasonCode.of(fields["why"])) == (ReasonCode.ONE_SIDED_ADD, ReasonCode.SQNR)


def _parses(node: ast.AST) -> bool:
    """Whether a reason or a rule is compared with text, or a method of text is called on it."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(map(_says_why, sides)) and any(_is_text(side) for side in sides)
    methods = {"startswith", "endswith", "removeprefix", "partition", "split", "find"}
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in methods and _says_why(called.value)


def _says_why(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
    return name in ("reason", "rule")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


@pytest.mark.parametrize("code", ["a.reason == 'never ran'", "rule.startswith('target ')", "'sites' in row.rule"])
def test_parsing_is_recognised(code: str) -> None:
    assert any(map(_parses, ast.walk(ast.parse(code))))


def test_no_other_module_parses_a_reason() -> None:
    # Engines have reasons of their own, which no coverage shows.
    others = ("engines", "reasons.py")
    files = [file for file in PACKAGE.rglob("*.py") if file.relative_to(PACKAGE).parts[0] not in others]
    trees = {file: ast.walk(ast.parse(file.read_text(encoding="utf-8"))) for file in files}
    found = [
        f"{file.name}:{getattr(node, 'lineno', 0)}" for file, nodes in trees.items() for node in nodes if _parses(node)
    ]
    assert not found
