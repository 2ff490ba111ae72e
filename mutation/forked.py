"""Running tests in a process forked from one that has torch in it already: seconds a mutant are saved."""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import pytest

__all__ = ["TIMED_OUT", "end_on_signals", "preload", "run_forked"]

TIMED_OUT = -1
_PATIENCE = 5
"""How many seconds a process may take for each one of the processor's: others may be at work on the same machine."""
_POLL = 0.02
_PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
"""A plugin of pytest may be preloaded: hypothesis."""


def end_on_signals() -> None:
    """Let Ctrl-C and SIGTERM end this process as an exception does: the tests that it runs end with it.

    A shell that starts a job in the background has it ignore Ctrl-C.
    """

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def preload(modules: Iterable[str]) -> None:
    """Import what no mutant changes and what starts no thread: a thread would be lost in the forked process."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    for module in modules:
        importlib.import_module(module)
    own = [name for name in sys.modules if name.partition(".")[0] == "quantizer"]
    if own:
        raise RuntimeError(f"{own[0]} was imported before the tests: they would not see the mutants")


def run_forked(tree: Path, arguments: list[str], limit: float, log: Path, plugin: Callable[[], object] | None) -> int:
    """Run pytest on the copy in ``tree``; return its exit status, ``TIMED_OUT`` or 128 + the number of a signal.

    ``limit`` is in seconds of the processor. ``plugin`` is made in the forked process, and what the tests print is in
    ``log``.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _become_tests(tree, arguments, limit, log, plugin)
    try:
        return _wait(child, _PATIENCE * limit)
    finally:
        _end(child)


def _become_tests(
    tree: Path, arguments: list[str], limit: float, log: Path, plugin: Callable[[], object] | None
) -> NoReturn:
    status = 3
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        os.environ["PYTHONPATH"] = str(tree)
        own = [] if plugin is None else [plugin()]
        status = int(pytest.main([*_PYTEST, *arguments], plugins=own))
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(child: int, limit: float) -> int:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return TIMED_OUT if code == -signal.SIGXCPU else code if code >= 0 else 128 - code
        time.sleep(_POLL)
    return TIMED_OUT


def _end(child: int) -> None:
    """The process, where it still runs, and whatever it started."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        os.waitpid(child, 0)
    except ChildProcessError:
        return
