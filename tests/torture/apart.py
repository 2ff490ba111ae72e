"""A command in a process of its own, forked from one that has its modules, which is ended or whose disk fills up."""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from quantizer.errors import QuantizerError

_FORK = multiprocessing.get_context("fork")
_PATIENCE = 120
_EVENTS = frozenset({"open", "shutil.rmtree", "os.scandir", "os.listdir", "os.chmod", "os.truncate"}) | {
    f"os.{name}" for name in ("rename", "remove", "mkdir", "rmdir", "link", "symlink")
}


@dataclass(frozen=True)
class Stop:
    """What happens to a process.

    Attributes:
        number: the signal that it gets; None: none.
        after: seconds from its begin.
        event: or which of its own accesses to files gets it in the way.
        size: bytes that a file may have at most, as if the disk were full then; None: any.
    """

    number: int | None = None
    after: float = 0.0
    event: int | None = None
    size: int | None = None

    def __str__(self) -> str:
        if self.number is None:
            return "uninterrupted" if self.size is None else f"files of at most {self.size} bytes"
        moment = f"{self.after:.3f} s" if self.event is None else f"file access {self.event}"
        return f"{signal.Signals(self.number).name} at {moment}"


@dataclass(frozen=True)
class End:
    """How a process ended.

    Attributes:
        code: of the command; None: the process was gone before it could tell.
        said: on its stderr.
        crash: the traceback that came out of it; empty: none.
        value: what the function gave.
        seconds: from its begin.
        events: accesses to files.
    """

    code: int | None
    said: str = ""
    crash: str = ""
    value: Any = None
    seconds: float = 0.0
    events: int = 0


def apart(function: Callable[[], Any], folder: Path, stop: Stop | None = None) -> End:
    """Call a function in a fork of this process; an int that it gives is an exit code.

    Args:
        function: what is called.
        folder: accesses below it count.
        stop: what happens to the process; None: nothing.
    """
    stop = stop or Stop()
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=_work, args=(function, folder, stop, theirs))
    process.start()
    theirs.close()
    try:
        if ours.recv() != "begun":
            raise AssertionError("a process tells first that it began")
        if stop.number is not None and stop.event is None and not ours.poll(stop.after):
            os.kill(_id(process), stop.number)
        if not ours.poll(_PATIENCE):
            return End(None, crash=f"did not end within {_PATIENCE} s")
        end: End = ours.recv()
        return end
    except EOFError:
        process.join()
        asked = stop.number is not None and process.exitcode in (-stop.number, 1)
        return End(None, crash="" if asked else f"the process died, exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def mute() -> None:
    """Let nothing come out of this process any more: libraries write past Python, or keep the stream that they had."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def preload(names: Iterable[str]) -> None:
    """Import what the commands import, so that the forks need not."""
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere:
        warnings.simplefilter("ignore")
        with contextlib.redirect_stderr(nowhere):
            for name in sorted(names):
                if not name.startswith("__"):
                    with contextlib.suppress(ImportError, AttributeError):
                        importlib.import_module(name)


def _id(process: Any) -> int:
    found: int = process.pid
    return found


def _work(function: Callable[[], Any], folder: Path, stop: Stop, tell: Connection) -> None:
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    mute()
    said, crash, value, code = io.StringIO(), "", None, 1
    seen = _watch(str(folder), stop)
    tell.send("begun")
    started = time.monotonic()
    if stop.size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (stop.size, resource.RLIM_INFINITY))
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            value = function()
        code = value if isinstance(value, int) else 0
    except QuantizerError as error:
        said.write(f"error: {error}")
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - what comes out is the result
        crash = traceback.format_exc()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tell.send(End(code, said.getvalue(), crash, value, time.monotonic() - started, seen()))
    # What a library does at the end of a process is not asked here.
    os._exit(0)


def _watch(folder: str, stop: Stop) -> Callable[[], int]:
    """Count the accesses to files below a folder, and end the process at the one that was asked for."""
    seen = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in _EVENTS and isinstance(args[0], str | os.PathLike) and os.fspath(args[0]).startswith(folder):
            seen += 1
            if seen == stop.event and stop.number is not None:
                os.kill(os.getpid(), stop.number)

    sys.addaudithook(hook)
    return lambda: seen
