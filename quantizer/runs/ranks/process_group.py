"""The processes that ``torchrun`` starts for one command: they find each other, and none goes on without the others."""

from __future__ import annotations

import json
import logging
import os
import platform
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

from torch import distributed

from quantizer.common.distributed import all_gather_bytes
from quantizer.common.distributed import get_rank
from quantizer.common.progress import own_display
from quantizer.errors import LostRankError
from quantizer.errors import QuantizerError

__all__ = ["process_group"]

_PATIENCE = timedelta(days=30)
"""How long a process waits for another one, which may build engines for hours; one that ends is noticed at once."""

_NOTICED_S = 2.0
"""Within so many seconds the system knows of a process that its connections have closed."""


@contextmanager
def process_group() -> Iterator[None]:
    """Let the processes of one ``torchrun`` work together in the block; a process that is the only one just does it.

    Models are on the CPU in a run, so the processes talk by gloo. All but the first print nothing but errors.

    Raises:
        QuantizerError: the processes do not find each other.
        LostRankError: one of them ended before the block was done.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if not size.isdecimal() or int(size) < 2:
        yield
        return
    _start(size)
    peers = [json.loads(told) for told in all_gather_bytes(json.dumps([platform.node(), os.getpid()]).encode())]
    try:
        with nullcontext() if get_rank() == 0 else _silence():
            yield
            # All end together: what the first one does last, the others wait for.
            all_gather_bytes(b"")
    except LostRankError as error:
        raise LostRankError(_with_ended(peers, str(error))) from error
    except KeyboardInterrupt as stop:
        # torchrun ends all processes as soon as one has failed.
        what = str(stop.args[0]) if stop.args else "nothing was written"
        raise type(stop)(_with_ended(peers, what)) from stop
    distributed.destroy_process_group()


def _start(size: str) -> None:
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise QuantizerError("this torch has no gloo, by which the processes of torchrun talk: start one process")
    try:
        distributed.init_process_group("gloo", timeout=_PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise QuantizerError(
            f"WORLD_SIZE says that this is one of {size} processes, which do not find each other ({error}): start them "
            "with  torchrun --nproc-per-node 2 -m quantizer run CONFIG  or unset WORLD_SIZE for one process"
        ) from error


@contextmanager
def _silence() -> Iterator[None]:
    """Show no bars, warnings or logs: those of the first process are the same."""
    logging.disable(logging.WARNING)
    try:
        with own_display(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _with_ended(peers: list[list[str | int]], what: str) -> str:
    """Return a message after the processes that have ended, if some of this machine have."""
    here = {rank: int(number) for rank, (node, number) in enumerate(peers) if node == platform.node()}
    until = time.monotonic() + _NOTICED_S
    while not (ended := [f"rank {rank} (process {number})" for rank, number in here.items() if _has_ended(number)]):
        if time.monotonic() > until:
            return what
        time.sleep(_NOTICED_S / 100)
    return f"{' and '.join(ended)} ended before the run was complete; {what}"


def _has_ended(process: int) -> bool:
    """Return whether a process is gone, or dead and not yet collected by the one that started it."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False
