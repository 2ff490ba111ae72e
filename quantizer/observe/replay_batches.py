"""A few of the calibration batches, kept to be run again.

They are those whose contents have the smallest hashes, so that the choice does not depend on the order of batches: as
many as have enough rows together, within bounds.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.common.distributed import all_gather_bytes
from quantizer.common.distributed import get_rank

__all__ = ["FEW", "MANY", "Batch", "Enough", "ReplayBatches", "copied"]


class Enough(NamedTuple):
    """A number of batches: ``least``, and so many more that they have ``rows`` together, up to ``most``.

    The rows of a batch are the length of the first axis of its first tensor.
    """

    least: int
    most: int
    rows: int


FEW = Enough(4, 8, 64)
"""To compare settings of the whole model."""

MANY = Enough(4, 64, 512)
"""To choose the codes of weights: with a few they fit these batches and no others."""

_PLAIN = (bool, int, float, str, type(None))
_DIGEST = 16  # bytes
_COUNT = 8  # bytes

Batch = tuple[tuple[Any, ...], Mapping[str, Any]]


class ReplayBatches:
    """Different batches, as (positional, keyword) inputs of the model.

    Under ``torch.distributed`` a part of those that all ranks keep together, after ``shared``.
    """

    def __init__(self, kept: Mapping[bytes, Batch] | None = None, enough: Enough = FEW) -> None:
        self._kept = dict(kept or {})
        self._enough = enough

    def __len__(self) -> int:
        return len(self._kept)

    def copy(self) -> ReplayBatches:
        """Return a copy that can keep other batches."""
        return ReplayBatches(self._kept, self._enough)

    def few(self) -> ReplayBatches:
        """Return those that would have been kept if a few had been enough."""
        rows = {key: _rows(batch) for key, batch in self._kept.items()}
        return ReplayBatches({key: self._kept[key] for key in _taken(rows, FEW)})

    def wanted(self, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[bytes, Batch] | None:
        """Return the hash and a copy of a batch for ``keep`` if it is to be kept; call this before the model runs."""
        key = _hash((args, dict(keywords)))
        rows = {kept: _rows(batch) for kept, batch in self._kept.items()}
        if key in rows or key not in _taken({**rows, key: _rows((args, keywords))}, self._enough):
            return None
        return key, copied(args, keywords)

    def keep(self, key: bytes, batch: Batch) -> None:
        """Keep a batch that ``wanted`` returned."""
        self._kept[key] = batch
        rows = {kept: _rows(batch) for kept, batch in self._kept.items()}
        self._kept = {kept: self._kept[kept] for kept in _taken(rows, self._enough)}

    @property
    def digest(self) -> str:
        """The hashes of all batches that are kept, hexadecimal."""
        return b"".join(sorted(self._kept)).hex()

    def shared(self) -> ReplayBatches:
        """Return this rank's part of the batches that one process would have kept of all ranks' data.

        Each batch is in the part of exactly one rank.
        """
        whole = _gathered(self._kept)
        wanted = _taken({key: rows for of_rank in whole for key, rows in of_rank.items()}, self._enough)
        owners = {key: next(rank for rank, of_rank in enumerate(whole) if key in of_rank) for key in wanted}
        return ReplayBatches({key: self._kept[key] for key in wanted if owners[key] == get_rank()}, self._enough)

    def halves(self) -> tuple[ReplayBatches, ReplayBatches]:
        """Return two parts without a common batch, to choose on and to check on; with one batch both are that one.

        Under ``torch.distributed`` each is this rank's part of what one process would have: all ranks must call this.
        """
        every = sorted(key for of_rank in _gathered(self._kept) for key in of_rank)
        first = set(every[: (len(every) + 1) // 2])
        second = set(every) - first or first
        one, other = ({key: self._kept[key] for key in self._kept if key in half} for half in (first, second))
        return ReplayBatches(one), ReplayBatches(other)

    @property
    def everywhere(self) -> int:
        """The number of batches of all ranks together: all ranks must read this."""
        return sum(map(len, _gathered(self._kept)))

    def in_turns(self) -> Iterator[Batch | None]:
        """Yield a copy of each batch that all ranks keep, in the order of their hashes; None for one of another rank.

        The batches must be this rank's part of them, see ``shared``.
        """
        for key in sorted(key for of_rank in _gathered(self._kept) for key in of_rank):
            yield copied(*self._kept[key]) if key in self._kept else None

    def __iter__(self) -> Iterator[Batch]:
        # Copies, since a model may change its inputs, and the batches are run more than once.
        return iter([copied(*self._kept[key]) for key in sorted(self._kept)])


def copied(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Batch:
    """Return a copy of the inputs: a loader may reuse the tensors, and a model may write into them."""
    leaves, structure = pytree.tree_flatten((args, dict(keywords)))
    own = [leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf) for leaf in leaves]
    batch: Batch = pytree.tree_unflatten(own, structure)
    return batch


def _rows(batch: Batch) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return len(tensors[0]) if tensors else 1


def _taken(rows: Mapping[bytes, int], enough: Enough) -> list[bytes]:
    """Return the smallest keys whose batches are enough together; ``rows`` has the rows of each."""
    taken: list[bytes] = []
    for key in sorted(rows):
        full = len(taken) >= enough.least and sum(rows[other] for other in taken) >= enough.rows
        if full or len(taken) == enough.most:
            break
        taken.append(key)
    return taken


def _gathered(kept: Mapping[bytes, Batch]) -> list[dict[bytes, int]]:
    """Return keys and rows of the batches of every rank."""
    mine = b"".join(key + _rows(batch).to_bytes(_COUNT, "big") for key, batch in sorted(kept.items()))
    entry = _DIGEST + _COUNT
    return [
        {
            keys[place : place + _DIGEST]: int.from_bytes(keys[place + _DIGEST : place + entry], "big")
            for place in range(0, len(keys), entry)
        }
        for keys in all_gather_bytes(mine)
    ]


def _hash(batch: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, _PLAIN):
            digest.update(repr(leaf).encode())
        else:
            # The contents are unknown, so that no two objects count as equal.
            digest.update(f"{type(leaf)} {id(leaf)}".encode())
    return digest.digest()
