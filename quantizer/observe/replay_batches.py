"""Calibration batches stored for another run.

The batches with the smallest hashes of their contents are stored, so the choice does not depend on their order. Their
number depends on the number of samples, within limits.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quantizer.errors import CalibrationError
from quantizer.utils.batches import arguments, copied
from quantizer.utils.distributed import all_gather_bytes, get_rank, get_world_size, is_mine
from quantizer.utils.files import NO_STORE, Store
from quantizer.utils.structure import leaves, mapped

if TYPE_CHECKING:
    from quantizer.observe.statistics import Seen


class Enough(NamedTuple):
    """A number of batches: ``least``, and more until they have ``rows`` samples, up to ``most``.

    The number of samples of a batch is the length of the first axis of its first tensor.
    """

    least: int
    most: int
    rows: int


FEW = Enough(4, 8, 64)
"""Enough to compare settings of the whole model, where a large sample counts twice."""

_LARGE = 2**14
"""The values of a large sample, such as an image of 128 x 128, which shows each range at thousands of positions."""

MANY = Enough(4, 64, 512)
"""Enough to choose integers of weights: with fewer batches they overfit."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
_DIGEST = 16  # bytes
_COUNT = 8  # bytes
_ENTRY = struct.Struct(">QQ")

Batch = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Known:
    """Cached results of plans on some batches, shared by all backends.

    Attributes:
        errors: the errors of their outputs, see ``OutputError``.
        choices: statistics with all choices made by running the batches, by a digest of their inputs.
        store: stores the choices, so that an interrupted command resumes with them.
        channels_last: whether the model takes images with channels last, see ``OutputError.quick``; empty if not tried.
    """

    errors: dict[tuple[str, Hashable, str], float] = field(default_factory=dict)
    choices: dict[str, Seen] = field(default_factory=dict)
    store: Store = NO_STORE
    channels_last: list[bool] = field(default_factory=list)

    def keep(self, digest: str, chosen: Seen) -> None:
        """Store choices, and remove choices of an earlier state of the calibration."""
        for former in [key for key, known in self.choices.items() if known.batches != chosen.batches]:
            del self.choices[former]
        self.choices[digest] = replace(chosen.copy(), kept=None)


class _StoredBatch(NamedTuple):
    """A stored batch: its number of samples, the same with large ones twice, and the ranks that have it."""

    rows: int
    weight: int
    ranks: tuple[int, ...]


class ReplayBatches:
    """Distinct batches, as (positional, keyword) inputs of the model.

    Under ``torch.distributed``, after ``shared``, they are those of all ranks, and iteration yields the part of a rank.
    One rank runs a batch that several ranks have.

    Attributes:
        known: cached results of plans on these batches; copies share it, also for other backends.
        types: the float types that replace the original ones of the inputs, see ``set_types``.
    """

    def __init__(
        self,
        kept: Mapping[bytes, Batch] | None = None,
        enough: Enough = FEW,
        everywhere: Mapping[bytes, _StoredBatch] | None = None,
        known: Known | None = None,
    ) -> None:
        self._kept = dict(kept or {})
        self._enough = enough
        self._everywhere = everywhere
        self.known = Known() if known is None else known
        self.types: Mapping[torch.dtype, torch.dtype] = {}

    def set_types(self, types: Mapping[torch.dtype, torch.dtype]) -> None:
        """Cast inputs to other float types from now on, after the parameters of the model were cast."""
        if types != self.types:
            self.types, self.known = types, Known()

    def __len__(self) -> int:
        return len(self._kept)

    def _all(self) -> Mapping[bytes, _StoredBatch]:
        """Return the batches of all ranks, by their hashes."""
        if self._everywhere is not None and get_world_size() > 1:
            return self._everywhere
        return {key: _StoredBatch(_rows(batch), weight(batch), (get_rank(),)) for key, batch in self._kept.items()}

    def _part(self, keys: Collection[bytes]) -> dict[bytes, Batch]:
        stored = self._all()
        dealt = {key: stored[key].ranks[place % len(stored[key].ranks)] for place, key in enumerate(sorted(keys))}
        return {key: in_types(self._kept[key], self.types) for key, rank in dealt.items() if rank == get_rank()}

    def _only(self, keys: Collection[bytes]) -> ReplayBatches:
        kept = {key: batch for key, batch in self._kept.items() if key in keys}
        everywhere = None if self._everywhere is None else {key: self._everywhere[key] for key in keys}
        return self._with_types(ReplayBatches(kept, everywhere=everywhere, known=self.known))

    def _with_types(self, other: ReplayBatches) -> ReplayBatches:
        other.types = self.types
        return other

    def copy(self) -> ReplayBatches:
        """Return a copy that can store other batches."""
        return self._with_types(ReplayBatches(self._kept, self._enough, known=self.known))

    def few(self) -> ReplayBatches:
        """Return the batches that are enough by ``FEW``."""
        return self._only(_chosen_keys({key: stored.weight for key, stored in self._all().items()}, FEW))

    def wanted(self, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[bytes, Batch] | None:
        """Return the hash and a copy of a batch if it should be stored, else None; call before the model runs."""
        key = batch_hash((args, dict(keywords)))
        rows = {stored: _rows(batch) for stored, batch in self._kept.items()}
        if key in rows or key not in _chosen_keys({**rows, key: _rows((args, keywords))}, self._enough):
            return None
        return key, copied(args, keywords)

    def keep(self, key: bytes, batch: Batch) -> None:
        """Store a batch that ``wanted`` returned."""
        self._kept[key] = batch
        rows = {stored: _rows(batch) for stored, batch in self._kept.items()}
        self._kept = {stored: self._kept[stored] for stored in _chosen_keys(rows, self._enough)}

    @property
    def digest(self) -> str:
        """The hashes of all stored batches, hexadecimal."""
        return b"".join(sorted(self._kept)).hex()

    def shared(self) -> ReplayBatches:
        """Return the batches that one process would store for the data of all ranks; all ranks must call this."""
        per_rank = _gathered(self._kept)
        counts = {key: count for of_rank in per_rank for key, count in of_rank.items()}
        stored = {
            key: _StoredBatch(*counts[key], tuple(rank for rank, of_rank in enumerate(per_rank) if key in of_rank))
            for key in _chosen_keys({key: rows for key, (rows, _) in counts.items()}, self._enough)
        }
        kept = {key: batch for key, batch in self._kept.items() if key in stored}
        return self._with_types(ReplayBatches(kept, self._enough, stored, self.known))

    def halves(self) -> tuple[ReplayBatches, ReplayBatches]:
        """Return two disjoint halves, to choose on and to check on; a single batch is in both."""
        keys = sorted(self._all())
        first = keys[: (len(keys) + 1) // 2]
        return self._only(first), self._only(keys[len(first) :] or first)

    @property
    def everywhere(self) -> int:
        """The number of batches of all ranks together."""
        return len(self._all())

    @property
    def on_every_rank(self) -> bool:
        return all(len(stored.ranks) == get_world_size() for stored in self._all().values())

    def in_turns(self) -> Iterator[Batch | None]:
        """Yield a copy of each batch of all ranks, by hash order; None for a batch that another rank runs."""
        keys = sorted(self._all())
        mine = self._part(keys)
        for key in keys:
            yield copied(*mine[key]) if key in mine else None

    def mine(self) -> dict[Hashable, Batch]:
        """Return the batches that this rank runs, by their hashes, in hash order."""
        mine = self._part(self._all())
        return {key: mine[key] for key in sorted(mine)}

    def __iter__(self) -> Iterator[Batch]:
        # Copies, because a model may change its inputs, and the batches run more than once.
        return iter([copied(*batch) for batch in self.mine().values()])


class DealtBatches:
    """Batches that all ranks receive alike, and that the ranks run in rotation.

    Each rank stores the batches that one process would store, whichever rank runs them.
    """

    def __init__(self, kept: Callable[[], ReplayBatches | None]) -> None:
        self._kept = kept
        self._count = 0
        self._received = hashlib.blake2b(digest_size=_DIGEST)

    def is_mine(self, batch: Any) -> bool:
        """Return whether this rank runs the next batch."""
        if get_world_size() == 1:
            return True
        args, keywords = arguments(batch)
        for leaf in leaves((args, keywords)):
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                raise CalibrationError(
                    f"batch {self._count} contains a {type(leaf).__name__}, which ranks cannot compare; with "
                    "split=True, use batches of tensors and plain values, or remove split=True so that each rank runs "
                    "its own batches"
                )
        self._received.update(batch_hash((args, keywords)))
        self._count += 1
        if is_mine(self._count - 1):
            return True
        store = self._kept()
        if store is not None and (new_batch := store.wanted(args, keywords)) is not None:
            store.keep(*new_batch)
        return False

    def check(self) -> None:
        """Raise unless all ranks received the same batches; all ranks must call this."""
        received = all_gather_bytes(self._count.to_bytes(_COUNT, "big") + self._received.digest())
        for rank, other in enumerate(received):
            if other != received[0]:
                counts = [int.from_bytes(each[:_COUNT], "big") for each in (other, received[0])]
                raise CalibrationError(
                    f"rank {rank} received other batches than rank 0 ({counts[0]} and {counts[1]} batches); with "
                    "split=True, pass the same batches in the same order to all ranks, or remove split=True so that "
                    "each rank runs its own batches"
                )


def in_types(batch: Batch, types: Mapping[torch.dtype, torch.dtype]) -> Batch:
    """Return a batch with its tensors cast to the types that ``types`` maps theirs to."""
    if not types:
        return batch

    def cast(leaf: Any) -> Any:
        return leaf.to(types.get(leaf.dtype, leaf.dtype)) if isinstance(leaf, Tensor) else leaf

    result: Batch = mapped(cast, batch)
    return result


def _rows(batch: Batch) -> int:
    return _first_shape(batch)[0]


def _first_shape(batch: Any) -> tuple[int, ...]:
    return next((tuple(leaf.shape) for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), (1,))


def weight(batch: Any) -> int:
    """Return the number of samples of a batch, twice that of large ones."""
    rows, *others = _first_shape(batch)
    return 2 * rows if math.prod(others) >= _LARGE else rows


def _chosen_keys(rows: Mapping[bytes, int], enough: Enough) -> list[bytes]:
    """Return the smallest keys whose batches are enough; ``rows`` has the number of samples of each."""
    chosen: list[bytes] = []
    for key in sorted(rows):
        full = len(chosen) >= enough.least and sum(rows[other] for other in chosen) >= enough.rows
        if full or len(chosen) == enough.most:
            break
        chosen.append(key)
    return chosen


def _gathered(kept: Mapping[bytes, Batch]) -> list[dict[bytes, tuple[int, int]]]:
    """Return the keys of the batches of every rank, with their numbers of samples and weights."""
    mine = b"".join(key + _ENTRY.pack(_rows(batch), weight(batch)) for key, batch in sorted(kept.items()))
    size = _DIGEST + _ENTRY.size
    return [
        {
            keys[place : place + _DIGEST]: _ENTRY.unpack(keys[place + _DIGEST : place + size])
            for place in range(0, len(keys), size)
        }
        for keys in all_gather_bytes(mine)
    ]


def batch_hash(batch: Any) -> bytes:
    """Return a hash of the content of a batch; an object of unknown content equals no other."""
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, _PLAIN):
            digest.update(repr(leaf).encode())
        else:
            # The contents are unknown, so no two objects count as equal.
            digest.update(f"{type(leaf)} {id(leaf)}".encode())
    return digest.digest()
