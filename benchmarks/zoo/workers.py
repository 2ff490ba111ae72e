"""Each subject in a process of its own, several at once, each with a limit of time and of memory."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from quantizer.utils.child_process import safe_children

__all__ = ["Limits", "Work", "rows_of"]

_PRELOADED = ["torch", "transformers", "transformers.models.auto.modeling_auto", "quantizer", "stages", "warm"]
Work = Callable[[str, Callable[[str, Any], None]], None]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds and GiB of address space that one subject may take, and how many run at once."""

    seconds: float
    gib: float
    at_once: int


@dataclass
class _Running:
    key: str
    process: BaseProcess
    facts: Connection
    started: float
    row: dict[str, Any] = field(default_factory=dict)


def rows_of(keys: Sequence[str], work: Work, limits: Limits) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each key with its row as it ends, in any order; a row that was cut off has ``ended``, the reason.

    ``work`` is a function of a module that is called with a key and with what receives its facts.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    waiting, running = list(reversed(keys)), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < limits.at_once:
                key = waiting.pop()
                facts, told = context.Pipe(duplex=False)
                process = context.Process(target=_limited, args=(work, key, told, limits.gib), daemon=True)
                with safe_children():
                    process.start()
                told.close()
                running.append(_Running(key, process, facts, time.monotonic()))
            ready = wait([one.facts for one in running], timeout=1.0)
            for one in list(running):
                over = time.monotonic() - one.started > limits.seconds
                if (one.facts in ready and not _told(one)) or over:
                    if over:
                        one.row["ended"] = f"not done after {limits.seconds:.0f} s"
                    running.remove(one)
                    yield one.key, _ended(one)
    finally:
        for one in running:
            one.process.kill()


def _told(one: _Running) -> bool:
    """Take a fact; False if there are no more."""
    try:
        name, value = one.facts.recv()
    except EOFError:
        return False
    one.row[name] = value
    return True


def _ended(one: _Running) -> dict[str, Any]:
    if "ended" in one.row:
        one.process.kill()
    one.process.join()
    one.facts.close()
    if one.process.exitcode and "ended" not in one.row:
        one.row["ended"] = f"its process ended with {one.process.exitcode}"
    return {**one.row, "seconds": round(time.monotonic() - one.started, 1)}


def _limited(work: Work, key: str, told: Connection, gib: float) -> None:
    import logging
    import warnings

    import torch

    # Graphs and progress bars of libraries, also of those in C, would hide the lines of the rows.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    resource.setrlimit(resource.RLIMIT_AS, (int(gib * 2**30), int(gib * 2**30)))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    work(key, lambda name, value: told.send((name, value)))
    told.send(("peak_gib", round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)))
    told.close()
