"""Runs side by side: on the command line and from Python, as text, table, picture and page."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from report_samples import bare_record
from rich.console import Console

import quantizer
from quantizer.cli.main import main
from quantizer.errors import QuantizerError
from quantizer.report import Latency, ModelInfo, Score, html_from_record, latency_entries, size_entries, write_record
from quantizer.report.compare import Resamples, compare, failed_run, pair, read_resamples, read_runs, write_resamples
from quantizer.report.compare_shown import (
    csv_text,
    html_from_comparison,
    print_comparison,
    short_names,
    write_comparison,
)
from quantizer.report.record import OutputDistance
from quantizer.tasks.metrics import accuracy, bootstrap_interval, resampled_scores

TARGETS = np.arange(200) % 2


def right(share: float) -> np.ndarray:
    """Labels of 200 rows of which ``share`` are right."""
    return np.where(np.arange(200) < share * 200, TARGETS, 1 - TARGETS)


def write_run(folder: Path, share: float, ms: float, rows: str = "rows", kept: bool = True, **changes: Any) -> Path:
    """Write the folder of a run, with the accuracy and the time of its engine."""
    folder.mkdir(parents=True)
    scores = {"float": right(0.9), "engine": right(share)}
    record = bare_record(
        name=folder.name,
        **{
            "latency": Latency(
                batch=8,
                sequence=16,
                threads=1,
                reference="openvino float32",
                engines=latency_entries({"float": [4.0], "engine": [ms]}),
            ),
            "scores": tuple(
                Score(
                    form=name,
                    value=float((labels == TARGETS).mean()),
                    metric="accuracy",
                    difference=None if name == "float" else share - 0.9,
                    samples=200,
                )
                for name, labels in scores.items()
            ),
            "config": {"quantizer": {"backend": "openvino"}, "output": str(folder)},
            "machine": {"cpu": "a CPU", "cores": 2},
            **changes,
        },
    )
    write_record(record, folder / "report.json")
    if kept:
        resampled = {
            name: tuple(map(float, resampled_scores(accuracy, labels, TARGETS, 200))) for name, labels in scores.items()
        }
        write_resamples(Resamples(samples_hash=rows, metric="accuracy", scores=resampled), folder)
    return folder


def _printed(found: Any) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_comparison(found, Path("page.html"), console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_interval_of_a_pair_is_that_of_paired_rows(tmp_path: Path) -> None:
    first, second = read_runs([write_run(tmp_path / "a", 0.9, 2.0), write_run(tmp_path / "b", 0.7, 1.0)])
    found = pair(first, second)
    assert found.difference == pytest.approx(-0.2)
    assert found.interval == pytest.approx(bootstrap_interval(accuracy, right(0.9), right(0.7), TARGETS, 200))
    assert not found.within_noise
    assert found.verdict == "significant"


def test_within_noise(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "a", 0.9, 2.0), write_run(tmp_path / "b", 0.895, 1.0)])
    found = compare(runs)
    assert found.best is runs[0]
    assert found.to_best["b"].within_noise
    assert "within noise" in html_from_comparison(found, "two", tmp_path)


def test_other_rows_have_no_interval(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "a", 0.9, 2.0), write_run(tmp_path / "b", 0.7, 1.0, rows="others")])
    found = compare(runs)
    other = found.to_best["b"]
    assert other.difference is None
    assert other.interval is None
    assert other.verdict == "not compared: scored on other samples"
    assert found.timed == {"a"}
    assert "not compared with a, and not in the chart: b; scored on other samples" in found.notes
    page = html_from_comparison(found, "two", tmp_path)
    assert "Not compared with a, and not in the chart: b; scored on other samples." in page
    assert ">significant<" not in page
    assert next(csv.DictReader(csv_text(found).splitlines()))["low_to_best"] == ""


def test_without_resamples_the_data_sets_decide(tmp_path: Path) -> None:
    def config(path: str) -> dict[str, Any]:
        return {"data": {"evaluation": {"name": "text-csv", "path": path}}}

    a = write_run(tmp_path / "a", 0.9, 2.0, kept=False, config=config("one.csv"))
    b = write_run(tmp_path / "b", 0.7, 1.0, kept=False, config=config("one.csv"))
    c = write_run(tmp_path / "c", 0.7, 1.0, kept=False, config=config("two.csv"))
    first, second, third = read_runs([a, b, c])
    same = pair(first, second)
    assert same.difference == pytest.approx(-0.2)
    assert same.interval is None
    assert same.why == "no interval: no resamples.json in a and b"
    assert pair(first, third).difference is None
    assert any(note.startswith("without intervals: a, b, c") for note in compare([first, second, third]).notes)


def write_function_run(folder: Path, base: float, value: float, **changes: Any) -> Path:
    """Write the folder of a run that a function scored: no rows, no resamples."""
    told = {"float": base, "engine": value}
    scores = tuple(
        Score(form=name, value=one, metric="top1", difference=None if name == "float" else value - base)
        for name, one in told.items()
    )
    return write_run(folder, 0.9, 2.0, kept=False, scores=scores, **changes)


def test_a_function_in_python_is_the_same_where_the_float_model_scores_the_same(tmp_path: Path) -> None:
    a, b = write_function_run(tmp_path / "a", 0.85, 0.84), write_function_run(tmp_path / "b", 0.85, 0.8)
    found = compare(read_runs([a, b]))
    assert found.best.name == "a"
    assert found.to_best["b"].difference == pytest.approx(-0.04)
    assert found.to_best["b"].why == "no interval: scored by a function"
    assert found.timed == {"a", "b"}
    notes = " ".join(found.notes)
    assert "2 runs assumed to have the same evaluation samples, which a function does not record" in notes
    assert "other samples" not in notes
    assert "resamples.json" not in notes
    assert "The best score is 0.8400, of a." in html_from_comparison(found, "two", tmp_path)


def test_a_function_in_python_that_may_be_another_is_not_compared(tmp_path: Path) -> None:
    a, b = write_function_run(tmp_path / "a", 0.85, 0.84), write_function_run(tmp_path / "b", 0.8, 0.8)
    info = ModelInfo(source="other", task="module", parameters=0)
    c = write_function_run(tmp_path / "c", 0.85, 0.84, model=info)
    found = compare(read_runs([a, b, c]))
    # A run is never on other samples than itself.
    assert found.best.name == "a"
    assert {name: pair.difference for name, pair in found.to_best.items()} == {"b": None, "c": None}
    assert found.to_best["b"].why.endswith("score 0.8500 and 0.8000, because samples or weights differ")
    assert found.to_best["c"].why.endswith("a function scored different models, on unknown samples")
    other = write_run(tmp_path / "d", 0.9, 2.0, kept=False)
    (task,) = compare(read_runs([a, other])).to_best.values()
    assert task.difference is None


def test_other_models_and_other_shapes_are_said(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", 0.9, 2.0)
    info = ModelInfo(source="other", task="embedding-classification", parameters=0)
    b = write_run(tmp_path / "b", 0.8, 1.0, model=info, machine={"cpu": "another"})
    notes = compare(read_runs([a, b])).notes
    assert any(note.startswith("the runs have 2 different models") for note in notes)
    assert any(note.endswith("b; measured on another machine or at another shape") for note in notes)


def test_the_frontier(tmp_path: Path) -> None:
    shares = {"slow": (0.9, 3.0), "fast": (0.8, 1.0), "beaten": (0.75, 2.0)}
    found = compare(read_runs([write_run(tmp_path / name, share, ms) for name, (share, ms) in shares.items()]))
    assert found.pareto_optimal == {"slow", "fast"}
    page = html_from_comparison(found, "three", tmp_path)
    assert page.count("Pareto-optimal</td>") == 2
    assert "2 of them Pareto-optimal" in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("higher", [True, False])
def test_the_picture_tells_where_a_lower_score_is_better(higher: bool, tmp_path: Path) -> None:
    scores = tuple(
        Score(form=which, value=value, metric="m", higher_is_better=higher)
        for which, value in (("float", 4.0), ("engine", 5.0))
    )
    runs = read_runs([write_run(tmp_path / name, 0.9, ms, scores=scores) for name, ms in (("a", 2.0), ("b", 1.0))])
    page = html_from_comparison(compare(runs), "two", tmp_path)
    assert ("m (lower is better)</text>" in page) is not higher


def test_verdicts_and_noise(tmp_path: Path) -> None:
    entries = latency_entries({"float": [4.0] * 8, "engine": [1.0, 1.5, 2.0, 2.5] * 2})
    noisy = Latency(batch=8, sequence=16, threads=1, reference="openvino float32", engines=entries)
    a = write_run(tmp_path / "a", 0.9, 2.0)
    b = write_run(tmp_path / "b", 0.7, 1.0, latency=noisy)
    c = write_run(tmp_path / "c", 0.885, 3.0)
    found = compare(read_runs([a, b, c]))
    page = html_from_comparison(found, "three", tmp_path)
    for level, tone in (("usable", ' class="yes"'), ("check", ""), ("do not use", ' class="no"')):
        assert page.count(f"<td{tone}>{level}</td>") == 1
    assert page.count("noisy timing; Pareto-optimal</td>") == 1
    assert "The fastest is b, 1.75 ms per batch (noisy timing)." in page
    assert "Noisy timing: b; benchmark again on an idle machine." in page
    rows = {row["run"]: (row["verdict"], row["noisy_timing"]) for row in csv.DictReader(csv_text(found).splitlines())}
    assert rows == {"a": ("usable", "False"), "b": ("do not use", "True"), "c": ("check", "False")}
    said = _printed(found)
    assert "1  a: usable, 0.00 s" in said
    assert "3  b: do not use, noisy timing, 0.00 s, Pareto-optimal" in said


def test_the_page_leads_to_the_reports(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "swept" / "num=2,names=#1", 0.9, 2.0),
        write_run(tmp_path / "swept" / "num=4", 0.9, 2.0),
        write_run(tmp_path / "beside", 0.8, 1.0),
        write_run(tmp_path.parent / f"{tmp_path.name}-far", 0.8, 1.0),
    ]
    for run in (runs[0], *runs[2:]):
        (run / "report.html").touch()
    page = tmp_path / "swept" / "comparison.html"
    write_comparison(compare(read_runs(runs)), page, None, "four")
    links = re.findall(r'<a href="([^"]*)">', page.read_text())
    near = ["num%3D2%2Cnames%3D%231/report.html", "../beside/report.html"]
    assert sorted(links) == sorted([*near, (runs[3] / "report.html").as_uri()])
    assert all((page.parent / unquote(link)).is_file() for link in near)


def test_tables_sort_by_the_script_of_the_report(tmp_path: Path) -> None:
    found = compare(read_runs([write_run(tmp_path / "a", 0.9, 2.0), write_run(tmp_path / "b", 0.7, 1.0)]))
    page = html_from_comparison(found, "two", tmp_path)
    scripts = [re.findall(r"<script>.*?</script>", text, re.DOTALL) for text in (page, html_from_record(bare_record()))]
    assert scripts[0] == scripts[1]
    digest = base64.b64encode(hashlib.sha256(scripts[0][0][8:-9].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    # The table of the runs, that of what differs, and the pairs.
    assert page.count('class="sortable"') == 2 + bool(found.differing)


def test_what_differs_in_the_configurations(tmp_path: Path) -> None:
    one, other = ({"quantizer": {"backend": name, "dtype": "int8"}, "output": name} for name in ("openvino", "torch"))
    a = write_run(tmp_path / "a", 0.9, 2.0, config=one)
    b = write_run(tmp_path / "b", 0.8, 2.0, config=other)
    found = compare(read_runs([a, b]))
    assert found.differing == {"quantizer.backend": {"a": "openvino", "b": "torch"}}


def test_a_run_that_failed_is_a_row(tmp_path: Path) -> None:
    (good,) = read_runs([write_run(tmp_path / "a", 0.9, 2.0), write_run(tmp_path / "b", 0.9, 2.0)])[:1]
    found = compare([good, failed_run("bad", tmp_path / "bad", {}, "EngineError: no <such> kernel")])
    assert [run.name for run in found.failed] == ["bad"]
    assert "EngineError: no &lt;such&gt; kernel" in html_from_comparison(found, "two", tmp_path)
    assert "1 run failed: bad" in found.notes


def test_all_failed(tmp_path: Path) -> None:
    found = compare([failed_run(name, tmp_path, {}, "why") for name in ("a", "b")])
    assert found.best is None
    assert "No run has a score." in html_from_comparison(found, "two", tmp_path)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    write_run(tmp_path / "one" / "run", 0.9, 2.0)
    write_run(tmp_path / "two" / "run", 0.895, 1.0)
    assert main(["compare", "one/run", "two/run/report.json", "--csv", "all.csv"]) == 0
    assert not Path("comparison.html").exists()
    said = capsys.readouterr().out
    assert "1  one/run: usable, 0.00 s, Pareto-optimal" in said
    assert "~-0.0050" in said
    assert max(map(len, said.splitlines())) <= 80
    with Path("all.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["run"] for row in rows] == ["one/run", "two/run"]
    assert float(rows[1]["difference_to_best"]) == pytest.approx(-0.005)
    # After an option the runs go on.
    assert main(["compare", "one/run", "--html", "page.html", "two/run"]) == 0
    assert "within noise" in Path("page.html").read_text()


def _timed(reference: str) -> Latency:
    entries = latency_entries({"float": [4.0], "engine": [2.0]})
    return Latency(batch=8, sequence=16, threads=1, reference=reference, engines=entries)


def test_speeds_relative_to_other_float_engines(tmp_path: Path) -> None:
    told = {"a": "openvino float32", "b": "openvino bfloat16", "c": "openvino float32"}
    runs = [write_run(tmp_path / name, 0.9, 2.0, latency=_timed(one)) for name, one in told.items()]
    found = compare(read_runs(runs))
    note = (
        "speed-ups are not comparable, because they are relative to different float engines: openvino float32 (a, c); "
        "openvino bfloat16 (b); compare latencies"
    )
    assert note in found.notes
    assert "openvino bfloat16 (b)" in html_from_comparison(found, "two", tmp_path)
    assert [row["speedup_over"] for row in csv.DictReader(csv_text(found).splitlines())] == list(told.values())
    assert not [note for note in compare(read_runs([runs[0], runs[2]])).notes if "speed-ups" in note]


def _output(sqnr_db: float | None) -> OutputDistance:
    return OutputDistance(output="y", batch=8, sqnr_db=sqnr_db, cosine=0.99, engine=True)


def test_without_a_score_the_outputs_are_compared(tmp_path: Path) -> None:
    told = {"a": (_output(17.0), _output(31.0)), "b": (_output(40.6),), "c": (_output(None),)}
    for name, outputs in told.items():
        size = size_entries({"float": 4000, "engine": 1000})
        write_run(tmp_path / name, 0.9, 2.0, kept=False, scores=(), outputs=outputs, size=size)
    found = compare(read_runs([tmp_path / name for name in told]))
    said = _printed(found)
    rows = [line.split() for line in said.splitlines()]
    assert [row for row in rows if row[:1] == ["dB"]] == [["dB", "ms", "speed-up", "size"]]
    assert [row[1] for row in rows if row[-1:] == ["KiB"]] == ["equal", "40.6", "17.0"]
    assert "1.0 KiB" in said
    page = html_from_comparison(found, "three", tmp_path)
    assert "The outputs of c are nearest to the float model: no difference." in page
    assert "SQNR, dB" in page
    assert "95% interval</th>" not in page
    assert [row["sqnr_db"] for row in csv.DictReader(csv_text(found).splitlines())] == ["17.0", "40.6", "inf"]


def test_the_folder_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("num=2", "num=4", ".num=8.part"):
        write_run(tmp_path / "swept" / name, 0.9, 2.0)
    (tmp_path / "swept" / "logs").mkdir()
    assert main(["compare", "swept", "--csv", "all.csv"]) == 0
    with Path("all.csv").open() as stream:
        assert [row["run"] for row in csv.DictReader(stream)] == ["num=2", "num=4"]
    # Beside the folder of a run, too.
    write_run(tmp_path / "alone", 0.8, 2.0)
    assert main(["compare", "swept", "alone", "--csv", "all.csv"]) == 0
    assert len(Path("all.csv").read_text().splitlines()) == 4
    capsys.readouterr()
    assert main(["show", "swept"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "swept contains 2 finished runs:"
    assert [line.strip() for line in shown[1:]] == [
        "quantizer show swept/num=2",
        "quantizer show swept/num=4",
        "quantizer compare swept",
    ]
    assert main(["show", "swept/num=2"]) == 0


def test_long_names_stay_different_in_a_narrow_terminal(tmp_path: Path) -> None:
    kept = "backend=onnxruntime,calibrator=percentile,percentile=99.9,granularity=tensor"
    ends = [f"{kept},names=classifier,num={num},formats=float" for num in (2, 4)]
    middles = [f"{kept},smooth={smooth},{kept.replace('onnx', 'torch')}" for smooth in ("0.5", "0.7")]
    found = compare(read_runs([write_run(tmp_path / name, 0.9, 2.0) for name in (*ends, *middles, "short")]))
    lines = [line for line in _printed(found).splitlines() if "usable" in line]
    assert max(map(len, lines)) <= 80
    names = [line[5:].partition(": ")[0] for line in lines]
    assert len(set(names)) == 5
    assert "short" in names
    assert {"…smooth=0.5…", "…smooth=0.7…"} <= set(names)
    assert all(any(f"num={num}" in name for name in names) for num in (2, 4))


def test_a_setting_in_the_name_is_not_said_twice(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"add={value}".lower(), 0.9, 2.0, config={"quantizer": {"add": value, "smooth": value}})
        for value in (True, False)
    ]
    said = _printed(compare(read_runs(runs)))
    assert "1  add=true smooth=True: usable" in said
    assert "2  add=false smooth=False: usable" in said


def test_short_names() -> None:
    assert short_names(["a", "b"], 8) == {"a": "a", "b": "b"}
    long = [f"{'x' * 20}{letter}{'x' * 20}" for letter in "ab"]
    # There are no parts that could be left out.
    assert short_names(long, 8) == {name: name for name in long}
    one, other = "runs/one/folder-of-a-name/last", "runs/two/folder-of-a-name/last"
    assert short_names([one, other], 12) == {one: "…one…", other: "…two…"}
    assert short_names([one, f"{one},more"], 12)[one] != short_names([one, f"{one},more"], 12)[f"{one},more"]


def test_what_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "a", 0.9, 2.0)
    for words, said in (
        ([folder], "1 run to compare; expected two or more"),
        ([tmp_path], "1 run to compare; expected two or more"),
        ([folder, folder / "report.json"], "is listed twice"),
        ([folder, tmp_path], "is listed twice"),
        ([folder, tmp_path / "nowhere"], "nowhere"),
    ):
        assert main(["compare", *map(str, words)]) == 1
        assert said in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["compare", str(folder), str(tmp_path / "empty")]) == 1
    assert "contains no report.json, and no folder in it does; expected a folder" in capsys.readouterr().err
    (folder / "resamples.json").write_text(json.dumps({"samples_hash": "r"}))
    with pytest.raises(QuantizerError, match=r"resamples\.json cannot be read .*; delete it to compare without"):
        read_resamples(folder)


def test_runs_are_text_table_picture_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jinja2", reason="needs enginequant[report]")
    # As Jupyter asks for colours, which a text has no use for.
    monkeypatch.setenv("FORCE_COLOR", "1")
    runs = quantizer.compare_runs(
        [write_run(tmp_path / "fast", 0.8, 1.0, kept=False), str(write_run(tmp_path / "good", 0.89, 2.0, kept=False))]
    )
    assert [run.name for run in runs.runs] == ["good", "fast"]
    assert [(one.first, one.second, round(one.difference or 0, 3)) for one in runs.pairs] == [("fast", "good", 0.09)]
    text = repr(runs)
    assert "\x1b" not in text
    assert re.search(r"1 +0\.8900 .*best .*2\.00", text)
    page = runs._repr_html_()
    assert page.startswith("<p>The best score is 0.8900, of good. The fastest is fast, 1.00 ms per batch.</p>")
    assert page.count("<table>") == 1
    assert runs.plot().svg.count("<circle") == 4  # two runs and two signs of the legend
    assert runs.report(tmp_path / "runs.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    other = (Score(form="float", value=0.9, metric="F1 & more"), Score(form="engine", value=0.7, metric="F1 & more"))
    runs = quantizer.compare_runs(
        [write_run(tmp_path / "a", 0.8, 1.0), write_run(tmp_path / "b", 0.7, 1.0, scores=other)]
    )
    assert "not compared with a, and not in the chart: b; accuracy and F1 & more" in runs.notes[0]
    assert "F1 &amp; more" in runs._repr_html_()


def test_python_says_what_the_command_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(write_run(tmp_path / name, share, ms)) for name, share, ms in (("a", 0.8, 1.0), ("b", 0.85, 2.0))]
    assert main(["compare", *folders]) == 0
    said = capsys.readouterr().out
    assert repr(quantizer.compare_runs(folders)).split() == said.split()
