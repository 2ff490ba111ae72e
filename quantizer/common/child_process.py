"""Python processes that this one starts: none of them imports modules of the current folder.

``python -m`` and ``python -c``, and with it ``multiprocessing``, look for every module in the current folder first. A
file named ``socket.py`` or ``torch.py`` there would be executed. Whoever starts a process uses this module.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
