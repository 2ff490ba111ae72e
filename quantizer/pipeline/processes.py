"""The processes that ``torchrun`` starts for one command: they find each other, and none goes on without the others.

Values that the first of several processes makes alone, as by building and timing engines, and tells the others.

Comparison of the work of all processes of a run, of which each does a part.
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
"""How long the processes wait for all of them to start."""

_PATIENCE = timedelta(days=30)
"""How long a process waits for another one, which may build engines for hours; one that ends is noticed at once."""

_NOTICED_S = 2.0
"""Within so many seconds the system knows of a process that its connections have closed."""


@contextmanager
def process_group() -> Iterator[None]:
    """Let the processes of one ``torchrun`` work together in the block; a process that is the only one just does it.

    Models are on the CPU in a run, so the processes talk by gloo. All but the first print nothing but errors.
    """
    _, size = launched()
    if size == 1:
        yield
        return
    _start(size)
    mine = f"{os.getpid()} {platform.node()}".encode()
    peers = [(node, int(number)) for number, _, node in (one.decode().partition(" ") for one in all_gather_bytes(mine))]
    try:
        with nullcontext() if get_rank() == 0 else _silence(), _saying_who_ended(peers):
            yield
            # All end together: what the first one does last, the others wait for.
            all_gather_bytes(b"")
    except KeyboardInterrupt as stop:
        # torchrun ends all processes by SIGTERM as soon as one has failed; a Ctrl-C ends all at once.
        if type(stop) is KeyboardInterrupt or (ended := _ended(peers)) is None:
            if get_rank() == 0:
                raise
            raise type(stop)(f"rank {get_rank()} of {len(peers)}, and rank 0 says what is kept") from stop
        what = str(stop.args[0]) if stop.args else "nothing was written"
        raise type(stop)(f"{ended} ended before the run was complete; {what}") from stop
    distributed.destroy_process_group()


@contextmanager
def _saying_who_ended(peers: Peers) -> Iterator[None]:
    try:
        yield
    except LostRankError as error:
        if (ended := _ended(peers)) is None:
            raise
        raise LostRankError(
            f"{ended} ended before the run was complete, so that rank {get_rank()} of {len(peers)} ends too: its own "
            "message says why, or that of torchrun. The same command begins anew, with the scores and checkpoints that "
            "are kept beside the folder"
        ) from error


def _start(size: int) -> None:
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise QuantizerError("this torch has no gloo, by which the processes of torchrun talk: start one process")
    # A torch without torch.distributed does not have this.
    from torch.distributed.rendezvous import rendezvous

    try:
        store, rank, count = next(rendezvous("env://", timeout=_MEETING))
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=_PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise QuantizerError(
            f"WORLD_SIZE says that this is one of {size} processes, which do not find each other ({error}): start them "
            "with  torchrun --nproc-per-node 2 --no-python quantizer run CONFIG  or unset WORLD_SIZE for one process"
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


def _ended(peers: Peers) -> str | None:
    """Return the processes of this machine that have ended, in words; None: none has."""
    here = {rank: number for rank, (node, number) in enumerate(peers) if node == platform.node()}
    until = time.monotonic() + _NOTICED_S
    while time.monotonic() < until:
        if ended := [f"rank {rank} (process {number})" for rank, number in here.items() if _has_ended(number)]:
            return " and ".join(ended)
        time.sleep(_NOTICED_S / 100)
    return None


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


Value = TypeVar("Value")


def from_first_rank(make: Callable[[], Value], hint: Any) -> Value:
    """Return what ``make`` returns on the first rank, which alone calls it."""
    if get_world_size() == 1:
        return make()
    told = of_first_rank(lambda: json.dumps(_plain(make())).encode())
    given: Value = decoded(hint, json.loads(told), "what the first rank told")
    return given


@contextmanager
def own_place(folder: Path) -> Iterator[Path]:
    """Yield the folder of a run; on all ranks but the first a temporary one, as the first one writes what remains."""
    if get_rank() == 0:
        yield folder
        return
    with scratch() as beside:
        yield beside / folder.name


def require_room_to_write(folder: Path, size: int, what: str) -> None:
    """Raise if the disk has too little space, on the first rank, the only one whose folder remains."""
    if get_rank() == 0:
        require_room(folder, size, what)


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def require_same_work(settings: str, model: nn.Module, examples: Mapping[str, Sequence[Example]]) -> None:
    """Raise unless all processes have the same settings, weights and samples; all processes must call this."""
    if get_world_size() == 1:
        return
    weights = repr(sorted(Fingerprint.of(model).plain().items()))
    mine = {
        "configuration": settings,
        "weights of the model": hashlib.sha256(weights.encode()).hexdigest(),
        **{f"{purpose} samples": content_of(some) for purpose, some in examples.items()},
    }
    told = [json.loads(one) for one in all_gather_bytes(json.dumps(mine).encode())]
    for rank, other in enumerate(told):
        if others := [name for name in mine if other[name] != told[0][name]]:
            raise QuantizerError(
                f"rank {rank} differs from rank 0 in the {' and '.join(others)}, and all processes of a run do parts "
                "of one work: give them the same files, and seed the function that makes the model, if one does"
            )
