"""Python processes that this package starts, and interrupts inside C++ code.

``python -m``, ``python -c`` and ``multiprocessing`` search the current folder first, so a file ``socket.py`` or
``torch.py`` there would be executed. The functions of this file start processes without that folder. They also raise
interrupts again that libraries swallow, and read the rank that ``torchrun`` sets.
"""

from __future__ import annotations

import os
import signal
import site
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


def python_command(module: str, *words: object) -> list[str]:
    """Return the command that runs a module in a new Python process; start it with ``child_environment()``."""
    return [sys.executable, "-P", "-m", module, *map(str, words)]


def child_environment() -> dict[str, str]:
    """Return an environment in which a child process finds this package, but no modules of the current folder."""
    root = str(Path(__file__).resolve().parents[2])
    # An empty entry would be the current folder.
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    # Python finds an installed package by itself; in PYTHONPATH its folder would come before the standard library.
    if root not in (*site.getsitepackages(), site.getusersitepackages()):
        entries = [root, *entries]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entries), "PYTHONSAFEPATH": "1"}


@contextmanager
def safe_children() -> Iterator[None]:
    """Give processes that a library starts inside the block the environment of ``child_environment``."""
    names = ("PYTHONPATH", "PYTHONSAFEPATH")
    before = {name: os.environ.get(name) for name in names}
    safe = child_environment()
    os.environ.update({name: safe[name] for name in names})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupts_end_the_block() -> Iterator[None]:
    """Raise at the end of the block an interrupt that code inside it swallowed.

    torch's export and compiler run Python from C++ and catch its exceptions, so a Ctrl-C can be lost. Signal handlers
    act as before. The first exception of a handler is raised again where the block ends in another way. Outside of the
    main thread, where no handlers run, nothing is done.
    """
    raised: list[BaseException] = []

    def recording(handler: Callable[[int, FrameType | None], object]) -> Callable[[int, FrameType | None], None]:
        def handle(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as stop:
                raised.append(stop)
                raise

        return handle

    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in _INTERRUPTS:
            handler = signal.getsignal(number)
            if callable(handler):
                previous[number] = handler
                signal.signal(number, recording(handler))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if raised:
            # The interrupt replaces its consequences.
            raise raised[0] from None


def launched() -> tuple[str, int]:
    """Return the rank (``?`` if unknown) and the number of processes that the launcher set, 0 and 1 without one."""
    size = os.environ.get("WORLD_SIZE", "1")
    count = int(size) if size.isdecimal() else 1
    return (os.environ.get("RANK", "?"), count) if count > 1 else ("0", 1)
