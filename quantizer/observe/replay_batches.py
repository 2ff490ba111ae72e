"""A few of the calibration batches, kept to be run again.

They are those whose contents have the smallest hashes, so that the choice does not depend on the order of batches.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.common.distributed import all_gather_bytes
from quantizer.common.distributed import get_rank

__all__ = ["Batch", "ReplayBatches", "copied"]

_KEPT = 2
_PLAIN = (bool, int, float, str, type(None))
_DIGEST = 16  # bytes

Batch = tuple[tuple[Any, ...], Mapping[str, Any]]


class ReplayBatches:
    """At most ``_KEPT`` different batches, as (positional, keyword) inputs of the model."""

    def __init__(self) -> None:
        self._kept: dict[bytes, Batch] = {}

    def copy(self) -> ReplayBatches:
        """Return a copy that can keep other batches."""
        other = ReplayBatches()
        other._kept = dict(self._kept)
        return other

    def wanted(self, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[bytes, Batch] | None:
        """Return the hash and a copy of a batch for ``keep`` if it is to be kept; call this before the model runs."""
        key = _hash((args, dict(keywords)))
        if key in self._kept or (len(self._kept) == _KEPT and key > max(self._kept)):
            return None
        return key, copied(args, keywords)

    def keep(self, key: bytes, batch: Batch) -> None:
        """Keep a batch that ``wanted`` returned."""
        self._kept[key] = batch
        if len(self._kept) > _KEPT:
            del self._kept[max(self._kept)]

    @property
    def digest(self) -> str:
        """The hashes of all batches that are kept, hexadecimal."""
        return b"".join(sorted(self._kept)).hex()

    def shared(self) -> ReplayBatches:
        """Return this rank's part of the batches that one process would have kept of all ranks' data.

        Each batch is in the part of exactly one rank.
        """
        whole = [_split(keys) for keys in all_gather_bytes(b"".join(sorted(self._kept)))]
        wanted = sorted({key for keys in whole for key in keys})[:_KEPT]
        owners = {key: next(rank for rank, keys in enumerate(whole) if key in keys) for key in wanted}
        part = ReplayBatches()
        part._kept = {key: self._kept[key] for key in wanted if owners[key] == get_rank()}
        return part

    def __iter__(self) -> Iterator[Batch]:
        # Copies, since a model may change its inputs, and the batches are run more than once.
        return iter([copied(*self._kept[key]) for key in sorted(self._kept)])


def copied(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Batch:
    """Return a copy of the inputs: a loader may reuse the tensors, and a model may write into them."""
    leaves, structure = pytree.tree_flatten((args, dict(keywords)))
    own = [leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf) for leaf in leaves]
    batch: Batch = pytree.tree_unflatten(own, structure)
    return batch


def _split(keys: bytes) -> list[bytes]:
    return [keys[place : place + _DIGEST] for place in range(0, len(keys), _DIGEST)]


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
