"""Outputs of a model, a proxy or an engine, as one float32 tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load, save

from quantizer.common.distributed import all_gather_bytes, get_world_size, is_mine
from quantizer.common.structure import fields_of
from quantizer.errors import TaskError

Chunk = TypeVar("Chunk")


def first_output(result: object, name: str, place: int = 0) -> torch.Tensor:
    """Return the named output, as a float32 tensor on the CPU.

    Args:
        result: a mapping of names to tensors or arrays (a transformers ``ModelOutput`` is one), a tuple or list, or
            one tensor or array.
        name: the output wanted ("last_hidden_state", "logits").
        place: a mapping without this name gives the entry at this place, a tuple its element there.

    Raises:
        TaskError: there is no tensor or array to take.
    """
    value: object = result
    fields = fields_of(result)
    if fields is not None:
        value = fields[name] if name in fields else next(islice(fields.values(), place, None), None)
    elif isinstance(result, (tuple, list)):
        value = result[place] if place < len(result) else None
    if isinstance(value, torch.Tensor):
        return value.detach().to(device="cpu", dtype=torch.float32)
    if isinstance(value, np.ndarray):
        # NumPy converts to float32, because torch cannot read its bfloat16 extension type.
        return torch.from_numpy(np.array(value, dtype=np.float32))
    raise TaskError(
        f"the model gave {type(result).__name__}, in which there is no tensor or array for {name!r}: expected a "
        f"mapping, a tuple or a tensor"
    )


def dealt(chunks: Iterable[Chunk]) -> Iterator[tuple[int, Chunk]]:
    """Yield those chunks that this process runs, each with its number, from 1."""
    return ((number, chunk) for number, chunk in enumerate(chunks, start=1) if is_mine(number - 1))


def of_all_ranks(rows: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the rows of all processes, each of which has some of them; all processes must call this."""
    if get_world_size() == 1:
        return dict(rows)
    mine = save({str(at): row.clone(memory_format=torch.contiguous_format) for at, row in rows.items()})
    return {int(at): row for told in all_gather_bytes(mine) for at, row in load(told).items()}


def stacked(rows: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """Return rows as one array; those that are shorter along their first axis end in NaN."""
    if all(row.shape == rows[0].shape for row in rows):
        return np.stack(rows)
    longest = max(len(row) for row in rows)
    whole = np.full((len(rows), longest, *rows[0].shape[1:]), np.nan, dtype=np.float32)
    for at, row in enumerate(rows):
        whole[at, : row.shape[0]] = row
    return whole
