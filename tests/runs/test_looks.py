"""What the checks of a sweep read is read once for all of its runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantizer.config import DatasetConfig
from quantizer.errors import TaskError
from quantizer.pipeline import preflight as run_ready
from quantizer.pipeline.preflight_checks import ReadCache
from quantizer.tasks.datasets.examples import load_examples


def test_data_is_read_once_for_runs_of_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "".join(f"word {n},{n % 2}\n" for n in range(20)))
    read = []

    def counted(*place: object) -> object:
        read.append(place)
        return whole(*place)

    whole = run_ready.all_examples
    monkeypatch.setattr(run_ready, "all_examples", counted)
    cache = ReadCache()
    for count in range(1, 11):
        section = DatasetConfig(name="text-csv", path=str(path), samples=count, offset=count)
        assert run_ready._examples("calibration", section, cache) == load_examples(
            "text-csv", path=path, samples=count, offset=count
        )
    assert len(read) == 1
    with pytest.raises(TaskError, match=r"data\.calibration: .* has 20 samples, fewer than"):
        run_ready._examples("calibration", DatasetConfig(name="text-csv", path=str(path), samples=99), cache)


def test_an_error_is_raised_each_time_and_found_once() -> None:
    asked = []

    def missing() -> None:
        asked.append(1)
        raise TaskError("it is missing")

    cache = ReadCache()
    for _ in range(3):
        with pytest.raises(TaskError, match="it is missing"):
            cache.once("model", missing)
    assert len(asked) == 1
