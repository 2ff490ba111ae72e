"""Communication between the processes of one ``torchrun``, by tensors of bytes rather than pickled objects."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch import distributed

__all__ = ["all_gather_bytes", "get_rank", "get_world_size", "all_reduce_sum"]


def get_world_size() -> int:
    """Return the number of processes; 1 if ``torch.distributed`` is not initialised."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def get_rank() -> int:
    """Return the rank of this process, from 0."""
    return distributed.get_rank() if get_world_size() > 1 else 0


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


def all_reduce_sum(values: Iterable[float]) -> list[float]:
    """Return the sums over all ranks, added in the order of ranks, so that all ranks get the same result."""
    mine = np.array(list(values), dtype=np.float64)
    parts = [np.frombuffer(part) for part in all_gather_bytes(mine.tobytes())]
    return [float(total) for total in np.sum(parts, axis=0)]


def _all(mine: Tensor) -> list[Tensor]:
    every = [torch.zeros_like(mine) for _ in range(get_world_size())]
    distributed.all_gather(every, mine)
    return every
