"""A measurement in a fresh process: what it crashes or holds is not this process's."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from quantizer.common.child_process import child_environment, python_command
from quantizer.engines.backends import backend as registered
from quantizer.engines.base import built_here, note_digests
from quantizer.errors import EngineError


def read_built() -> None:
    """Take over, in the process that was started, what the other one has built."""
    note_digests(json.load(sys.stdin))


def in_own_process(module: str, backend: str, words: Sequence[object], *, doing: str, timeout_s: float) -> Any:
    """Run a module with arguments, and return the JSON of the last line that it prints.

    The module reads from its stdin which native code this process has built (``read_built``).

    Args:
        module: the module; its first two arguments are the module that registers the backend, and the backend's name.
        backend: a name from ``backends``.
        words: the further arguments.
        doing: what it does, for messages.
        timeout_s: seconds until the process is given up.
    """
    command = python_command(module, type(registered(backend)).__module__, backend, *words)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            input=json.dumps(built_here()),
            env=child_environment(),
        )
    except OSError as error:
        raise EngineError(f"{doing} failed: its process cannot start ({error.strerror or error})") from error
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{doing} took more than {timeout_s:g} s") from error
    if done.returncode < 0:
        raise EngineError(f"{doing} crashed: {signal.strsignal(-done.returncode)} (signal {-done.returncode})")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise EngineError(f"{doing} failed: {lines[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
