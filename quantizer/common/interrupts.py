"""Interrupts that other people's code may swallow, raised again after it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupts_end_the_block() -> Iterator[None]:
    """Raise at the end of the block an interrupt that came in it and was swallowed there.

    torch's export and compiler run Python from C++ and catch what it raises, so that a Ctrl-C can be lost in them and
    the work goes on. Handlers of signals act as before; the first exception that one of them raised is raised once
    more where the block ends in another way. Outside of the main thread, where no handler runs, nothing is done.
    """
    raised: list[BaseException] = []

    def noting(handler: Callable[[int, FrameType | None], object]) -> Callable[[int, FrameType | None], None]:
        def handle(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as stop:
                raised.append(stop)
                raise

        return handle

    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if callable(handler):
                previous[number] = handler
                signal.signal(number, noting(handler))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if raised:
            # It replaces whatever the swallowed interrupt led to.
            raise raised[0] from None
