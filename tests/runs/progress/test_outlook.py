"""The stages ahead of a command, and what is told of the time that they take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantizer.pipeline.progress import Outlook, earlier_stages, rounded_time
from quantizer.report import Stage

EARLIER = [Stage(name="load", seconds=4.0), Stage(name="export", seconds=24.0), Stage(name="measure", seconds=31.0)]


@pytest.fixture
def _no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that is left does not depend on how busy the machine is."""
    monkeypatch.setattr("quantizer.pipeline.progress.time.perf_counter", lambda: 0.0)


@pytest.mark.usefixtures("_no_time_passes")
def test_stages_are_numbered_and_have_the_times_of_an_earlier_run() -> None:
    outlook = Outlook(["load", "export", "measure"], EARLIER)
    outlook.begin("load")
    assert outlook.head == "[1/3] load"
    assert outlook.left == "1 min left"
    outlook.end()
    outlook.begin("export")
    assert (outlook.head, outlook.expected) == ("[2/3] export", 24.0)
    assert outlook.left == "55 s left"


def test_stages_may_be_left_out_or_come_again() -> None:
    outlook = Outlook(["load", "choose", "export", "measure"])
    heads = []
    for name in ("load", "export", "search", "export", "measure"):
        outlook.begin(name)
        heads.append(outlook.head)
        outlook.end()
    assert heads == ["[1/4] load", "[3/4] export", "[3/4] search", "[3/4] export", "[4/4] measure"]


def test_nothing_is_told_where_nothing_is_known() -> None:
    outlook = Outlook(["load", "export"])
    outlook.begin("load")
    assert outlook.expected is None
    assert outlook.left == ""
    outlook = Outlook()
    outlook.begin("load")
    assert (outlook.head, outlook.left) == ("load", "")


@pytest.mark.usefixtures("_no_time_passes")
def test_what_is_known_of_some_stages_is_the_least_that_is_left() -> None:
    outlook = Outlook(["load", "search", "measure"], EARLIER)
    outlook.begin("load")
    assert outlook.left == "at least 35 s left"


def test_the_estimate_of_the_stage_under_way_is_not_told_twice() -> None:
    outlook = Outlook(["load", "search"], EARLIER)
    outlook.begin("load")
    assert (outlook.expected, outlook.left) == (4.0, "")


def test_a_stage_that_comes_again_takes_what_it_took() -> None:
    outlook = Outlook(["export", "check"])
    outlook.begin("export")
    taken = outlook.end()
    outlook.begin("export")
    assert outlook.expected == pytest.approx(taken)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, ""),
        (3.2, "3 s"),
        (24.0, "25 s"),
        (57.4, "55 s"),
        (58.0, "1 min"),
        (95.0, "1.5 min"),
        (900.0, "15 min"),
        (9000.0, "2.5 h"),
        (72000.0, "20 h"),
    ],
)
def test_estimates_are_rounded_to_what_they_are_worth(seconds: float, words: str) -> None:
    assert rounded_time(seconds) == words


def _report(folder: Path, model: str, seconds: float) -> None:
    folder.mkdir(parents=True)
    stages = [{"name": "export", "seconds": seconds}, {"name": "check", "seconds": 0.5, "parent": "export"}]
    (folder / "report.json").write_text(json.dumps({"model": model, "stages": stages}))


def test_times_come_from_the_folder_itself_or_from_the_last_one_beside_it(tmp_path: Path) -> None:
    def taken() -> list[float]:
        found = earlier_stages(tmp_path / "new", "report.json", lambda report: report["model"] == "mine")
        return [stage.seconds for stage in found]

    assert taken() == []
    _report(tmp_path / "other", "theirs", 1.0)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "report.json").write_text("{")
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "report.json").write_text("[]")
    assert taken() == []
    _report(tmp_path / "before", "mine", 2.0)
    assert taken() == [2.0]
    _report(tmp_path / "new", "mine", 3.0)
    assert taken() == [3.0]
