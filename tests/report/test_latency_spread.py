"""The spread of latencies: shown beside the median, and called noisy where it is too wide."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from report_samples import bare_record, sample_record
from rich.console import Console

from quantizer.report import Latency, RunRecord, html_from_record, latency_entries
from quantizer.report.codec import mapping_from_record, record_from_mapping
from quantizer.report.terminal import print_record
from quantizer.report.text import noise_sentence, spread_words
from quantizer.report.verdict import verdict

QUIET = [10.0, 10.1, 9.9, 10.2, 9.8]


def _latency(engine: list[float], plain: list[float] = [30.0, 30.3, 29.7, 30.1]) -> Latency:  # noqa: B006
    return Latency(
        batch=8,
        sequence=None,
        threads=1,
        reference="openvino float32",
        engines=latency_entries({"float": plain, "engine": engine}),
    )


def _printed(record: RunRecord, folder: Path) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_record(record, folder, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_quartiles_are_those_of_the_times() -> None:
    (entry,) = latency_entries({"float": [1.0, 2.0, 3.0, 4.0, 5.0]})
    assert entry.quartiles_ms == (2.0, 4.0)
    assert spread_words(entry) == "2.00 to 4.00 ms"
    (few,) = latency_entries({"float": [1.0, 2.0, 3.0]})
    assert few.quartiles_ms is None
    assert spread_words(few) == "1.00 to 3.00 ms"


def test_one_slow_call_is_no_noise() -> None:
    assert noise_sentence(_latency([*QUIET, 99.0])) == ""
    assert noise_sentence(None) == ""


@pytest.mark.parametrize("name", ["engine", "float"])
def test_a_wide_middle_half_is_called_noisy(name: str, tmp_path: Path) -> None:
    wild = [10.0, 8.0, 12.0, 10.0, 8.0, 12.0]
    latency = _latency(wild) if name == "engine" else _latency(QUIET, wild)
    said = noise_sentence(latency)
    assert said.startswith(f"The timing is noisy: the middle half of the times of {name} spans 30.0% of their median (")
    record = bare_record(latency=latency)
    assert said in verdict(record)
    assert said in _printed(record, tmp_path)


def test_a_quiet_measurement_says_nothing_and_shows_its_spread(tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="needs enginequant[report]")
    record = replace(sample_record(), latency=_latency(QUIET))
    assert "noisy" not in verdict(record)
    assert "noisy" not in _printed(record, tmp_path)
    page = html_from_record(record)
    assert "9.90 to 10.1 ms" in page.replace("\N{NO-BREAK SPACE}", " ")
    assert "Half of the times lie in the middle half." in page


def test_a_report_without_quartiles_is_read() -> None:
    values = mapping_from_record(bare_record(latency=_latency(QUIET)))
    for entry in values["latency"]["engines"]:
        del entry["quartiles_ms"]
    found = record_from_mapping(values).latency
    assert found is not None
    assert found.engines[0].quartiles_ms is None


def test_sites_and_work_are_told_apart() -> None:
    said = verdict(sample_record())
    assert "of the multiply-adds, the work, run in low precision, in " in said
    assert "sites (operations, large and small)" in said
    page = html_from_record(sample_record())
    assert "Work in low precision" in page
    assert "A residual add counts as a site and does none of it" in page
    uncounted = replace(
        sample_record(), covered_share=None, coverage=(replace(sample_record().coverage[0], multiply_adds=None),)
    )
    assert "1 of 1 sites is quantized." in verdict(uncounted)
