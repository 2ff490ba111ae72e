"""Progress of loops: one bar at a time, none without a terminal, none where a command shows its own."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import pytest

from quantizer.utils.progress import counted, loop, open_loops, own_display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    # Not a fixture: between its set-up and the test, pytest puts its own stream back.
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    return made


def test_a_terminal_has_a_bar_and_never_two(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    with counted(range(3), "outside", unit="step") as outer:
        for _ in outer:
            with counted(range(2), "inside", unit="batch") as inner:
                assert list(inner) == [0, 1]
    assert "outside" in terminal.getvalue()
    assert "inside" not in terminal.getvalue()
    with loop("next", unit="step"):
        pass
    assert "next" in terminal.getvalue()


def test_without_a_terminal_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    with counted(range(3), "calibration", unit="batch") as steps:
        assert len(list(steps)) == 3
    assert plain.getvalue() == ""
    with counted(range(3), "calibration", unit="batch", show=True) as steps:
        list(steps)
    assert "calibration" in plain.getvalue()


def test_the_item_under_way_is_named() -> None:
    with counted(["openvino int8", "torch int8"], "candidates", unit="engine", note="now {}".format) as steps:
        said = [str(open_loops()[0]) for _ in steps]
    assert said == ["engine 0 of 2, now openvino int8", "engine 1 of 2, now torch int8"]


def test_a_command_with_its_own_display_has_no_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    with own_display(), loop("search", unit="try") as tries, counted([1, 2], "rows", unit="batch") as steps:
        tries.step("half of them")
        next(steps)
        assert [str(opened) for opened in open_loops()] == ["try 1, half of them", "batch 0 of 2"]
        next(steps)
        assert str(open_loops()[-1]) == "batch 1 of 2"
    assert terminal.getvalue() == ""


def test_what_raises_in_a_loop_leaves_none_open() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 1

    def broken() -> None:
        with counted(endless(), "endless", unit="step") as steps:
            for _ in steps:
                assert open_loops()[0].total is None
                raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        broken()
    assert open_loops() == ()
