"""The page of the tools side by side: who is called the fastest, and rows that have no figures."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "field"))

from field_page import write_pages
from headline import MACHINE, marked, write_headline
from kept_rows import keep_rows, kept_rows


def _row(tool: str, speedup: float, gained: float, **more: Any) -> dict[str, Any]:
    latency = {batch: {"ms": 10 / speedup, "speedup": speedup} for batch in ("1", "8", "32")}
    return {
        "model": "net",
        "tool": tool,
        "name": f"the {tool}",
        "ours": False,
        "title": "A net",
        "metric": "accuracy",
        "machine": {"cpu": "a CPU", "instructions": "avx2"},
        "versions": {"torch": "2.13.0", "numpy": "2.4.6"},
        "commit": "abc",
        "day": "2026-11-26",
        "seed": 0,
        "note": "",
        "score": 0.9 + gained,
        "gained": gained,
        "low": gained - 0.01,
        "high": gained + 0.01,
        "label_flips": 0.01,
        "sqnr_db": 30.0,
        "latency": latency,
        "quantize_s": 3.0,
        "quantize_peak_mib": 100.0,
        **more,
    }


def _index(folder: Path, *rows: dict[str, Any], growth: Sequence[dict[str, Any]] = ()) -> str:
    reference = _row("onnxruntime-float32", 1.0, 0.0)
    write_pages({"a-cpu-avx2": [reference, *rows]}, {"a-cpu-avx2": growth}, folder / "benchmarks")
    return (folder / "benchmarks" / "index.md").read_text(encoding="utf-8")


def _page(folder: Path, *rows: dict[str, Any], growth: Sequence[dict[str, Any]] = ()) -> str:
    _index(folder, *rows, growth=growth)
    return (folder / "benchmarks" / "a-cpu-avx2.md").read_text(encoding="utf-8")


def test_rows_of_two_machines_are_compared(tmp_path: Path) -> None:
    machines = {
        "one": [_row("onnxruntime-float32", 1.0, 0.0), _row("nncf", 2.0, 0.004), _row("auto", 3.0, 0.001, ours=True)],
        "other": [_row("onnxruntime-float32", 1.0, 0.0), _row("nncf", 2.0, 0.001), _row("auto", 3.0, 0.002, ours=True)],
    }
    write_pages(machines, {"one": [], "other": []}, tmp_path)
    said = (tmp_path / "index.md").read_text(encoding="utf-8").partition("## Found again")[2]
    assert " ".join(said.split()) == (
        "3 rows were measured on more than one machine, each in an environment made for it: the scores of 2 are within "
        "0.002 of each other. The others; CPUs sum in other orders, and of some hundred rows a few are decided "
        "otherwise: - the nncf on A net: 0.9040, 0.9010"
    )


def test_a_row_without_use_is_left_out_of_the_picture(tmp_path: Path) -> None:
    ours, useless = _row("auto", 3.0, -0.001, ours=True), _row("nncf", 4.0, -2e17, low=-3e17, high=-1e17)
    page = _page(tmp_path, useless, ours)
    assert "-2.0e+17 | -3.0e+17 to -1.0e+17" in page
    assert "Too far from float for the picture: the nncf." in page
    assert "the nncf: " not in page
    assert "the auto: 0.8990" in " ".join(page.split())
    assert "Too far" not in _page(tmp_path, _row("nncf", 4.0, -0.8), ours)
    slow = _page(tmp_path, _row("quanto", 0.04, 0.0), _row("torch", 0.2, 0.0), ours)
    assert "Too slow for the picture: the quanto." in slow
    assert "the quanto: " not in slow


@pytest.mark.parametrize(("score", "falls"), [(0.91, True), (0.89, False)])
def test_the_picture_tells_where_a_lower_score_is_better(score: float, falls: bool, tmp_path: Path) -> None:
    page = " ".join(_page(tmp_path, _row("auto", 3.0, -0.01, ours=True, score=score)).split())
    assert ("batch 8 (lower is better)</text>" in page) is falls


def test_ours_is_the_fastest_where_who_is_faster_is_worse(tmp_path: Path) -> None:
    ours, worse = _row("auto", 3.0, -0.001, ours=True, note="openvino int8"), _row("nncf", 4.0, -0.002)
    index, page = _index(tmp_path, worse, ours), _page(tmp_path, worse, ours)
    assert "| A net | **ours** | **ours** | **ours** |" in index
    assert "in 3 of 3 cells: [all figures](a-cpu-avx2.md)" in index
    assert "the auto (openvino int8)" in page
    assert "<svg" in page
    assert "text-anchor" in page
    assert not re.search(r"\w-\n", page), "a name that is cut in two is none"
    style = page[page.index("<style>") : page.index("</style>")]
    assert "'" in style
    assert all(line.count("'") % 2 == 0 for line in style.splitlines()), "the end of a line ends a string"


@pytest.mark.parametrize("gained", [0.0, 0.002])
def test_who_is_faster_and_not_worse_is_named(tmp_path: Path, gained: float) -> None:
    index = _index(tmp_path, _row("auto", 3.0, 0.0, ours=True), _row("nncf", 3.6, gained))
    assert "| A net | the nncf (1.20 times as fast, its outputs 30.0 dB from float's, ours 30.0 dB) |" in index
    assert "in 0 of 3 cells" in index


def test_what_writes_text_has_no_distance_of_outputs(tmp_path: Path) -> None:
    rows = [_row("onnxruntime-float32", 1.0, 0.0), _row("auto", 3.0, 0.0, ours=True), _row("nncf", 3.6, 0.0)]
    for row in rows:
        del row["sqnr_db"]
    write_pages({"a-cpu-avx2": rows}, {"a-cpu-avx2": []}, tmp_path)
    assert "| A net | the nncf (1.20 times as fast) |" in (tmp_path / "index.md").read_text(encoding="utf-8")


def test_a_tool_that_failed_has_its_reason(tmp_path: Path) -> None:
    failed = {"model": "net", "tool": "pt2e", "name": "the pt2e", "ours": False, "failed": "KeyError: a | b"}
    page = _page(tmp_path, _row("auto", 2.0, 0.0, ours=True), failed)
    assert "| the pt2e | KeyError: a / b |" in page


def test_files_and_memory_are_listed_where_there_are_any(tmp_path: Path) -> None:
    ours = _row("auto", 2.0, 0.0, ours=True, file_mib=12.5, load_s=0.25, run_peak_mib=40.0)
    page = _page(tmp_path, ours)
    assert "| the auto | 12.5 | 0.2 | 40.0 | 3 | 100 |" in page
    assert "| the onnxruntime-float32 |  |  |  | 3 | 100 |" in page


def test_models_without_a_figure_are_named(tmp_path: Path) -> None:
    missing = {"model": "other", "tool": "auto", "name": "ours", "ours": True, "failed": "not measured yet"}
    page = _page(tmp_path, _row("auto", 2.0, 0.0, ours=True), missing)
    assert "Of these models nothing was measured yet: other." in page


def test_what_grows_is_a_table_of_its_own(tmp_path: Path) -> None:
    sizes = {"layers": {"12": 4.0, "2": 1.0}, "rows": {"32": 0.51}, "tokens": {"128": {"ms": 8.0, "speedup": 2.0}}}
    grown = {**_row("nncf", 1.0, 0.0), **sizes}
    failed = {"model": "growth", "tool": "pt2e", "name": "the pt2e", "ours": False, "failed": "not measured yet"}
    page = _page(tmp_path, _row("auto", 2.0, 0.0, ours=True), growth=[grown, failed])
    assert (
        "| tool | 2 layers, s | 12 layers, s | 32 rows, s |\n|---|---|---|---|\n| the nncf | 1.0 | 4.0 | 0.5 |" in page
    )
    assert "| tool | 128 tokens, ms (speed-up) |\n|---|---|\n| the nncf | 8.0 (2.00) |" in page
    assert "| the pt2e | not measured yet |" in page
    assert "How they grow" not in _page(tmp_path, _row("auto", 2.0, 0.0, ours=True), growth=[failed])


def test_rows_are_kept_by_the_kind_of_machine_and_replaced_by_newer_ones(tmp_path: Path) -> None:
    other = {"machine": {"cpu": "Intel(R) Xeon(R) Processor", "instructions": "avx2, amx_bf16"}}
    keep_rows([_row("auto", 2.0, 0.0), _row("nncf", 2.0, 0.0), _row("auto", 4.0, 0.0, **other)], tmp_path)
    keep_rows([_row("auto", 3.0, 0.0)], tmp_path)
    kept = kept_rows(tmp_path)
    assert [*kept] == ["a-cpu-avx2", "intel-xeon-amx-bf16"]
    speedups = {row["tool"]: row["latency"]["8"]["speedup"] for row in kept["a-cpu-avx2"]}
    assert speedups == {"auto": 3.0, "nncf": 2.0}
    assert kept["intel-xeon-amx-bf16"][0]["latency"]["8"]["speedup"] == 4.0


def test_each_machine_has_a_page_and_a_part_of_the_index(tmp_path: Path) -> None:
    other = {"machine": {"cpu": "another CPU", "instructions": "avx2"}}
    one = [_row("onnxruntime-float32", 1.0, 0.0), _row("auto", 3.0, 0.0, ours=True)]
    two = [_row("onnxruntime-float32", 1.0, 0.0, **other), _row("auto", 3.0, 0.0, ours=True, **other)]
    unmeasured = [{"model": "net", "tool": "auto", "name": "ours", "ours": True, "failed": "not measured yet"}]
    write_pages({"one": one, "two": two, "three": unmeasured}, {"one": [], "two": [], "three": []}, tmp_path)
    index = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert [line for line in index.splitlines() if line.startswith("## ")] == [
        "## a CPU with avx2",
        "## another CPU with avx2",
        "## Found again",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.md", "one.md", "two.md"]


def test_a_machine_without_ours_says_so(tmp_path: Path) -> None:
    index = _index(tmp_path, _row("nncf", 3.0, 0.0))
    assert "Ours is not measured here yet: [figures of others](a-cpu-avx2.md)." in index
    assert "cells" not in index


def test_the_pages_in_the_repository_are_those_of_its_rows() -> None:
    root = Path(__file__).resolve().parents[1]
    kept = kept_rows(root / "benchmarks" / "field" / "rows")
    assert kept
    index = (root / "docs" / "benchmarks" / "index.md").read_text(encoding="utf-8")
    for slug, rows in kept.items():
        assert f"({slug}.md)" in index
        page = (root / "docs" / "benchmarks" / f"{slug}.md").read_text(encoding="utf-8")
        for row in rows:
            if "failed" not in row and "score" in row:
                low, high = (
                    f"{row[key]:+.4f}" if abs(row[key]) < 1e6 else f"{row[key]:+.1e}" for key in ("low", "high")
                )
                ends = (f"{low} to {high}", f"{row['latency']['8']['ms']:.1f}")
                assert any(all(end in line for end in ends) for line in page.splitlines()), json.dumps(row)


def test_the_figures_of_readme_and_home_are_those_of_the_rows(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[1]
    pages = ("README.md", "docs/index.md")
    (tmp_path / "docs").mkdir()
    for page in pages:
        (tmp_path / page).write_text((root / page).read_text(encoding="utf-8"), encoding="utf-8")
    write_headline(kept_rows(root / "benchmarks" / "field" / "rows")[MACHINE], tmp_path)
    for page in (*pages, "docs/speed.svg"):
        text = (root / page).read_text(encoding="utf-8")
        assert text == (tmp_path / page).read_text(encoding="utf-8"), "run  make figures"
        assert "x as fast**" in text or page.endswith(".svg")
    assert "| MiniLM-L6 | Spearman |" in (root / "docs" / "index.md").read_text(encoding="utf-8")


def test_figures_stand_between_their_marks() -> None:
    begin, end = "<!-- figures a: made by `make figures` -->", "<!-- end of figures a -->"
    page = f"before\n{begin}\nold\n{end}\nafter\n"
    assert marked(page, "a", "new") == f"before\n{begin}\n\nnew\n\n{end}\nafter\n"
    assert marked(page, "b", "new") == page
    with pytest.raises(SystemExit, match="without <!-- end of figures a"):
        marked(f"{begin}\nold\n", "a", "new")
