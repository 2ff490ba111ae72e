"""The processes that ``torchrun`` starts for one command: startup, values from the first rank, and consistency checks.

If one process ends, all others end.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from torch import distributed, nn

from quantizer.errors import LostRankError, QuantizerError
from quantizer.tasks import Example
from quantizer.tasks.datasets.examples import content_of
from quantizer.utils.child_process import launched
from quantizer.utils.distributed import all_gather_bytes, get_rank, get_world_size, of_first_rank
from quantizer.utils.files import require_room, scratch
from quantizer.utils.fingerprint import Fingerprint
from quantizer.utils.plain_values import decoded
from quantizer.utils.progress import own_display

Peers: TypeAlias = list[tuple[str, int]]
"""The machine and the number of each process, by rank."""

_MEETING = timedelta(minutes=5)
"""Timeout of the startup of all processes."""

_PATIENCE = timedelta(days=30)
"""Timeout of communication, because a process may build engines for hours. Ended processes are noticed at once."""

_NOTICED_S = 2.0
"""Seconds within which the system reports a process whose connections have closed."""


@contextmanager
def process_group() -> Iterator[None]:
    """Connect the processes of one ``torchrun`` in the block; do nothing for a single process.

    Models of a run are on the CPU, so the backend is gloo. Ranks other than 0 print only errors.
    """
    _, size = launched()
    if size == 1:
        yield
        return
    _start(size)
    identity = f"{os.getpid()} {platform.node()}".encode()
    peers = [
        (node, int(number)) for number, _, node in (peer.decode().partition(" ") for peer in all_gather_bytes(identity))
    ]
    try:
        with nullcontext() if get_rank() == 0 else _silence(), _saying_who_ended(peers):
            yield
            # Wait until the first process has finished, so that all end together.
            all_gather_bytes(b"")
    except KeyboardInterrupt as stop:
        # torchrun sends SIGTERM to all processes if one fails; Ctrl-C reaches all processes directly.
        if type(stop) is KeyboardInterrupt or (ended := _ended(peers)) is None:
            if get_rank() == 0:
                raise
            raise type(stop)(f"rank {get_rank()} of {len(peers)}; see rank 0 for the files that are kept") from stop
        outcome = str(stop.args[0]) if stop.args else "nothing was written"
        raise type(stop)(f"{ended} ended before the run was complete; {outcome}") from stop
    distributed.destroy_process_group()


@contextmanager
def _saying_who_ended(peers: Peers) -> Iterator[None]:
    try:
        yield
    except LostRankError as error:
        if (ended := _ended(peers)) is None:
            raise
        raise LostRankError(
            f"{ended} ended before the run was complete, so rank {get_rank()} of {len(peers)} also ends; see the "
            "message of that process or of torchrun. Run the same command again to resume from the scores and "
            "checkpoints next to the folder"
        ) from error


def _start(size: int) -> None:
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise QuantizerError("this torch has no gloo backend, which several processes need: start one process")
    # Missing in builds of torch without torch.distributed.
    from torch.distributed.rendezvous import rendezvous

    try:
        store, rank, count = next(rendezvous("env://", timeout=_MEETING))
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=_PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise QuantizerError(
            f"WORLD_SIZE is {size}, but the processes cannot connect ({error}): start them with  torchrun "
            "--nproc-per-node 2 --no-python quantizer run CONFIG  or unset WORLD_SIZE for one process"
        ) from error


@contextmanager
def _silence() -> Iterator[None]:
    """Hide progress bars, warnings and logs, because the first process shows the same."""
    logging.disable(logging.WARNING)
    try:
        with own_display(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _ended(peers: Peers) -> str | None:
    """Return words on the processes of this machine that have ended; None if all run."""
    local = {rank: number for rank, (node, number) in enumerate(peers) if node == platform.node()}
    until = time.monotonic() + _NOTICED_S
    while time.monotonic() < until:
        if ended := [f"rank {rank} (process {number})" for rank, number in local.items() if _has_ended(number)]:
            return " and ".join(ended)
        time.sleep(_NOTICED_S / 100)
    return None


def _has_ended(process: int) -> bool:
    """Return whether a process is gone, or is a zombie."""
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


Value = TypeVar("Value")


def from_first_rank(make: Callable[[], Value], hint: Any) -> Value:
    """Return the result of ``make``, which only the first rank calls."""
    if get_world_size() == 1:
        return make()
    message = of_first_rank(lambda: json.dumps(_plain(make())).encode())
    value: Value = decoded(hint, json.loads(message), "the result of the first rank")
    return value


@contextmanager
def own_place(folder: Path) -> Iterator[Path]:
    """Yield the folder of a run; on other ranks than 0, yield a temporary folder."""
    if get_rank() == 0:
        yield folder
        return
    with scratch() as beside:
        yield beside / folder.name


def require_room_to_write(folder: Path, size: int, what: str) -> None:
    """Raise if the disk has too little free space; only the first rank checks, because only its folder remains."""
    if get_rank() == 0:
        require_room(folder, size, what)


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def require_same_work(settings: str, model: nn.Module, examples: Mapping[str, Sequence[Example]]) -> None:
    """Raise unless all processes have the same settings, weights and samples; all processes must call this."""
    if get_world_size() == 1:
        return
    weights = repr(sorted(Fingerprint.of(model).plain().items()))
    own = {
        "configuration": settings,
        "weights of the model": hashlib.sha256(weights.encode()).hexdigest(),
        **{f"{purpose} samples": content_of(samples) for purpose, samples in examples.items()},
    }
    all_ranks = [json.loads(message) for message in all_gather_bytes(json.dumps(own).encode())]
    for rank, other in enumerate(all_ranks):
        if differences := [name for name in own if other[name] != all_ranks[0][name]]:
            raise QuantizerError(
                f"rank {rank} differs from rank 0 in the {' and '.join(differences)}; all processes of a run must be "
                "equal: use the same files on all machines, and seed the function that returns the model"
            )
