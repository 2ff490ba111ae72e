"""Python processes that this one starts: none of them imports modules of the current folder.

``python -m`` and ``python -c``, and with it ``multiprocessing``, look for every module in the current folder first. A
file named ``socket.py`` or ``torch.py`` there would be executed. Whoever starts a process uses this module.

Interrupts that other people's code may swallow, raised again after it.

What a launcher such as ``torchrun`` tells this process in its environment.
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
    """Return the command that runs a module in a fresh Python process; start it with ``child_environment()``."""
    return [sys.executable, "-P", "-m", module, *map(str, words)]


def child_environment() -> dict[str, str]:
    """Return the environment of such a process, in which it finds this package; its own children are as safe."""
    root = str(Path(__file__).resolve().parents[2])
    # An empty entry would be the current folder.
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    # Python finds an installed package by itself; in PYTHONPATH its folder would come before the standard library.
    if root not in (*site.getsitepackages(), site.getusersitepackages()):
        entries = [root, *entries]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entries), "PYTHONSAFEPATH": "1"}


@contextmanager
def safe_children() -> Iterator[None]:
    """Let processes that a library starts inside the block be as safe: they inherit the environment."""
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


def launched() -> tuple[str, int]:
    """Return the rank of this process as it is told, ``?`` if it is not, and the number of processes, 1 by itself."""
    size = os.environ.get("WORLD_SIZE", "1")
    count = int(size) if size.isdecimal() else 1
    return (os.environ.get("RANK", "?"), count) if count > 1 else ("0", 1)
