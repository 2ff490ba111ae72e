"""Finished runs side by side, from Python: text, table, picture and page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import quantizer
from quantizer.cli.main import main
from quantizer.errors import QuantizerError
from quantizer.report import Latency, ModelInfo, RunRecord, Score, latency_entries, write_record


def _run(folder: Path, score: float, ms: float, metric: str = "accuracy") -> Path:
    folder.mkdir()
    record = RunRecord(
        name=folder.name,
        created="2026-11-01T00:00:00+00:00",
        config={"quantizer": {"backend": "openvino"}},
        machine={"cpu": "a CPU", "cores": 2},
        model=ModelInfo(source="nets:build", task="module", parameters=100),
        scores=(
            Score(which="float", value=0.9, metric=metric, rows=200),
            Score(which="engine", value=score, metric=metric, difference=score - 0.9, rows=200),
        ),
        latency=Latency(
            batch=8,
            sequence=None,
            threads=1,
            reference="openvino float32",
            engines=latency_entries({"float": [4.0], "engine": [ms]}),
        ),
    )
    write_record(record, folder / "report.json")
    return folder


def test_runs_are_text_table_picture_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jinja2", reason="needs enginequant[report]")
    # As Jupyter asks for colours, which a text has no use for.
    monkeypatch.setenv("FORCE_COLOR", "1")
    runs = quantizer.compare_runs([_run(tmp_path / "fast", 0.8, 1.0), str(_run(tmp_path / "good", 0.89, 2.0))])
    assert [run.name for run in runs.runs] == ["good", "fast"]
    assert [(one.first, one.second, round(one.difference or 0, 3)) for one in runs.pairs] == [("fast", "good", 0.09)]
    text = repr(runs)
    assert "\x1b" not in text
    assert re.search(r"1 +0\.8900 .*best .*2\.00", text)
    page = runs._repr_html_()
    assert page.startswith("<p>The best score is 0.8900, of good. The fastest is fast, 1.00 ms a batch.</p>")
    assert page.count("<table>") == 1
    assert runs.plot().svg.count("<circle") == 4  # two runs and two signs of the legend
    assert runs.report(tmp_path / "runs.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    runs = quantizer.compare_runs([_run(tmp_path / "a", 0.8, 1.0), _run(tmp_path / "b", 0.7, 1.0, metric="F1 & more")])
    assert "not compared with a, and not in the picture: b; accuracy and F1 & more" in runs.notes[0]
    assert "F1 &amp; more" in runs._repr_html_()


def test_one_run_is_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(QuantizerError, match="1 run to compare; expected two or more"):
        quantizer.compare_runs([_run(tmp_path / "a", 0.8, 1.0)])


def test_python_says_what_the_command_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(_run(tmp_path / "a", 0.8, 1.0)), str(_run(tmp_path / "b", 0.85, 2.0))]
    assert main(["compare", *folders]) == 0
    said = capsys.readouterr().out
    assert repr(quantizer.compare_runs(folders)).split() == said.split()
