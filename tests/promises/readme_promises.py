"""The sentences of the README and of the pages behind it that promise something, and the tests that hold them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from helpers import user_pages

TESTS = Path(__file__).parents[1]
README = user_pages()
"""The README, and the pages that it leads users to."""

PROMISING = re.compile(
    r"\b(never|bit for bit|complete or absent|refuse[sd]?|keeps?|kept|stays?|says (so|which)|stops|goes on|undoes"
    r"|not (written|read|changed)|is written|fails|left out|needs? no(ne|thing)?|lists every|of its own"
    r"|(computes|gives|gets) the (same|plan)|one calibration|at most|is warned|warns)\b",
    flags=re.IGNORECASE,
)
"""Words with which a sentence commits this package to something that a user could find broken."""


def plain(text: str) -> str:
    """The text with single blanks."""
    return " ".join(text.split())


def promising_sentences(text: str = README) -> list[str]:
    """The sentences of the prose, and the comments of its code, with one of the promising words."""
    found = []
    for block in re.split(r"^(```.*?^```)$", text, flags=re.MULTILINE | re.DOTALL):
        if block.startswith("```"):
            found += [plain(comment) for comment in re.findall(r"(?<!\S)# (.*)$", block, flags=re.MULTILINE)]
        else:
            parts = re.split(r"\n\s*\n|\n(?=- )|\n(?=\|)|\n(?=#)", block)
            found += [sentence for part in parts for sentence in re.split(r"(?<=[.?!]) (?=[A-Z`\[])", plain(part))]
    return [sentence for sentence in found if PROMISING.search(sentence)]


def marked_promises() -> dict[str, list[str]]:
    """The quotations of ``pytest.mark.promise`` in all tests, with the tests that carry them."""
    found: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if "pytest.mark.promise" not in text:
            # A second of parsing less for each process that collects the tests.
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                    quotation = plain(ast.literal_eval(mark.args[0]))
                    found.setdefault(quotation, []).append(f"{file.relative_to(TESTS)}::{node.name}")
    return found
