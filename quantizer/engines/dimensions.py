"""Names of dimensions: axes of one name have one size, in every input and in every call.

An ONNX file states the names, and its libraries do not enforce them. OpenVINO, given two sizes, may return the result
of an earlier call, and go on doing so; its engine files do not keep the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, TypeAlias

from quantizer.common.decoder_cache import PAST, TOTAL
from quantizer.engines.engine_file import read_varint

# Field numbers in ONNX's protobuf messages: graph of a model; inputs of a graph; name and type of an input; tensor
# of a type; its shape; dimensions of a shape; the name of a dimension.
_GRAPH = 7
_INPUT = 11
_NAME, _TYPE = 1, 2
_TENSOR = 1
_SHAPE = 2
_DIMENSION = 1
_DIMENSION_NAME = 2
# Wire types of a field: a varint, a message or string after its length, or a fixed number of bytes.
_NUMBER, _MESSAGE = 0, 2
_FIXED = {1: 8, 5: 4}

Place: TypeAlias = tuple[int, int]
"""Where a message begins and ends."""


def input_dimensions(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the name of each axis of each input of an ONNX file; empty for an axis without a name.

    Only message frames are read, without the package onnx: reading a large file is quick, and a builder does not need
    onnx.
    """
    with path.open("rb") as stream:
        inputs = list(_below(stream, [(0, path.stat().st_size)], _GRAPH, _INPUT))
        return {_text(stream, _below(stream, [place], _NAME)): _axes(stream, place) for place in inputs}


def dimension_sizes(
    shapes: Iterable[Sequence[str]], batch: int, sequence: int, known: Mapping[str, int] = MappingProxyType({})
) -> dict[str, int]:
    """Return a size for each name of a dimension, for made-up inputs.

    A name other than ``batch`` or ``sequence`` gets the batch's size if it is the first axis of every input that has
    it, else the sequence's: [b, s] gives b the batch's size and s the sequence's. With a cache, ``sequence`` tokens are
    one that is read and those before it, which are in the cache.

    Args:
        shapes: the names of the axes of each input.
        batch: the batch's size.
        sequence: the sequence's.
        known: sizes that are known, by name; they come before the two.
    """
    sizes: dict[str, int] = {}
    for names in shapes:
        for axis, name in enumerate(names):
            if name and (axis > 0 or name not in sizes):
                sizes[name] = sequence if axis > 0 else batch
    sizes |= {"batch": batch, "sequence": sequence, **known}
    return sizes | {PAST: sequence - 1, TOTAL: sequence, "sequence": 1} if PAST in sizes else sizes


def ranges_with_cache(ranges: Mapping[str, Sequence[int]], shapes: Iterable[Sequence[str]]) -> dict[str, Sequence[int]]:
    """Return the ranges of the dimensions of a file; with a cache, those of ``sequence`` hold for all its tokens.

    The usual call of such a decoder reads one token.

    Args:
        ranges: smallest, usual and largest size of each name.
        shapes: the names of the axes of each input.
    """
    if "sequence" not in ranges or not any(PAST in names for names in shapes):
        return dict(ranges)
    _, usual, most = ranges["sequence"]
    return {**ranges, "sequence": (1, 1, most), PAST: (0, usual - 1, most - 1), TOTAL: (1, usual, most)}


def shape_words(
    shapes: Iterable[Sequence[int | str | None]],
    batch: int,
    sequence: int,
    known: Mapping[str, int] = MappingProxyType({}),
) -> str:
    """Return what inputs were made up with: ``8 x 128``, or ``batch 8`` where only the number of rows varies.

    Where other dimensions vary, each is named: ``batch 8, x_axis2 160``.

    Args:
        shapes: the axes of each input: a size or an empty name where it is fixed, None or a name where it varies.
        batch: the rows.
        sequence: the size of other axes that vary, such as the tokens of a text.
        known: sizes of dimensions by name.
    """
    others = [f"{name} {size}" for name, size in known.items() if name != "batch"]
    if any(name not in ("batch", "sequence") for name in known):
        return ", ".join([f"batch {batch}", *others])
    varies = any(size is None or (isinstance(size, str) and size) for shape in shapes for size in shape[1:])
    return f"{batch} x {sequence}" if varies else f"batch {batch}"


def _axes(stream: BinaryIO, place: Place) -> tuple[str, ...]:
    dimensions = list(_below(stream, [place], _TYPE, _TENSOR, _SHAPE, _DIMENSION))
    return tuple(_text(stream, _below(stream, [dimension], _DIMENSION_NAME)) for dimension in dimensions)


def _text(stream: BinaryIO, places: Iterable[Place]) -> str:
    start, end = next(iter(places), (0, 0))
    stream.seek(start)
    return stream.read(end - start).decode()


def _below(stream: BinaryIO, places: Iterable[Place], *numbers: int) -> Iterator[Place]:
    """Yield the positions of the messages or strings that a path of field numbers leads to."""
    if not numbers:
        yield from places
        return
    inner = (part for start, end in places for part in _parts(stream, start, end, numbers[0]))
    yield from _below(stream, inner, *numbers[1:])


def _parts(stream: BinaryIO, start: int, end: int, wanted: int) -> Iterator[Place]:
    while start < end:
        stream.seek(start)
        tag = read_varint(stream)
        wire = tag & 7
        number = read_varint(stream) if wire in (_NUMBER, _MESSAGE) else 0
        length = number if wire == _MESSAGE else 0 if wire == _NUMBER else _FIXED.get(wire)
        if length is None or stream.tell() + length > end:
            raise ValueError(f"unexpected data at byte {start}")
        start = stream.tell() + length
        if wire == _MESSAGE and tag >> 3 == wanted:
            yield start - length, start
