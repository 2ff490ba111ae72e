"""The page of the tools side by side: who is called the fastest, and rows that have no figures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "field"))

from field_page import write_page


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


def _page(folder: Path, *rows: dict[str, Any], growth: Sequence[dict[str, Any]] = ()) -> str:
    reference = _row("onnxruntime-float32", 1.0, 0.0)
    write_page([reference, *rows], growth, folder / "benchmarks")
    return (folder / "benchmarks" / "index.md").read_text(encoding="utf-8")


def test_ours_is_the_fastest_where_who_is_faster_is_worse(tmp_path: Path) -> None:
    ours, worse = _row("auto", 3.0, -0.001, ours=True, note="openvino int8"), _row("nncf", 4.0, -0.002)
    page = _page(tmp_path, worse, ours)
    assert "| A net | **ours** | **ours** | **ours** |" in page
    assert "in 3 of 3 cells" in page
    assert "the auto (openvino int8)" in page
    assert "<svg" in page


@pytest.mark.parametrize("gained", [0.0, 0.002])
def test_who_is_faster_and_not_worse_is_named(tmp_path: Path, gained: float) -> None:
    page = _page(tmp_path, _row("auto", 3.0, 0.0, ours=True), _row("nncf", 3.6, gained))
    assert "| A net | the nncf (1.20 times as fast) |" in page
    assert "in 0 of 3 cells" in page


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
    sizes = {"layers": {"2": 1.0, "6": 2.5}, "rows": {"32": 0.51}, "tokens": {"128": {"ms": 8.0, "speedup": 2.0}}}
    grown = {**_row("nncf", 1.0, 0.0), **sizes}
    failed = {"model": "growth", "tool": "pt2e", "name": "the pt2e", "ours": False, "failed": "not measured yet"}
    page = _page(tmp_path, _row("auto", 2.0, 0.0, ours=True), growth=[grown, failed])
    assert "| tool | 2 layers, s | 6 layers, s | 32 rows, s | 128 tokens, ms (speed-up) |" in page
    assert "| the nncf | 1.0 | 2.5 | 0.5 | 8.0 (2.00) |" in page
    assert "| the pt2e | not measured yet |" in page
    assert "How they grow" not in _page(tmp_path, _row("auto", 2.0, 0.0, ours=True), growth=[failed])
