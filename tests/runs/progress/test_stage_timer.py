"""What a command prints of its stages: plain lines in a log, a line drawn anew in a terminal, nothing when quiet."""

from __future__ import annotations

import io
import itertools
import threading
import time

import pytest
from rich.console import Console

from quantizer.pipeline.progress import Heartbeat, LateStream, Outlook, StageTimer, console_of
from quantizer.utils.progress import loop, open_loops


def _console(*, terminal: bool = False, quiet: bool = False, width: int = 80) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=width, quiet=quiet, legacy_windows=False), stream


@pytest.fixture
def _no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the stages of a test may take a second, which is printed."""
    monkeypatch.setattr("quantizer.pipeline.progress.time.perf_counter", lambda: 0.0)


def _stages(console: Console) -> StageTimer:
    timer = StageTimer(console, Outlook(["load", "export"]))
    with timer("load"):
        timer.say("  a line")
        with timer("inside"):
            pass
    with timer("export"), loop("rows", unit="batch", total=2) as rows:
        rows.step()
    return timer


@pytest.mark.usefixtures("_no_time_passes")
def test_a_log_has_plain_lines_without_cursor_codes() -> None:
    console, stream = _console()
    timer = _stages(console)
    assert stream.getvalue().splitlines() == ["[1/2] load", "  a line", "[2/2] export"]
    assert [(stage.name, stage.parent) for stage in timer.done] == [
        ("inside", "load"),
        ("load", None),
        ("export", None),
    ]


def test_a_log_tells_what_a_long_stage_took(monkeypatch: pytest.MonkeyPatch) -> None:
    console, stream = _console()
    now = iter([0.0, 24.1])
    monkeypatch.setattr("quantizer.pipeline.progress.time.perf_counter", lambda: next(now))
    with StageTimer(console)("export"):
        pass
    assert stream.getvalue().splitlines() == ["export", "  24.1 s"]


@pytest.mark.usefixtures("_no_time_passes")
def test_a_terminal_keeps_a_line_for_each_stage() -> None:
    console, stream = _console(terminal=True)
    _stages(console)
    kept = stream.getvalue()
    assert "[1/2] load: 0.0 s" in kept
    assert "[2/2] export: 0 s" in kept
    # What is drawn anew is removed in the end, and the cursor is there again.
    assert kept.count("\x1b[?25l") == kept.count("\x1b[?25h") == 2


def test_a_quiet_console_shows_nothing() -> None:
    console, stream = _console(terminal=True, quiet=True)
    before = threading.enumerate()
    _stages(console)
    assert stream.getvalue() == ""
    # One of an earlier test may end.
    assert {*threading.enumerate()} <= {*before}


def test_a_silent_stage_gives_a_sign_of_life() -> None:
    console, stream = _console()
    beats, third = itertools.count(1), threading.Event()

    def words() -> str:
        # The third line begins after the second one was printed.
        if next(beats) == 3:
            third.set()
        return "[1/2] export: 20 s"

    heartbeat = Heartbeat(console, words, seconds=0.05)
    with heartbeat.beating():
        assert third.wait(60)
    assert set(stream.getvalue().splitlines()) == {"  [1/2] export: 20 s"}
    assert len(stream.getvalue().splitlines()) >= 2
    there = stream.getvalue()
    time.sleep(0.1)
    assert stream.getvalue() == there


def test_a_stage_that_speaks_needs_no_sign_of_life() -> None:
    console, stream = _console()
    heartbeat = Heartbeat(console, lambda: "still there", seconds=30.0)
    with heartbeat.beating():
        heartbeat.line_printed()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_ctrl_c_ends_a_stage_at_once(terminal: bool) -> None:
    console, stream = _console(terminal=terminal)
    timer = StageTimer(console, Outlook(["load", "export"]))
    with pytest.raises(KeyboardInterrupt), timer("load"), loop("rows", unit="batch"):
        raise KeyboardInterrupt
    assert timer.done == []
    assert open_loops() == ()
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
    assert stream.getvalue().count("\x1b[?25h") == terminal
    # The next stage is no stage inside it.
    with timer("export"):
        pass
    assert "[2/2] export" in stream.getvalue()


class _Gone(io.StringIO):
    """A terminal that was closed."""

    gone = False

    def write(self, text: str) -> int:
        if self.gone:
            raise OSError("the terminal is gone")
        return super().write(text)


def test_a_terminal_that_is_gone_does_not_hide_why() -> None:
    stream = _Gone()
    timer = StageTimer(Console(file=stream, force_terminal=True, width=80))

    def hung_up() -> None:
        with timer("load"):
            stream.gone = True
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hung_up()


def test_short_work_prints_nothing_and_long_work_prints_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    shown = io.StringIO()
    late = LateStream(shown, seconds=10)
    print("first", file=late)
    assert shown.getvalue() == ""
    now = 110.0
    print("second", file=late)
    assert shown.getvalue() == "first\nsecond\n"


@pytest.mark.parametrize("notebook", [False, True])
def test_a_short_call_prints_nothing(
    notebook: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    displayed: list[object] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: notebook)
    monkeypatch.setattr("rich.jupyter.display", lambda *shown: displayed.append(shown))
    console_of(None).print("a stage")
    console_of(False).print("a stage")
    assert (displayed, capsys.readouterr().err) == ([], "")
