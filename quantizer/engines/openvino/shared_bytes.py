"""The bytes of several compiled models in one file: what they share with the first, above all weights, is in it once.

Each model is told by the ranges of the stored bytes that it is made of. The first one is stored whole; of the others
only what the first one lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence

import numpy as np

from quantizer.engines.base import Array

__all__ = ["Ranges", "parts_of", "read_ranges", "share_bytes", "write_ranges"]

Ranges = tuple[tuple[int, int], ...]
"""Where the bytes of a model lie: start and end of each piece."""

_LEAST = 2**14
_MOST_PIECES = 2**12
"""Shorter pieces than the first, or than the model divided by the second, are not worth a search through all of it, and
a word on each."""

_ANCHOR = 256
"""How many bytes must be equal to begin with."""

_MISSES = 256
"""After so many in a row a model has nothing more in common: each miss reads all of the first one."""

_BLOCK = 2**16


def share_bytes(parts: Sequence[memoryview]) -> tuple[list[memoryview], list[Ranges]]:
    """Return the pieces to store, one after another, and the ranges of all parts in them.

    Args:
        parts: the bytes of each model; all are to be the same model, compiled in other ways.
    """
    stored, length = [parts[0]], len(parts[0])
    ranges: list[Ranges] = [((0, length),)]
    # A copy, which a large model alone does not need.
    first = bytes(parts[0]) if parts[1:] else b""
    for part in parts[1:]:
        pieces: list[tuple[int, int]] = []
        end = 0
        for start, place, count in [*_common(bytes(part), first), (len(part), 0, 0)]:
            if start > end:
                stored.append(part[end:start])
                pieces.append((length, length + start - end))
                length += start - end
            if count:
                pieces.append((place, place + count))
            end = start + count
        ranges.append(tuple(pieces))
    return stored, ranges


def parts_of(content: bytes, ranges: Sequence[Ranges]) -> list[Array]:
    """Return the bytes of each model, as arrays of their own.

    Raises:
        ValueError: there is none, or a range does not lie in the content.
    """
    source, parts = np.frombuffer(content, dtype=np.uint8), []
    for pieces in ranges:
        if not pieces or not all(0 <= start < end <= len(source) for start, end in pieces):
            raise ValueError(f"the ranges {pieces} do not lie in {len(source)} bytes")
        parts.append(np.concatenate([source[start:end] for start, end in pieces]))
    if not parts:
        raise ValueError("no model is told")
    return parts


def write_ranges(ranges: Sequence[Ranges]) -> str:
    """Return ranges as one word, which ``read_ranges`` takes."""
    return "/".join("+".join(f"{start}-{end}" for start, end in pieces) for pieces in ranges)


def read_ranges(word: str) -> list[Ranges]:
    """Return the ranges of a word.

    Raises:
        ValueError: it is none of ``write_ranges``.
    """
    return [tuple(_pair(piece) for piece in pieces.split("+")) for pieces in word.split("/")]


def _pair(piece: str) -> tuple[int, int]:
    start, end = map(int, piece.split("-"))
    return start, end


def _common(part: bytes, first: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield what a part has in common with the first one: its place in the part, in the first, and its length."""
    ours, theirs = (np.frombuffer(whole, dtype=np.uint8) for whole in (part, first))
    least = max(_LEAST, len(first) // _MOST_PIECES)
    done = at = misses = 0
    while at + _ANCHOR <= len(part) and misses < _MISSES:
        place = first.find(part[at : at + _ANCHOR])
        back = count = 0
        if place >= 0:
            back = _equal(ours[done:at][::-1], theirs[:place][::-1])
            count = back + _equal(ours[at:], theirs[place:])
        if count < least:
            at, misses = at + least, misses + 1
            continue
        yield at - back, place - back, count
        done = at = at - back + count
        misses = 0


def _equal(ours: Array, theirs: Array) -> int:
    """Return how many bytes are equal from the start."""
    most = min(len(ours), len(theirs))
    for start in range(0, most, _BLOCK):
        end = min(start + _BLOCK, most)
        differ = np.flatnonzero(ours[start:end] != theirs[start:end])
        if len(differ):
            return start + int(differ[0])
    return most
