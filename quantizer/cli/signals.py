"""Signals that end the process, handled as Ctrl-C is, with the same cleanup."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["HungUp", "Terminated", "end_as_on_ctrl_c"]


class Terminated(KeyboardInterrupt):
    """Request to end the process, from a supervisor or a shutdown."""

    number = signal.SIGTERM


class HungUp(Terminated):
    """Loss of the terminal of the process."""

    number = signal.SIGHUP


_KINDS = {kind.number: kind for kind in (Terminated, HungUp)}


@contextmanager
def end_as_on_ctrl_c() -> Iterator[None]:
    """Raise ``Terminated`` on the first signal to end; ignore later ones, which would stop the cleanup.

    Signals that have another handler, or are ignored, as under ``nohup``, stay as they are.
    """
    process, told = os.getpid(), False

    def end(number: int, _: FrameType | None) -> None:
        nonlocal told
        if os.getpid() != process:
            # In a forked worker the signal keeps its default action: its sender expects the process to end.
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
