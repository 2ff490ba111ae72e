"""A few of the calibration batches, kept to be run again.

They are those whose contents have the smallest hashes, so that the choice does not depend on the order of batches: as
many as have enough rows together, within bounds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quantizer.errors import CalibrationError
from quantizer.utils.batches import arguments, copied
from quantizer.utils.distributed import all_gather_bytes, get_rank, get_world_size, is_mine
from quantizer.utils.structure import leaves, mapped

if TYPE_CHECKING:
    from quantizer.observe.statistics import Seen


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

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
_DIGEST = 16  # bytes
_COUNT = 8  # bytes

Batch = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Known:
    """The findings of plans on some batches, whatever their backend.

    Attributes:
        errors: the errors of their outputs, see ``OutputError``.
        choices: statistics with all that was chosen by running the batches, by a digest of what the choices depend on.
    """

    errors: dict[tuple[str, Hashable, str], float] = field(default_factory=dict)
    choices: dict[str, Seen] = field(default_factory=dict)

    def keep(self, digest: str, chosen: Seen) -> None:
        """Keep choices, and forget those for other statistics than these: calibration has gone on since."""
        for former in [key for key, seen in self.choices.items() if seen.batches != chosen.batches]:
            del self.choices[former]
        self.choices[digest] = replace(chosen.copy(), kept=None)


class _Held(NamedTuple):
    """A batch that is kept: its rows, and the ranks that have it."""

    rows: int
    ranks: tuple[int, ...]


class ReplayBatches:
    """Different batches, as (positional, keyword) inputs of the model.

    Under ``torch.distributed``, after ``shared``, they are those of all ranks, and an iteration gives a rank its part
    of them. A batch that several ranks have is dealt out to one of them.

    Attributes:
        known: what is known of plans on these batches; copies share it, those of other backends too.
        types: the float types in which the model is given now what it was given in another one, see ``set_types``.
    """

    def __init__(
        self,
        kept: Mapping[bytes, Batch] | None = None,
        enough: Enough = FEW,
        everywhere: Mapping[bytes, _Held] | None = None,
        known: Known | None = None,
    ) -> None:
        self._kept = dict(kept or {})
        self._enough = enough
        self._everywhere = everywhere
        self.known = Known() if known is None else known
        self.types: Mapping[torch.dtype, torch.dtype] = {}

    def set_types(self, types: Mapping[torch.dtype, torch.dtype]) -> None:
        """Give the model floats of other types from now on: its parameters were cast since the batches were kept."""
        if types != self.types:
            self.types, self.known = types, Known()

    def __len__(self) -> int:
        return len(self._kept)

    def _all(self) -> Mapping[bytes, _Held]:
        """Return the batches of all ranks, by their hashes."""
        if self._everywhere is not None and get_world_size() > 1:
            return self._everywhere
        return {key: _Held(_rows(batch), (get_rank(),)) for key, batch in self._kept.items()}

    def _part(self, keys: Collection[bytes]) -> dict[bytes, Batch]:
        """Return the batches among ``keys`` that this rank runs."""
        held = self._all()
        dealt = {key: held[key].ranks[place % len(held[key].ranks)] for place, key in enumerate(sorted(keys))}
        return {key: in_types(self._kept[key], self.types) for key, rank in dealt.items() if rank == get_rank()}

    def _only(self, keys: Collection[bytes]) -> ReplayBatches:
        """Return those among ``keys``."""
        kept = {key: batch for key, batch in self._kept.items() if key in keys}
        held = None if self._everywhere is None else {key: self._everywhere[key] for key in keys}
        return self._with_types(ReplayBatches(kept, everywhere=held, known=self.known))

    def _with_types(self, other: ReplayBatches) -> ReplayBatches:
        other.types = self.types
        return other

    def copy(self) -> ReplayBatches:
        """Return a copy that can keep other batches."""
        return self._with_types(ReplayBatches(self._kept, self._enough, known=self.known))

    def few(self) -> ReplayBatches:
        """Return those that would have been kept if a few had been enough."""
        return self._only(_taken({key: held.rows for key, held in self._all().items()}, FEW))

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
        """Return the batches that one process would have kept of all ranks' data; all ranks must call this."""
        whole = _gathered(self._kept)
        rows = {key: count for of_rank in whole for key, count in of_rank.items()}
        held = {
            key: _Held(rows[key], tuple(rank for rank, of_rank in enumerate(whole) if key in of_rank))
            for key in _taken(rows, self._enough)
        }
        kept = {key: batch for key, batch in self._kept.items() if key in held}
        return self._with_types(ReplayBatches(kept, self._enough, held, self.known))

    def halves(self) -> tuple[ReplayBatches, ReplayBatches]:
        """Return two parts without a common batch, to choose on and to check on; with one batch both are that one."""
        every = sorted(self._all())
        first = every[: (len(every) + 1) // 2]
        return self._only(first), self._only(every[len(first) :] or first)

    @property
    def everywhere(self) -> int:
        """The number of batches of all ranks together."""
        return len(self._all())

    @property
    def on_every_rank(self) -> bool:
        """True if each rank has all batches."""
        return all(len(held.ranks) == get_world_size() for held in self._all().values())

    def in_turns(self) -> Iterator[Batch | None]:
        """Yield a copy of each batch of all ranks, by their hashes; None for one that another rank runs."""
        keys = sorted(self._all())
        mine = self._part(keys)
        for key in keys:
            yield copied(*mine[key]) if key in mine else None

    def mine(self) -> dict[Hashable, Batch]:
        """Return the batches that this rank runs, by their hashes, in their order."""
        mine = self._part(self._all())
        return {key: mine[key] for key in sorted(mine)}

    def __iter__(self) -> Iterator[Batch]:
        # Copies, since a model may change its inputs, and the batches are run more than once.
        return iter([copied(*batch) for batch in self.mine().values()])


class DealtBatches:
    """The batches of a calibration that all ranks are given alike, and of which each runs every so many-th.

    Each rank keeps those to run again that one process would keep, whichever rank runs them.
    """

    def __init__(self, kept: Callable[[], ReplayBatches | None]) -> None:
        self._kept = kept
        self._count = 0
        self._given = hashlib.blake2b(digest_size=_DIGEST)

    def is_mine(self, batch: Any) -> bool:
        """Return whether this rank runs the next batch."""
        if get_world_size() == 1:
            return True
        args, keywords = arguments(batch)
        for leaf in leaves((args, keywords)):
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                raise CalibrationError(
                    f"batch {self._count} holds a {type(leaf).__name__}, by which ranks cannot tell whether they were "
                    "given the same: with split=True batches are of tensors and plain values; without it each rank "
                    "runs all of its own"
                )
        self._given.update(_hash((args, keywords)))
        self._count += 1
        if is_mine(self._count - 1):
            return True
        kept = self._kept()
        if kept is not None and (wanted := kept.wanted(args, keywords)) is not None:
            kept.keep(*wanted)
        return False

    def check(self) -> None:
        """Raise unless all ranks were given the same batches; all ranks must call this."""
        given = all_gather_bytes(self._count.to_bytes(_COUNT, "big") + self._given.digest())
        for rank, other in enumerate(given):
            if other != given[0]:
                counts = [int.from_bytes(each[:_COUNT], "big") for each in (other, given[0])]
                raise CalibrationError(
                    f"rank {rank} was given other batches than rank 0 ({counts[0]} and {counts[1]} of them): with "
                    "split=True all ranks are given the same ones, in the same order; without it each runs all of its "
                    "own"
                )


def in_types(batch: Batch, types: Mapping[torch.dtype, torch.dtype]) -> Batch:
    """Return a batch with its tensors in other types, where ``types`` has one for theirs."""
    if not types:
        return batch

    def cast(leaf: Any) -> Any:
        return leaf.to(types.get(leaf.dtype, leaf.dtype)) if isinstance(leaf, Tensor) else leaf

    in_others: Batch = mapped(cast, batch)
    return in_others


def _rows(batch: Batch) -> int:
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
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
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, _PLAIN):
            digest.update(repr(leaf).encode())
        else:
            # The contents are unknown, so that no two objects count as equal.
            digest.update(f"{type(leaf)} {id(leaf)}".encode())
    return digest.digest()
