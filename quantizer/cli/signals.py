"""A command that the system tells to end ends as it does on Ctrl-C, and leaves as little."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["HungUp", "Terminated", "end_as_on_ctrl_c"]


class Terminated(KeyboardInterrupt):
    """A supervisor or a shutdown ends the process."""

    number = signal.SIGTERM


class HungUp(Terminated):
    """The terminal of the process is gone."""

    number = signal.SIGHUP


_KINDS = {kind.number: kind for kind in (Terminated, HungUp)}


@contextmanager
def end_as_on_ctrl_c() -> Iterator[None]:
    """In the block, the first signal to end raises ``Terminated``; later ones do not disturb what is cleaned up then.

    Signals that somebody else handles or ignores, as ``nohup`` does, are left to him.
    """
    process, told = os.getpid(), False

    def end(number: int, _: FrameType | None) -> None:
        nonlocal told
        if os.getpid() != process:
            # A worker that was forked: who ends it so expects it to be gone.
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
