"""Steps of a training that several processes take together, each with its rows of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from quantizer.common.distributed import all_reduce_tensor, get_rank, get_world_size

Row = TypeVar("Row")


def own_rows(rows: Sequence[Row]) -> tuple[Sequence[Row], float]:
    """Return this process's rows of a batch, and their share of it; of fewer rows than processes each has all."""
    size = get_world_size()
    if len(rows) < size:
        return rows, 1 / size
    mine = rows[get_rank() :: size]
    return mine, len(mine) / len(rows)


def sum_gradients(parameters: Sequence[Tensor], share: float) -> None:
    """Replace gradients by their sums over all processes, each times its share; all processes must call this.

    A parameter that has no gradient in any process keeps none.
    """
    if get_world_size() == 1:
        return
    with torch.no_grad():
        reached = all_reduce_tensor(torch.tensor([float(parameter.grad is not None) for parameter in parameters]))
        used = [parameter for parameter, count in zip(parameters, reached, strict=True) if count]
        if not used:
            return
        mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in used]
        summed = all_reduce_tensor(torch.cat([gradient.flatten() * share for gradient in mine]))
        for parameter, part in zip(used, torch.split(summed, [p.numel() for p in used]), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype, copy=True)
