"""The glossary: one list for the page of docs/, the report and the errors of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_samples import sample_record

from quantizer.cli.output import print_error
from quantizer.errors import QuantizerError
from quantizer.report.page import GLOSSARY, glossary_page, words_in

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date_and_linked() -> None:
    page = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    assert page == glossary_page(), "run  python -m quantizer.report.page > docs/glossary.md"
    for name in ("README.md", "docs/index.md", "mkdocs.yml"):
        assert "glossary.md" in (ROOT / name).read_text(encoding="utf-8"), name


def test_words_that_the_reports_use_are_there() -> None:
    assert set(GLOSSARY) >= {"site", "proxy", "coverage", "precision group", "operand", "amax", "fallback", "SQNR"}
    assert len(GLOSSARY) <= 15
    assert list(GLOSSARY) == sorted(GLOSSARY, key=str.lower)
    for term, sentence in GLOSSARY.items():
        assert sentence[0].isupper(), term
        assert sentence.endswith("."), term


def test_the_report_has_the_words_without_the_network() -> None:
    pytest.importorskip("jinja2", reason="needs enginequant[report]")
    from quantizer.report import html_from_record

    page = html_from_record(sample_record())
    section = page.split('<section id="words">')[1].split("</section>")[0]
    for term in GLOSSARY:
        assert f"<dt>{term}</dt>" in section
    assert 'href="#words"' in page
    assert "http" not in section


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("no site is called that", ["site"]),
        ("12 sites and an operand differ", ["operand", "site"]),
        ("a frozen proxy", ["frozen", "proxy"]),
        ("quantizer.sites.residual_add: expected auto", []),
        ("unknown operand 'site'", ["operand"]),
        ("the website is a composite", []),
        ("--proxy is no option", []),
        ("cannot write /site/x", []),
        ("there is no engine", []),
    ],
)
def test_unusual_words_of_a_message(message: str, words: list[str]) -> None:
    assert list(words_in(message)) == words


def test_an_error_explains_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(QuantizerError("no site of the frozen proxy has the operand [q]"))
    first, *words = capsys.readouterr().err.splitlines()
    assert first == "error: no site of the frozen proxy has the operand [q]"
    assert words == [f"  ({term}: {GLOSSARY[term]})" for term in ("frozen", "operand")], "two are enough"
    print_error(QuantizerError("no such file"))
    assert capsys.readouterr().err == "error: no such file\n"
