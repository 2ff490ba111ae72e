"""The bytes of several compiled models in one file: what they have in common, above all weights, is in it once.

Each model is told by the ranges of the stored bytes that it is made of. The first one is stored whole; of the others
only what is not stored yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from quantizer.engines.base import Array

Ranges = tuple[tuple[int, int], ...]
"""Where the bytes of a model lie: start and end of each piece."""

_LEAST = 2**14
_MOST_PIECES = 2**12
"""Shorter pieces than the first, or than the first model divided by the second, are not worth a search, and a word on
each."""

_MOST_MODELS, _LARGEST_MODEL = 64, 8
"""How many models a file is read as, and how often the size of the file the largest may have."""

_ANCHOR = 256
"""How many bytes must be equal to begin with."""

_AHEAD, _BEHIND = 2**22, 2**24
"""How far a piece is looked for: behind the last one, as models keep most of their order, and, once 0, 1, 2, 4, 8, ...
searches in a row have failed, in what was stored last, as some constants are there for each layer; from 2 on in all."""

_BLOCK = 2**16


def share_bytes(parts: Sequence[memoryview]) -> tuple[memoryview, list[Ranges]]:
    """Return the bytes to store, and the ranges of all parts in them.

    Args:
        parts: the bytes of each model; all are to be the same model, compiled in other ways.
    """
    if not parts[1:]:
        return parts[0], [((0, len(parts[0])),)]
    stored = bytearray(parts[0])
    ranges: list[Ranges] = [((0, len(stored)),)]
    for part in map(bytes, parts[1:]):
        pieces, end = [], 0
        for start, place, count in _common(part, stored, len(parts[0])):
            if start > end:
                pieces.append((len(stored), len(stored) + start - end))
                stored += part[end:start]
            if count:
                pieces.append((place, place + count))
            end = start + count
        ranges.append(tuple(pieces))
    return memoryview(stored), ranges


def parts_of(content: bytes, ranges: Sequence[Ranges]) -> list[Array]:
    """Return the bytes of each model, as arrays of their own."""
    source, parts = np.frombuffer(content, dtype=np.uint8), []
    if len(ranges) > _MOST_MODELS:
        raise ValueError(f"{len(ranges)} models are told, and no engine has more than {_MOST_MODELS}")
    for pieces in ranges:
        if sum(end - start for start, end in pieces) > _LARGEST_MODEL * len(source):
            raise ValueError("a model is told that is much larger than all that is stored")
        if not pieces or not all(0 <= start < end <= len(source) for start, end in pieces):
            raise ValueError(f"the ranges {pieces} do not lie in {len(source)} bytes")
        parts.append(np.concatenate([source[start:end] for start, end in pieces]))
    if not parts:
        raise ValueError("no model is told")
    return parts


def _common(part: bytes, stored: bytearray, first: int) -> Iterator[tuple[int, int, int]]:
    """Yield what a part has in common with what is stored: its place in the part, in the other, and its length.

    The last has no length: it is the end of the part. What lies before each is stored before the next is looked for.

    Args:
        part: the bytes of a model.
        stored: the bytes of the first model, and what others have beside it.
        first: how many bytes the first model has.
    """
    least = max(_LEAST, first // _MOST_PIECES)
    done = at = misses = after = 0
    while at + _ANCHOR <= len(part):
        place = _place(part[at : at + _ANCHOR], stored, after, misses)
        back = count = 0
        if place >= 0:
            back = _equal(part, stored, at, place, done)
            count = back + _equal(part, stored, at, place)
        if count < least:
            at, misses = at + least, misses + 1
            continue
        yield at - back, place - back, count
        done = at = at - back + count
        after, misses = place - back + count, 0
    yield len(part), 0, 0


def _place(anchor: bytes, stored: bytearray, after: int, misses: int) -> int:
    """Return where an anchor is in what is stored; negative: nowhere that was searched."""
    place = stored.find(anchor, after, after + _AHEAD)
    if place < 0 and misses.bit_count() < 2:
        place = stored.find(anchor, max(0, len(stored) - _BEHIND) if misses < 2 else 0)
    return place


def _equal(part: bytes, stored: bytearray, at: int, place: int, done: int | None = None) -> int:
    """Return how many bytes are equal from two places on, or before them, back to ``done`` in the part."""
    ours, theirs = (np.frombuffer(whole, dtype=np.uint8) for whole in (part, stored))
    if done is None:
        ours, theirs = ours[at:], theirs[place:]
    else:
        ours, theirs = ours[done:at][::-1], theirs[:place][::-1]
    most = min(len(ours), len(theirs))
    for start in range(0, most, _BLOCK):
        end = min(start + _BLOCK, most)
        differ = np.flatnonzero(ours[start:end] != theirs[start:end])
        if len(differ):
            return start + int(differ[0])
    return most
