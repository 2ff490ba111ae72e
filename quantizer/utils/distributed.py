"""Communication between the processes of one ``torchrun``, by tensors of bytes rather than pickled objects.

A call that communicates must be made by all ranks, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, distributed

from quantizer.errors import LostRankError

_ALONE = [0]
"""How many blocks of ``alone`` are open."""


def get_world_size() -> int:
    """Return the number of processes; 1 if ``torch.distributed`` is not initialised, and inside of ``alone``."""
    if _ALONE[0] or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


def get_rank() -> int:
    """Return the rank of this process, from 0."""
    return distributed.get_rank() if get_world_size() > 1 else 0


def is_mine(number: int) -> bool:
    """Return whether this rank does the part with that number, from 0, of work whose parts are dealt out in turn."""
    return number % get_world_size() == get_rank()


@contextmanager
def alone() -> Iterator[None]:
    """Do the block as one process does: nothing in it communicates, and the other ranks need not come to it."""
    _ALONE[0] += 1
    try:
        yield
    finally:
        _ALONE[0] -= 1


def all_gather_bytes(data: bytes) -> list[bytes]:
    """Return the bytes of every rank, in the order of ranks; all ranks must call this."""
    if get_world_size() == 1:
        return [data]
    # NCCL supports only tensors on a GPU.
    device = torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
    sizes = _all(torch.tensor([len(data)], device=device))
    room = max(int(size) for size in sizes)
    mine = torch.frombuffer(bytearray(data.ljust(room + 1, b"\0")), dtype=torch.uint8)
    return [
        whole[: int(size)].cpu().numpy().tobytes() for whole, size in zip(_all(mine.to(device)), sizes, strict=True)
    ]


def of_first_rank(make: Callable[[], bytes]) -> bytes:
    """Return on all ranks what ``make`` returns on the first one, the only one that calls it, as if it were alone.

    The others wait without using their cores.
    """
    if get_rank() > 0:
        return all_gather_bytes(b"")[0]
    with alone():
        made = make()
    return all_gather_bytes(made)[0]


def all_reduce_sum(values: Iterable[float]) -> list[float]:
    """Return the sums over all ranks, added in the order of ranks, so that all ranks get the same result."""
    mine = np.array(list(values), dtype=np.float64)
    parts = [np.frombuffer(part) for part in all_gather_bytes(mine.tobytes())]
    return [float(total) for total in np.sum(parts, axis=0)]


def exact_sums(terms: Sequence[Sequence[float]]) -> list[float]:
    """Return for each place the exact sum of its terms of all ranks, rounded once.

    One process gets the same bits of all terms, however they are spread over ranks.
    """
    lengths = np.array([len(of_place) for of_place in terms], dtype=np.int64)
    values = np.array([value for of_place in terms for value in of_place], dtype=np.float64)
    found: list[list[float]] = [[] for _ in terms]
    for part in all_gather_bytes(lengths.tobytes() + values.tobytes()):
        counts = np.frombuffer(part, dtype=np.int64, count=len(terms))
        given = iter(np.frombuffer(part, dtype=np.float64, offset=counts.nbytes).tolist())
        for of_place, count in zip(found, counts, strict=True):
            of_place += [next(given) for _ in range(count)]
    return [math.fsum(of_place) for of_place in found]


def all_reduce_tensor(values: Tensor, *, largest: bool = False) -> Tensor:
    """Return the sum of the tensors of all ranks, which has the same bits on all of them; they must be alike."""
    whole = values.clone()
    if get_world_size() > 1:
        with _telling_of_lost_ranks():
            distributed.all_reduce(whole, distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM)
    return whole


def _all(mine: Tensor) -> list[Tensor]:
    every = [torch.zeros_like(mine) for _ in range(get_world_size())]
    with _telling_of_lost_ranks():
        distributed.all_gather(every, mine)
    return every


@contextmanager
def _telling_of_lost_ranks() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(
            f"another process ended before the work was done, and rank {get_rank()} of {get_world_size()} cannot go on "
            "without it: its own message says why, or that of torchrun"
        ) from error
