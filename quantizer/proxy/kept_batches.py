"""A few of the batches that went through calibration, kept to be run again.

Which ones does not depend on the order they came in: those whose content has the smallest hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["Batch", "KeptBatches"]

_KEPT = 2

Batch = tuple[tuple[Any, ...], Mapping[str, Any]]


class KeptBatches:
    """At most ``_KEPT`` different batches, as (positional, keyword) inputs of the model."""

    def __init__(self) -> None:
        self._kept: dict[bytes, Batch] = {}

    def offer(self, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Keep a batch if it is among those that are kept."""
        key = _hash((args, dict(keywords)))
        if key in self._kept or (len(self._kept) == _KEPT and key > max(self._kept)):
            return
        # Copies: a loader may fill the same tensors again.
        self._kept[key] = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, dict(keywords)))
        if len(self._kept) > _KEPT:
            del self._kept[max(self._kept)]

    def __iter__(self) -> Iterator[Batch]:
        return iter([self._kept[key] for key in sorted(self._kept)])


def _hash(batch: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(type(leaf)).encode())
    return digest.digest()
