"""A signal to end: once, in the process that it is for, and back to what it was afterwards."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from quantizer.cli.main import HungUp, Terminated, end_as_on_ctrl_c, main
from quantizer.cli.validate import Validate


@pytest.fixture(autouse=True)
def as_in_a_process_of_its_own() -> Iterator[None]:
    """Some library that another test has loaded may handle signals, and a command leaves them to it."""
    former = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in former.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _told(number: int) -> None:
    os.kill(os.getpid(), number)
    # The interpreter comes to it between two steps.
    for _ in range(1000):
        pass


@pytest.mark.parametrize(("number", "kind", "code"), [(signal.SIGTERM, Terminated, 143), (signal.SIGHUP, HungUp, 129)])
def test_a_command_ends_as_on_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, kind: type, code: int
) -> None:
    cleaned: list[type] = []

    def command(*_: object) -> int:
        try:
            _told(number)
        except KeyboardInterrupt as stop:
            # Who cleans up is not disturbed by a supervisor that asks again.
            _told(signal.SIGTERM)
            cleaned.append(type(stop))
            raise
        return 0

    monkeypatch.setattr(Validate, "__call__", command)
    assert main(["validate", "none.yaml"]) == code
    assert capsys.readouterr().err == "terminated: nothing was written\n"
    assert cleaned == [kind]
    assert signal.getsignal(number) is signal.SIG_DFL


def test_what_somebody_else_handles_is_left_to_him() -> None:
    def mine(*_: object) -> None:
        raise AssertionError("never sent")

    handlers: list[Callable[..., None] | signal.Handlers] = [mine, signal.SIG_IGN]
    for handler in handlers:
        signal.signal(signal.SIGHUP, handler)
        try:
            with end_as_on_ctrl_c():
                assert signal.getsignal(signal.SIGHUP) is handler
            assert signal.getsignal(signal.SIGHUP) is handler
        finally:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_worker_that_was_forked_just_ends() -> None:
    with end_as_on_ctrl_c():
        child = os.fork()
        if child == 0:
            try:
                _told(signal.SIGTERM)
            finally:
                os._exit(7)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM


def test_another_thread_sets_no_handler() -> None:
    found: list[object] = []

    def work() -> None:
        with end_as_on_ctrl_c():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]
