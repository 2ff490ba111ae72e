"""report.json: what is written can be read, and what is broken is refused with its place."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from report_samples import bare_record, sample_record

from quantizer.errors import QuantizerError
from quantizer.report import (
    GroupSensitivity,
    RunRecord,
    Score,
    Stage,
    collect_machine,
    collect_versions,
    latency_entries,
    read_record,
    size_entries,
    write_record,
    write_text_atomic,
)
from quantizer.report import record as record_module
from quantizer.report.document_format import field_documentation, format_page
from quantizer.report.record import mapping_from_record, pair, record_from_mapping
from quantizer.utils.records import Fix

RECORDS = [getattr(record_module, name) for name in record_module.__all__ if name != "VERSION"]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("make", [sample_record, bare_record], ids=["full", "bare"])
def test_round_trip(tmp_path: Path, make: object) -> None:
    record = make()  # type: ignore[operator]
    assert read_record(write_record(record, tmp_path / "report.json")) == record
    assert json.loads((tmp_path / "report.json").read_text())["version"] == 11
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_what_json_cannot_hold_survives(tmp_path: Path) -> None:
    rows = [
        GroupSensitivity(group="g", kind="linear", error=value, rank=1) for value in (math.inf, -math.inf, math.nan)
    ]
    read = read_record(write_record(bare_record(sensitivity=rows), tmp_path / "report.json"))
    assert [str(row.error) for row in read.sensitivity] == ["inf", "-inf", "nan"]


def test_numpy_scalars_and_lists_are_taken() -> None:
    numbers: dict[str, Any] = {"value": np.float32(0.5), "samples": np.int64(3), "interval": [0, 1]}
    score = Score(form="float", metric="accuracy", **numbers)
    record = record_from_mapping(mapping_from_record(bare_record(scores=[score], config={"path": Path("a/b")})))
    assert record.scores == (Score(form="float", value=0.5, metric="accuracy", samples=3, interval=(0.0, 1.0)),)
    assert record.config == {"path": "a/b"}


def test_facts_keep_their_type() -> None:
    machine = {"whole": 3, "text": "3", "number": 3.0, "none": None}
    read = record_from_mapping(mapping_from_record(bare_record(machine=machine)))
    assert [type(value) for value in read.machine.values()] == [int, str, float, type(None)]


def test_a_value_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(QuantizerError, match=r"config\.model: a value of type object cannot be written to a report"):
        write_record(bare_record(config={"model": object()}), tmp_path / "report.json")
    stage = Stage(name="a", seconds="long")  # type: ignore[arg-type]
    with pytest.raises(QuantizerError, match=r"stages\[0\]\.seconds: expected a number, got 'long'"):
        write_record(bare_record(stages=[stage]), tmp_path / "report.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", [1, 9, 10, 12, 0, None, "11", True])
def test_another_version_is_refused(tmp_path: Path, version: object) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"version": version, "anything": 1}))
    with pytest.raises(QuantizerError, match=r"report\.json: version .* reads version 11 only"):
        read_record(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": None}, r"\.name: expected a string, got None"),
        ({"extra": 1}, r"unknown field 'extra'; known: version, name"),
        ({"model": {"source": "a", "task": "b"}}, r"\.model: missing field 'parameters'"),
        ({"model": {"source": "a", "task": "b", "parameters": 1.5}}, r"\.parameters: expected a whole number, got"),
        ({"scores": {}}, r"\.scores: expected a list, got \{\}"),
        ({"scores": [{"form": "a", "value": "x", "metric": "m"}]}, r"scores\[0\]\.value: expected a number, got 'x'"),
        ({"scores": [{"form": "a", "value": 1, "metric": "m", "interval": [1]}]}, r"interval: expected a list of 2"),
        ({"machine": {"cpu": [1]}}, r"machine\.cpu: expected a string or a whole number or a number or null"),
        ({"versions": []}, r"\.versions: expected an object"),
        ({"covered_share": 10**400}, r"\.covered_share: expected a number"),
        ({"model": {"source": "a", "task": "b", "parameters": 2**63}}, r"\.parameters: .* that fits in 64 bits"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_wrong_field_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**mapping_from_record(bare_record()), **change}))
    with pytest.raises(QuantizerError, match=message):
        read_record(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a JSON file"),
        (b'{"version": 1,', "not a JSON file"),
        (b"[1]", "expected an object with the fields of a run record"),
        (b"\xff\xfe", "cannot be read"),
        (b'{"version": 11}', "missing field 'name', 'created', 'config', 'model'"),
        (b"[" * 200_000, "nested too deep|not a JSON file"),
        (b'{"name": "\\ud800"}', "half a character"),
        (b"9" * 5_000, "not a JSON file .Exceeds the limit"),
    ],
    ids=["empty", "cut", "list", "binary", "version-only", "deep", "surrogate", "digits"],
)
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(QuantizerError, match=message):
        read_record(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuantizerError, match=r"no such file; expected the folder of a finished run"):
        read_record(tmp_path / "report.json")


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")], ids=["ctrl-c", "full"])
def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException | type[BaseException]
) -> None:
    path = write_text_atomic(tmp_path / "report.json", "before")

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(os, "replace", fail)
    expected = KeyboardInterrupt if failure is KeyboardInterrupt else QuantizerError
    with pytest.raises(expected, match=r"^$|cannot write .*No space left on device"):
        write_text_atomic(path, "after")
    assert [found.name for found in tmp_path.iterdir()] == ["report.json"]
    assert path.read_text() == "before"


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(QuantizerError, match=r"report\.json: the folder .*/no does not exist; create it first"):
        write_record(bare_record(), tmp_path / "no" / "report.json")


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
def test_records_are_frozen_keyword_only_and_documented(cls: type) -> None:
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert all(item.kw_only for item in dataclasses.fields(cls))
    documentation = field_documentation(cls)
    assert list(documentation) == [item.name for item in dataclasses.fields(cls)]
    assert all(documentation.values()), f"a field of {cls.__name__} has no text under it"


def test_the_page_of_the_format_is_up_to_date() -> None:
    page, expected = ROOT / "docs" / "report-format.md", format_page()
    advice = "run: python -m quantizer.report.document_format > docs/report-format.md"
    assert page.read_text(encoding="utf-8") == expected, advice
    assert all(f"## {cls.__name__}\n" in expected for cls in (RunRecord, *RECORDS))


def test_ratios_are_float_divided_by_this() -> None:
    entries = latency_entries({"float": [10.0, 12.0, 11.0], "engine": [5.0, 6.0, 5.5]})
    assert [(entry.median_ms, entry.ratio_to_float) for entry in entries] == [(11.0, 1.0), (5.5, 2.0)]
    assert (entries[0].min_ms, entries[0].max_ms) == (10.0, 12.0)
    assert size_entries({"float": 400, "engine": 100})[1].ratio == 4.0


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"engine": [1.0]}, "no entry 'float' for the ratios; expected one among engine"),
        ({"float": []}, "latency of 'float': no times"),
        ({"float": [1.0], "engine": [0.0]}, "latency of 'engine' is 0.0; expected a number above 0"),
        ({"float": [math.nan]}, "latency of 'float' is nan"),
    ],
    ids=["no-float", "no-times", "zero", "nan"],
)
def test_wrong_measurements_are_refused(times: dict[str, list[float]], message: str) -> None:
    with pytest.raises(QuantizerError, match=message):
        latency_entries(times)


def test_which_entries_the_headline_is_about() -> None:
    def named(entries: Any) -> list[str]:
        return [entry.name for entry in pair(entries) or ()]

    entries = size_entries({"other": 3, "engine": 1, "float": 4})
    assert named(entries) == ["engine", "float"]
    unnamed = [dataclasses.replace(entry, name=name) for entry, name in zip(entries, "abc", strict=True)]
    assert named(unnamed) == ["c", "a"]
    assert (pair(()), pair(entries[2:])) == (None, None)


def test_machine_and_versions() -> None:
    machine = collect_machine()
    assert list(machine) == ["cpu", "instructions", "cores", "memory_gib", "os", "python"]
    assert machine["cpu"]
    assert machine["cores"] >= 1  # type: ignore[operator]
    versions = collect_versions(["torch", "no-such-package-here"])
    assert list(versions) == ["torch"]
    record = bare_record(machine=machine, versions=versions)
    assert record_from_mapping(mapping_from_record(record)) == record


def test_the_version_of_torch_names_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    # A CUDA wheel from PyPI is "2.13.0" to the index and "2.13.0+cu130" to itself.
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    assert collect_versions(["torch"]) == {"torch": "2.13.0+cu130"}


@pytest.mark.parametrize("counts", [[], [0, 0], [3, -1]], ids=["none", "zeros", "negative"])
def test_a_histogram_without_values_is_refused(tmp_path: Path, counts: list[int]) -> None:
    values = mapping_from_record(sample_record())
    values["histograms"][0]["counts"] = counts
    (tmp_path / "report.json").write_text(json.dumps(values))
    with pytest.raises(QuantizerError, match=r"histogram of .*: expected counts of 0 or more, and not all of them 0"):
        read_record(tmp_path / "report.json")


@pytest.mark.parametrize("setting", ["exclude: {sites: ['a]}", "", "a", "a: 1\nb: 2", "- a"])
def test_the_setting_of_a_cure_is_one_section(setting: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        Fix(setting=setting, gain_db=1.0, gain_alone_db=2.0)
