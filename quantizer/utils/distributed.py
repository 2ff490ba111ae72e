"""Communication between the processes of one ``torchrun``, as tensors of bytes instead of pickled objects.

All ranks must make the same calls in the same order.
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
"""Number of open ``alone`` blocks."""


def get_world_size() -> int:
    """Return the number of processes; 1 inside of ``alone`` and without ``torch.distributed``."""
    if _ALONE[0] or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


def get_rank() -> int:
    """Return the rank of this process, from 0."""
    return distributed.get_rank() if get_world_size() > 1 else 0


def is_mine(number: int) -> bool:
    """Return whether this rank handles item ``number`` of work, which is distributed round-robin."""
    return number % get_world_size() == get_rank()


@contextmanager
def alone() -> Iterator[None]:
    """Run the block as a single process: it does not communicate, and other ranks need not run it."""
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
    sizes = _gathered(torch.tensor([len(data)], device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.frombuffer(bytearray(data.ljust(longest + 1, b"\0")), dtype=torch.uint8)
    return [
        buffer[: int(size)].cpu().numpy().tobytes()
        for buffer, size in zip(_gathered(padded.to(device)), sizes, strict=True)
    ]


def of_first_rank(make: Callable[[], bytes]) -> bytes:
    """Return on all ranks the result of ``make``, which only the first rank calls, inside of ``alone``.

    The other ranks wait without using their cores.
    """
    if get_rank() > 0:
        return all_gather_bytes(b"")[0]
    with alone():
        result = make()
    return all_gather_bytes(result)[0]


def all_reduce_sum(values: Iterable[float]) -> list[float]:
    """Return the sums over all ranks, added in the order of ranks, so that all ranks get the same result."""
    own_values = np.array(list(values), dtype=np.float64)
    parts = [np.frombuffer(part) for part in all_gather_bytes(own_values.tobytes())]
    return [float(total) for total in np.sum(parts, axis=0)]


def exact_sums(terms: Sequence[Sequence[float]]) -> list[float]:
    """Return the exact sum over all ranks of each list of terms, rounded once.

    The result has the same bits for any distribution of the terms over ranks.
    """
    lengths = np.array([len(summands) for summands in terms], dtype=np.int64)
    values = np.array([value for summands in terms for value in summands], dtype=np.float64)
    gathered: list[list[float]] = [[] for _ in terms]
    for part in all_gather_bytes(lengths.tobytes() + values.tobytes()):
        counts = np.frombuffer(part, dtype=np.int64, count=len(terms))
        rank_values = iter(np.frombuffer(part, dtype=np.float64, offset=counts.nbytes).tolist())
        for summands, count in zip(gathered, counts, strict=True):
            summands += [next(rank_values) for _ in range(count)]
    return [math.fsum(summands) for summands in gathered]


def all_reduce_tensor(values: Tensor, *, largest: bool = False) -> Tensor:
    """Return the sum or maximum over all ranks of tensors of one shape, with the same bits on each rank."""
    reduced = values.clone()
    if get_world_size() > 1:
        with _naming_lost_ranks():
            distributed.all_reduce(reduced, distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM)
    return reduced


def _gathered(own_tensor: Tensor) -> list[Tensor]:
    tensors = [torch.zeros_like(own_tensor) for _ in range(get_world_size())]
    with _naming_lost_ranks():
        distributed.all_gather(tensors, own_tensor)
    return tensors


@contextmanager
def _naming_lost_ranks() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(
            f"another process ended early, so rank {get_rank()} of {get_world_size()} cannot continue: see the message "
            "of that process or of torchrun"
        ) from error
