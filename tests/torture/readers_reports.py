"""The files that runs and conversions leave: report.json, config.json of a conversion, and the scores of a search."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

from report.report_samples import sample_record
from rich.console import Console
from tiny_run import tiny_run

from quantizer.pipeline.convert_options import conversion_configs
from quantizer.pipeline.load import load_converted
from quantizer.pipeline.run import convert
from quantizer.report import html_from_record, print_summary, read_record, write_record
from quantizer.utils.files import Store
from torture import mutations
from torture.kinds import Kind, kind

_KEY, _SCORES = ["a search"], [number / 8 for number in range(5)]
_ENTRY = f"scores/{hashlib.sha256(json.dumps(_KEY).encode()).hexdigest()}/entry.json"
_JSON = (mutations.raw, mutations.text, mutations.json_text, mutations.json_text)


def _make_report(folder: Path) -> None:
    write_record(sample_record(), folder / "report.json")


def _read_report(folder: Path) -> None:
    written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    print_summary(folder, Console(file=written))
    written.flush()
    html_from_record(read_record(folder / "report.json")).encode()


def _make_scores(folder: Path) -> None:
    Store(folder / "scores").get(_KEY, lambda: _SCORES)


def _read_scores(folder: Path) -> list[float]:
    scores = Store(folder / "scores")
    scores.get(["another search"], lambda: 0.5)
    return scores.get(_KEY, lambda: _SCORES)


def _make_conversion(folder: Path) -> None:
    (folder / "model").mkdir()
    tiny_run(folder / "model")
    given = {"model": str(folder / "model/model"), "output": folder / "out"}
    given |= {"batch_size": (1, 2, 4), "seq_len": (8, 8, 16), "backend": ("openvino",)}
    convert(conversion_configs(given), folder / "out", False, Console(file=io.StringIO()))


def _read_conversion(folder: Path) -> list[str]:
    converted = load_converted(folder / "out/openvino")
    converted(["the film is good"])
    return [label.encode().decode() for label in converted.labels(["the film is good", "a bad plot"])]


kind(Kind(name="report", make=_make_report, files=("report.json",), how=_JSON, read=_read_report))
kind(Kind(name="scores", make=_make_scores, files=(_ENTRY,), how=_JSON, read=_read_scores, exact=True))
kind(
    Kind(
        name="conversion",
        make=_make_conversion,
        files=("out/openvino/config.json",),
        how=_JSON,
        read=_read_conversion,
    )
)
