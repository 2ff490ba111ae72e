"""report.html: self-contained, escaped, and clear about what was not measured."""

from __future__ import annotations

import base64
import builtins
import dataclasses
import hashlib
import io
import json
import re
from html.parser import HTMLParser
from operator import itemgetter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from report_samples import bare_record, sample_choice, sample_histogram, sample_latency_fallback, sample_record
from rich.console import Console

from quantizer.errors import MissingDependencyError, QuantizerError
from quantizer.plan.reasons import counted
from quantizer.report import (
    Column,
    Score,
    Table,
    html_from_record,
    print_record,
    print_summary,
    size_entries,
    string_from_table,
    verdict,
    write_html,
    write_record,
)
from quantizer.report.charts.axes import histogram_figure
from quantizer.report.charts.plots import candidates_svg, frontier_svg
from quantizer.report.model_card import write_run_card
from quantizer.report.page import diff_files
from quantizer.report.record import GIVEN_IN_PYTHON
from quantizer.report.tables import choice_table
from quantizer.report.terminal import print_choice
from quantizer.report.text import paired_figure, significant, typeset
from quantizer.utils.records import Diagnosis, Fix, RangeCandidate

EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
VOID = {"meta", "input", "br", "img", "link", "wbr"}


class Page(HTMLParser):
    """Elements in order, with a check that every one is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def count(self, name: str) -> int:
        return sum(tag == name for tag, _ in self.elements)


def evil(value: object) -> object:
    """``value`` with every string in it, at any depth, replaced by one that would run if it were not escaped."""
    if isinstance(value, str):
        return EVIL
    if isinstance(value, dict):
        return {f"{key}{EVIL}": evil(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(evil, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: evil(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value


@pytest.mark.parametrize("make", [sample_record, bare_record], ids=["full", "bare"])
def test_nothing_comes_from_outside(make: object) -> None:
    text = html_from_record(make())  # type: ignore[operator]
    page = Page(text)
    for tag, attributes in page.elements:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert (attributes.get(name) or "#").startswith("#"), f"{tag} {name} leads outside the page"
    assert page.count("link") == 0
    assert not re.search(r"url\(|@import", text)
    assert "default-src 'none'" in text
    assert text.startswith("<!doctype html>")


def test_the_policy_admits_the_script_of_the_page_only() -> None:
    text = html_from_record(sample_record())
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text


def test_every_string_is_escaped() -> None:
    clean = sample_record()
    text = html_from_record(evil(clean))  # type: ignore[arg-type]
    page = Page(text)
    assert (page.count("script"), page.count("img")) == (1, 0)
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_sections_that_were_not_measured_say_so() -> None:
    text = html_from_record(bare_record())
    for sentence in (
        "Not measured: the run has no evaluation samples.",
        "Not measured: the run built no engine.",
        "No engine was built.",
        "Not measured: no sites were recorded.",
        "Not measured: no operand has a range.",
        "No source was rewritten.",
    ):
        assert sentence in text
    assert Page(text).count("table") == 0
    assert text.count('<div class="note">not measured</div>') == 4
    for absent in ("emory", 'href="#sensitivity"', 'id="sensitivity"', "quantizer diagnose"):
        assert absent not in text.partition('<section id="words">')[0]


def test_what_a_run_did_not_do_is_left_out() -> None:
    """What the page shows of a run that did all of it: tests/goldens/recorded/page.json."""
    whole = sample_record()
    assert whole.fallback is not None
    fallback = dataclasses.replace(whole.fallback, evaluations=(), float_score=None, max_drop=None)
    less = {
        "histograms": (),
        "sensitivity": (),
        "measure": None,
        "training": None,
        "choice": None,
        "latency_fallback": None,
        "memory": (),
    }
    text = html_from_record(dataclasses.replace(whole, fallback=fallback, **less))
    for words in ("Histograms", "evaluations", "Training", 'id="choice"', 'id="latency"', "Estimated divergence"):
        assert words in html_from_record(whole)
        assert words not in text.partition("<pre>")[0]
    for words in ("Speed, size and memory", "Peak memory", "peak memory", "<h2>Sensitivity</h2>"):
        assert words in html_from_record(whole)
        assert words not in text
    assert '<section id="sensitivity"><h2>Kept in float</h2>' in text
    assert "Kept in float</h3>" not in text
    assert "1 group, by fallback(max_drop=0.005)" in text
    assert (Page(html_from_record(whole)).count("figure"), Page(text).count("figure")) == (1, 0)


def test_a_histogram_as_a_picture() -> None:
    figure = ElementTree.fromstring(histogram_figure(sample_histogram()))
    words = "".join(figure.itertext())
    assert "100,000 values from -7.900 to 6.200, format int8" in words
    assert "mse, chosen" in words
    assert "amax 3.500, clips 0.00300%, SQNR 24.6 dB" in words
    svg = "{http://www.w3.org/2000/svg}"
    kept, clipped = (path.attrib["d"].split("M")[1:] for path in figure.iter(f"{svg}path"))
    # Bins 0 to 6 begin within the chosen range; empty ones are not drawn.
    assert [bar.split()[0] for bar in kept] == ["0", "1", "2", "3", "4", "6"]
    assert [bar.split()[0] for bar in clipped] == ["9", "12", "15"]
    cuts = [line.attrib["x1"] for line in figure.iter(f"{svg}line") if line.attrib["y1"] == "0"]
    assert cuts == ["98.75%", "81.25%", "43.75%", "18.75%"]


def test_a_histogram_of_zeros() -> None:
    zero = RangeCandidate(name="max", amax=0.0, clipped=0.0, sqnr_db=float("inf"), chosen=True)
    histogram = dataclasses.replace(sample_histogram(), width=1.0, counts=(7,), candidates=(zero,))
    figure = ElementTree.fromstring(histogram_figure(histogram))
    assert "infinite dB" in "".join(figure.itertext())
    kept, clipped = (path.attrib["d"] for path in figure.iter("{http://www.w3.org/2000/svg}path"))
    assert kept
    assert not clipped


def test_write_html(tmp_path: Path) -> None:
    path = write_html(bare_record(), tmp_path / "report.html")
    assert path.read_text(encoding="utf-8") == html_from_record(bare_record())
    with pytest.raises(QuantizerError, match="cannot write"):
        write_html(bare_record(), tmp_path / "no" / "report.html")


@pytest.mark.parametrize("missing", ["jinja2", "markupsafe"])
def test_without_jinja2_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: object, **keywords: object) -> object:
        if name == missing:
            raise ImportError(name)
        return real(name, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingDependencyError, match=r"pip install 'enginequant\[report\]'"):
        html_from_record(sample_record())


def test_diff_is_taken_apart_by_file() -> None:
    files = diff_files(sample_record().diff)
    assert [(file.name, file.added, file.removed) for file in files] == [
        ("<quantizer transformers.models.bert.modeling_bert>", 1, 1),
        ("<quantizer torch.nn.modules.linear>", 1, 1),
    ]
    assert [css for css, _ in files[0].lines] == ["hunk", "same", "del", "add"]
    assert diff_files("") == ()
    assert diff_files("just text")[0].name == "diff"
    comment = "--- a.sql\n+++ b.sql\n@@ -1 +1 @@\n--- a comment that is removed\n+x"
    assert [(file.added, file.removed) for file in diff_files(comment)] == [(1, 1)]


def _table(title: str, rows: list[tuple[object, ...]]) -> Table:
    return Table(title, [Column("name", itemgetter(0)), Column("value", itemgetter(1))], rows)


def test_html_table_escapes_aligns_and_limits() -> None:
    text = _table(EVIL, [(EVIL, 0), ("b", None), ("c", -1.5)]).html(limit=2, caption=True)
    assert "<script" not in text
    assert '<td class="qz-num" data-sort="0.0">0</td>' in text
    assert '<td class="qz-num">–</td>' in text  # noqa: RUF001
    assert "Rows not shown: 1" in text
    assert '<td class="qz-num"' not in _table("", [("flag", True)]).html()


def test_text_table_takes_brackets_as_text() -> None:
    table = _table("[bold]t", [("[red]layer[0]", 1234.5), ("b", None)]).terminal()
    text = string_from_table(table, width=60)
    assert "[red]layer[0]" in text
    assert "[bold]t" in text
    assert "1,234" in text


def test_summary_of_a_run(tmp_path: Path) -> None:
    write_record(sample_record(), tmp_path / "report.json")
    stream = io.StringIO()
    print_summary(tmp_path, Console(file=stream, width=80))
    text = stream.getvalue()
    for part in ("0.8673", "-0.0013", "[-0.0034, +0.0008]", "3.71x", "3.94x", str(tmp_path / "engine/model.xml")):
        assert part in text
    assert f"report  {tmp_path / 'report.json'}\n" in text
    (tmp_path / "report.html").touch()
    stream.truncate(0)
    print_summary(str(tmp_path), Console(file=stream, width=80))
    assert f"report  {tmp_path / 'report.html'}\n" in stream.getvalue()


def test_summary_of_a_run_that_measured_nothing(tmp_path: Path) -> None:
    stream = io.StringIO()
    print_record(bare_record(), tmp_path, Console(file=stream, width=100))
    assert "not measured" in stream.getvalue()
    assert "not built" in stream.getvalue()
    with pytest.raises(QuantizerError, match="no such file; expected the folder of a finished run"):
        print_summary(tmp_path, Console(file=stream))


@pytest.mark.parametrize(
    ("interval", "better", "words"),
    [
        ((-0.02, 0.01), True, "includes zero, so the change is not significant"),
        ((-0.02, -0.01), True, "lies below zero, so this is a significant loss"),
        ((0.01, 0.02), True, "lies above zero, so this is a significant gain"),
        ((0.01, 0.02), False, "lies above zero, so this is a significant loss"),
        (None, True, "no interval was computed"),
    ],
    ids=["none", "loss", "gain", "loss-lower-is-better", "no-interval"],
)
def test_verdict_on_the_score(interval: tuple[float, float] | None, better: bool, words: str) -> None:
    common = {"metric": "m", "higher_is_better": better}
    scores = (
        Score(form="float", value=0.9, **common),  # type: ignore[arg-type]
        Score(form="engine", value=0.9, difference=0.0, interval=interval, **common),  # type: ignore[arg-type]
    )
    assert words in verdict(bare_record(scores=scores))


@pytest.mark.parametrize(
    ("size", "words"),
    [(25, "On disk it is 4.00x smaller"), (99, "it is about the same"), (200, "it is 2.00x larger")],
    ids=["smaller", "same", "larger"],
)
def test_verdict_on_the_size(size: int, words: str) -> None:
    assert words in verdict(bare_record(size=size_entries({"float": 100, "engine": size})))


def test_a_larger_engine_is_called_larger_everywhere(tmp_path: Path) -> None:
    sizes = size_entries({"float": 1 * 2**20, "engine": 3 * 2**19})
    record = dataclasses.replace(sample_record(), size=sizes)
    stream = io.StringIO()
    print_record(record, tmp_path, Console(file=stream, width=100))
    write_run_card(record, tmp_path)
    page = html_from_record(record)
    assert "1.5 MiB (1.50x larger)" in stream.getvalue()
    assert "| size | 1.0 MiB | 1.5 MiB (1.50x larger) |" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert page.count("1.50\N{MULTIPLICATION SIGN} larger") == 3
    assert "0.67" not in stream.getvalue()


def test_reasons_that_differ_in_numbers_are_counted_together() -> None:
    texts = ["SQNR 12.1 dB, limit 25 dB", "SQNR 9 dB, limit 25 dB", "layer.1 excluded", "layer.10 excluded"]
    assert counted(texts) == [("SQNR … dB, limit 25 dB", 2), ("layer.1 excluded", 1), ("layer.10 excluded", 1)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1234.5678, "1,235"),
        (0.00012345, "0.0001234"),
        (1e-9, "1.000e-09"),
        (-2.5, "-2.500"),
        (float("inf"), "infinite"),
        (float("nan"), "not a number"),
    ],
)
def test_significant(value: float, text: str) -> None:
    assert significant(value) == text


def test_typeset() -> None:
    expected = "8 × 128, [−0.1, +0.2] 3.71× a-b -name max, 40 \N{MICRO SIGN}s; us-east"  # noqa: RUF001
    assert typeset("8 x 128, [-0.1, +0.2] 3.71x a-b -name max, 40 us; us-east") == expected


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("sqnr_db", 31.42, "SQNR in dB 31.4"),
        ("label_flips", 0.0123, "label flips 1.23%"),
        ("mean_cosine", 0.99871, "mean cosine 0.9987"),
    ],
)
def test_paired_figure(key: str, value: float, shown: str) -> None:
    name, show = paired_figure(key)
    assert f"{name} {show(value)}" == shown


def test_the_page_is_the_recorded_one() -> None:
    recorded = Path(__file__).resolve().parent.parent / "goldens" / "recorded" / "page.json"
    page = hashlib.sha256(html_from_record(sample_record()).encode()).hexdigest()[:16]
    assert page == json.loads(recorded.read_text(encoding="utf-8"))


def test_fixes_are_shown_unless_the_verdict_is_usable() -> None:
    fix = Fix(setting="activations: {smoothquant_alpha: 0.7}", gain_db=4.9, gain_alone_db=6.0)
    found = Diagnosis(group="layer.3", sqnr_db=24.7, findings=("its channels differ by 15x",), fix=fix)
    usable = dataclasses.replace(sample_record(), diagnoses=(found,))
    scores = tuple(dataclasses.replace(one, difference=-0.1, interval=None) for one in usable.scores)
    shown = "1. layer.3: output SQNR 24.7 dB if only it is quantized; its channels differ by 15\N{MULTIPLICATION SIGN}"
    fix_shown = "fix: quantizer: {activations: {smoothquant_alpha: 0.7}}, output SQNR +4.9 dB"
    for record, needs_fix in ((usable, False), (dataclasses.replace(usable, scores=scores), True)):
        page = html_from_record(record)
        header = page[page.index("<header>") : page.index("</header>")]
        assert page.count(shown) == 1
        assert (shown in header, fix_shown in header, fix_shown in page) == (needs_fix, needs_fix, needs_fix)
        assert "quantizer diagnose" not in page


def test_a_page_without_a_diagnosis_says_how_to_get_one_if_accuracy_is_lost() -> None:
    usable = dataclasses.replace(sample_record(), diagnoses=())
    scores = tuple(dataclasses.replace(one, difference=-0.1, interval=None) for one in usable.scores)
    lossy = dataclasses.replace(usable, scores=scores)
    given = {**lossy.config, "data": {"calibration": {"name": GIVEN_IN_PYTHON}}}
    for record, command in (
        (usable, None),
        (lossy, "quantizer diagnose FOLDER"),
        (dataclasses.replace(lossy, config=given), "result.diagnose()"),
        (dataclasses.replace(lossy, config={**lossy.config, "qat": {}}), None),
        (dataclasses.replace(lossy, diagnosis_error="no batch"), None),
        (dataclasses.replace(lossy, coverage=()), None),
    ):
        page = html_from_record(record)
        assert re.findall("<code>([^<]*diagnose[^<]*)</code> finds the groups", page) == [command] * (
            command is not None
        )


def test_the_picture_of_a_latency_fallback_without_errors() -> None:
    assert frontier_svg(dataclasses.replace(sample_latency_fallback(), frontier=())) == ""


def test_one_that_was_too_slow_is_shown_without_its_last_times() -> None:
    choice = sample_choice()
    best, slow = choice.candidates[:2]
    best = dataclasses.replace(best, milliseconds=(1.0, 39.7))
    slow = dataclasses.replace(slow, milliseconds=(4.0,), verdict="4.00x the time at 1 x 16: too slow to continue")
    both = dataclasses.replace(choice, shapes=("1 x 16", "8 x 128"), candidates=(best, slow))
    picture = candidates_svg(both)
    assert ">4.00x<" in picture
    assert "4.00 ms at 1 x 16, 4.00x the time at 1 x 16: too slow to continue" in picture
    assert choice_table(both, page=True).html().count("<tr") == 3
    console = Console(width=120, record=True)
    print_choice(both, console)
    assert re.search(r"openvino float32 +4\.00 +- ", console.export_text())


def test_the_picture_of_a_choice() -> None:
    choice = sample_choice()
    assert ">3.18x<" in candidates_svg(choice)
    alone = dataclasses.replace(choice, candidates=choice.candidates[:1])
    assert ">1.00x<" in candidates_svg(alone)
    # Not all have a score: outputs are compared.
    assert ">SQNR, dB<" in candidates_svg(choice)
    scores = (-0.0013, 0.0, 0.0002)
    scored = tuple(
        dataclasses.replace(one, score_difference=score)
        for one, score in zip(choice.candidates[:3], scores, strict=True)
    )
    picture = candidates_svg(dataclasses.replace(choice, candidates=scored))
    assert ">score difference<" in picture
    heights = [float(found) for found in re.findall(r'cy="([0-9.]+)" r="5"', picture)][-3:]
    assert heights[0] > heights[1] > heights[2]
    alike = tuple(dataclasses.replace(one, score_difference=0.0) for one in scored)
    assert ">score difference<" in candidates_svg(dataclasses.replace(choice, candidates=alike))
    none = dataclasses.replace(choice, candidates=choice.candidates[3:])
    assert "No engine ran." in candidates_svg(none)
