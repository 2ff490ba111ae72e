"""Lines and tables in a terminal of 80 columns: nothing is wider, and no name is broken over lines."""

from __future__ import annotations

import io
from argparse import Namespace
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import pytest
from report_samples import sample_record
from rich.console import Console

from quantizer.cli.output import parser_of
from quantizer.cli.show import Show
from quantizer.engines import Inspection
from quantizer.errors import QuantizerError
from quantizer.report import RunRecord, print_record, write_record
from quantizer.report.tables import Column, Table, names, numbers, string_from_table
from quantizer.report.terminal import print_layers, shares_line, unquantized_words
from quantizer.report.text import print_labelled, wrapped
from quantizer.utils.records import Layer, PrecisionShare, Site

LONG = "encoder.layer.11.attention.output.dense.site_forward_linear_0/MatMul/MatMulScaleFusion"


def _record() -> RunRecord:
    share = PrecisionShare(
        precision="int8", layers=3, layer_share=0.75, products=2, multiply_add_share=1.0, time_share=0.921
    )
    layers = [
        Layer(name=f"{LONG}{number}", type="FullyConnected", precision="int8", writes="fp32", time_us=float(number))
        for number in range(12)
    ]
    reasons = (f"2 MatMul/Conv/Gemm layers are FP32, with non-quantized operands: {LONG}, {LONG}",)
    inspection = Inspection(
        backend="openvino",
        verified=True,
        note="seen in a run at 8 x 128",
        layers=tuple(layers),
        shares=(share,),
        reasons=reasons,
    )
    return replace(sample_record(), inspection=inspection)


@pytest.mark.parametrize("width", [80, 120])
def test_the_result_of_a_run_comes_last_in_a_few_lines(tmp_path: Path, width: int) -> None:
    stream = io.StringIO()
    print_record(_record(), tmp_path, Console(file=stream, width=width))
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= width for line in lines if str(tmp_path) not in line)
    start = next(number for number, line in enumerate(lines) if line.startswith(_record().name))
    assert len(lines) - start <= 16
    ends = [line.split()[0] for line in lines[start:] if line[:1].isalpha()]
    assert ends[-2:] == ["engine", "report"]
    assert f"layers  quantizer show {tmp_path} --layers" in lines
    assert "slowest layers" not in stream.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_layers_are_shown_when_they_are_asked_for(tmp_path: Path, width: int) -> None:
    write_record(_record(), tmp_path / "report.json")
    stream = io.StringIO()
    print_layers(tmp_path, Console(file=stream, width=width))
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    start = lines.index(next(line for line in lines if "the 10 slowest layers" in line))
    # A title, two lines of headings, a rule, and a line each.
    assert len(lines) - start == 1 + 3 + 10
    assert all(line.startswith("encoder.") and "…" in line and "FullyConnected" in line for line in lines[start + 4 :])
    assert lines[start + 4].split()[0].endswith("Fusion11")
    bullets = [line for line in lines if line.startswith(("- ", "  "))]
    assert any(line.startswith("  ") for line in bullets)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_precisions_and_their_headings_are_whole(tmp_path: Path, width: int) -> None:
    record = _record()
    assert record.inspection is not None
    bf16 = replace(record.inspection.shares[0], precision="bf16")
    inspection = replace(record.inspection, shares=(*record.inspection.shares, bf16))
    write_record(replace(record, inspection=inspection), tmp_path / "report.json")
    stream = io.StringIO()
    print_layers(tmp_path, Console(file=stream, width=width))
    lines = [line.split() for line in stream.getvalue().splitlines()]
    assert [line[0] for line in lines if line[:1] in (["INT8"], ["BF16"])] == ["INT8", "BF16"]
    assert ["precision", "layers", "layers", "Gemm", "adds", "time"] in lines


def test_the_first_column_never_shrinks() -> None:
    columns = [Column("label", itemgetter(0)), *(numbers(f"number {at}", itemgetter(1)) for at in range(5))]
    shown = string_from_table(Table("", columns, [("BF16", 123456)]).terminal(titled=False), 50)
    assert "BF16" in shown


def test_integers_of_indices_are_named_so() -> None:
    share = PrecisionShare(
        precision="index", layers=3, layer_share=0.75, products=0, multiply_add_share=None, time_share=0.011
    )
    inspection = _record().inspection
    assert inspection is not None
    assert "integers of indices 1.10% of the time" in shares_line(replace(inspection, shares=(share,)))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_coverage_of_a_run_is_shown(tmp_path: Path, width: int) -> None:
    record = sample_record()
    write_record(record, tmp_path / "report.json")
    stream = io.StringIO()
    assert Show()(_arguments(tmp_path), Console(file=stream, width=width)) == 0
    shown = stream.getvalue()
    skipped = [site for site in record.coverage if not site.quantized]
    ran = [site for site in record.coverage if site.ran]
    count = sum(site.ran for site in skipped)
    assert shown.startswith(f"{count} of {len(ran)} sites {'is' if count == 1 else 'are'} not quantized")
    assert all(site.name in shown for site in skipped)
    assert " ".join(skipped[0].reason.split()[:2]) in shown
    print_record(record, tmp_path, console := Console(file=io.StringIO(), width=200))
    assert shown.splitlines()[0].split(" not ")[0] in console.file.getvalue()  # type: ignore[attr-defined]
    assert f"reasons quantizer show {tmp_path} --coverage" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_that_quantized_nothing_has_no_coverage(tmp_path: Path) -> None:
    write_record(replace(sample_record(), coverage=()), tmp_path / "report.json")
    with pytest.raises(QuantizerError, match="the run quantized nothing, so there is no coverage to show"):
        Show()(_arguments(tmp_path), Console(file=io.StringIO()))


def _arguments(folder: Path) -> Namespace:
    return parser_of([Show()]).parse_args(["show", str(folder), "--coverage"])


def test_the_main_reason_is_named_with_its_sites() -> None:
    site = Site(name="a", kind="linear", host_type="Linear", file="", line=0, quantized=True, reason="int8")
    rest = [replace(site, name=name, quantized=False, reason=reason) for name, reason in zip("bcd", "xxy", strict=True)]
    assert unquantized_words([site]) is None
    assert unquantized_words([site, rest[0]]) == "1 of 2 sites is not quantized: x"
    assert unquantized_words([site, *rest]) == "3 of 4 sites are not quantized; main reason (2 sites): x"
    never = replace(site, name="e", quantized=False, reason="never ran in calibration")
    assert unquantized_words([site, never]) is None


def test_a_run_without_an_engine_has_no_layers(tmp_path: Path) -> None:
    write_record(replace(sample_record(), inspection=None), tmp_path / "report.json")
    with pytest.raises(QuantizerError, match="the run built no engine, so there are no layers to show"):
        print_layers(tmp_path, Console(file=io.StringIO()))


def test_a_line_is_wrapped_between_words_with_a_hanging_indent() -> None:
    lines = wrapped(f"the input of {LONG * 2} is not quantized", 60, first="- ", rest="  ")
    assert [line[:2] for line in lines] == ["- ", *["  "] * (len(lines) - 1)]
    assert all(len(line) <= 60 for line in lines)
    (name,) = [word for line in lines for word in line.split() if "…" in word]
    assert name.startswith("encoder.layer.11")
    assert name.endswith("ScaleFusion")
    assert wrapped("openvino int8   19.8 dB   -0.0050", 80) == ["openvino int8   19.8 dB   -0.0050"]
    assert wrapped("", 80, first="- ") == ["-"]


def test_a_path_behind_a_label_is_never_wrapped() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=40)
    print_labelled("engine", f"/{'a' * 80}/model.engine", console, wrap=False)
    print_labelled("deploy", "model.engine, 1.62x as fast as float.engine beside it", console)
    assert stream.getvalue().splitlines() == [
        f"engine  /{'a' * 80}/model.engine",
        "deploy  model.engine, 1.62x as fast as",
        "        float.engine beside it",
    ]


def test_names_in_a_table_give_their_middle_and_numbers_are_whole() -> None:
    columns = [names("site", itemgetter(0)), numbers("multiply-adds", itemgetter(1)), Column("why", itemgetter(2))]
    rows = [(LONG, 604_000_000, "its input is no tensor that calibration saw")]
    for width in (50, 80, 200):
        shown = string_from_table(Table("", columns, rows).terminal(titled=False), width)
        assert all(len(line) <= width for line in shown.splitlines())
        assert "604,000,000" in shown
        assert "multiply-adds" in shown
        assert (LONG in shown) == (width == 200)
        if width < 200:
            assert "…" in shown
