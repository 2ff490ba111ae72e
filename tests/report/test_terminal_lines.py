"""Lines and tables in a terminal of 80 columns: nothing is wider, and no name is broken over lines."""

from __future__ import annotations

import io
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import pytest
from report_samples import sample_record
from rich.console import Console

from quantizer.engines import Inspection
from quantizer.errors import QuantizerError
from quantizer.report import RunRecord, print_record, write_record
from quantizer.report.tables import Column, Table, names, numbers, string_from_table
from quantizer.report.terminal import print_layers
from quantizer.report.text import print_labelled, wrapped
from quantizer.utils.records import Layer, PrecisionShare

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
