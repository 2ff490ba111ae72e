"""Signals that end the process, handled like Ctrl-C with the same cleanup."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM: a supervisor or a shutdown ends the process."""

    number = signal.SIGTERM


class HungUp(Terminated):
    """SIGHUP: the process lost its terminal."""

    number = signal.SIGHUP


_KINDS = {kind.number: kind for kind in (Terminated, HungUp)}


@contextmanager
def end_as_on_ctrl_c() -> Iterator[None]:
    """Raise ``Terminated`` on the first SIGTERM or SIGHUP, and ignore later ones, which would stop the cleanup.

    A signal that has another handler, or is ignored as under ``nohup``, keeps its handling.
    """
    process, told = os.getpid(), False

    def end(number: int, _: FrameType | None) -> None:
        nonlocal told
        if os.getpid() != process:
            # A forked worker inherits this handler; its sender expects the default action, which ends the process.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not told:
            told = True
            raise _KINDS[signal.Signals(number)]

    ours: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number in _KINDS if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, end)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
