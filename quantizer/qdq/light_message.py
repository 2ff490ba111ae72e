"""ONNX messages read without the data of large initializers, which stay in the file.

protobuf makes a message of bytes, so that the bytes of a file and the message that has them again are in memory at
once. Of the data of large initializers a check needs a few at most. So the fields of the file are walked, as
https://protobuf.dev/programming-guides/encoding lays them out: a number and a kind, then a length and so many bytes.
Everything but such data becomes the message.
"""

from __future__ import annotations

import mmap
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_LARGE = 1 << 16
"""The bytes from which on the data of an initializer stays in the file."""

_GRAPH = 7  # of ModelProto
_INITIALIZER = 5  # of GraphProto
_RAW_DATA, _NAME, _LOCATION = 9, 8, 14  # of TensorProto
_VARINT, _EIGHT_BYTES, _WITH_LENGTH, _FOUR_BYTES = 0, 1, 2, 5

_BITS = 7
"""The bits of a number in each of its bytes, the lowest first; the bit above them says that more bytes follow."""
_MORE = 1 << _BITS


class HeldBack(NamedTuple):
    """A part of a file that holds the data of an initializer: its first byte, and the number of bytes."""

    offset: int
    length: int


class _Field(NamedTuple):
    """A field: its number and kind, where it begins with these, where its content begins, and where it ends."""

    number: int
    kind: int
    begin: int
    content: int
    end: int


class _UnknownLayout(Exception):
    """Bytes that are no sequence of fields of the known kinds."""


def light_message(path: Path) -> tuple[bytes, dict[str, HeldBack]] | None:
    """Return the bytes of a model without the data of large initializers, and where these are, by name.

    None for a file whose layout is another than ONNX's own writers give it, and for one without large initializers:
    such a file is to be read as a whole.
    """
    if path.stat().st_size < _LARGE:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _without_large(data)
        except _UnknownLayout:
            return None


def without_weights(proto: Any, held: Container[str]) -> tuple[Any, list[Any]]:
    """Return a copy of a model in which large initializers are inputs, and those initializers.

    ``held`` has those whose data is in the file only.

    ONNX's shape inference and checker take a model as bytes and make another one of them: with the weights in it that
    is four times the file. They need no more of a weight than its type and shape; its data is held to these before.
    """
    import onnx

    light, large = onnx.ModelProto(), []
    _copy_fields(proto, light, "graph")
    _copy_fields(proto.graph, light.graph, "initializer")
    inputs = {value.name for value in light.graph.input}
    for tensor in proto.graph.initializer:
        small = tensor.ByteSize() < _LARGE and tensor.name not in held
        if small or tensor.data_location == tensor.EXTERNAL or tensor.name in inputs:
            light.graph.initializer.add().CopyFrom(tensor)
            continue
        large.append(tensor)
        light.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return light, large


def _copy_fields(source: Any, target: Any, left_out: str) -> None:
    """Copy the fields of a message but one."""
    for field, value in source.ListFields():
        if field.name == left_out:
            continue
        if hasattr(value, "extend"):
            getattr(target, field.name).extend(value)
        elif field.message_type is not None:
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def _without_large(data: mmap.mmap) -> tuple[bytes, dict[str, HeldBack]] | None:
    model = list(_fields(data, 0, len(data)))
    graphs = [field for field in model if field.number == _GRAPH]
    # Of several protobuf makes one.
    if len(graphs) != 1 or graphs[0].kind != _WITH_LENGTH:
        return None
    held: dict[str, HeldBack] = {}
    graph = []
    for field in _fields(data, graphs[0].content, graphs[0].end):
        whole = data[field.begin : field.end] if field.end - field.content < _LARGE else None
        if whole is None and field.number == _INITIALIZER and field.kind == _WITH_LENGTH:
            whole = _without_data(data, field, held)
        graph.append(data[field.begin : field.end] if whole is None else whole)
    if not held:
        return None
    inside = b"".join(graph)
    parts = [_with_length(_GRAPH, inside) if field in graphs else data[field.begin : field.end] for field in model]
    return b"".join(parts), held


def _without_data(data: mmap.mmap, initializer: _Field, held: dict[str, HeldBack]) -> bytes | None:
    """Return a tensor's field without its data, and add this to ``held``; None if the tensor is not a plain one."""
    fields = list(_fields(data, initializer.content, initializer.end))
    numbers = [field.number for field in fields]
    if len(set(numbers) & {_RAW_DATA, _NAME}) < 2 or numbers.count(_RAW_DATA) + numbers.count(_NAME) > 2:
        return None
    raw, name = fields[numbers.index(_RAW_DATA)], fields[numbers.index(_NAME)]
    if _LOCATION in numbers or raw.kind != _WITH_LENGTH or name.kind != _WITH_LENGTH or raw.end - raw.content < _LARGE:
        return None
    try:
        text = data[name.content : name.end].decode()
    except UnicodeDecodeError:
        return None
    if text in held:
        return None
    held[text] = HeldBack(raw.content, raw.end - raw.content)
    return _with_length(_INITIALIZER, b"".join(data[field.begin : field.end] for field in fields if field is not raw))


def _fields(data: mmap.mmap, begin: int, end: int) -> Iterator[_Field]:
    """Yield the fields between two places."""
    while begin < end:
        tag, content = _varint(data, begin, end)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            _, last = _varint(data, content, end)
        elif kind == _WITH_LENGTH:
            length, content = _varint(data, content, end)
            last = content + length
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            last = content + (8 if kind == _EIGHT_BYTES else 4)
        else:
            raise _UnknownLayout
        if last > end:
            raise _UnknownLayout
        yield _Field(number, kind, begin, content, last)
        begin = last


def _varint(data: mmap.mmap, begin: int, end: int) -> tuple[int, int]:
    """Return a number in 7 bits a byte, the lowest first, and the place behind it."""
    number = 0
    for place in range(begin, min(end, begin + 10)):
        number |= data[place] % _MORE << _BITS * (place - begin)
        if data[place] < _MORE:
            return number, place + 1
    raise _UnknownLayout


def _with_length(number: int, content: bytes) -> bytes:
    """Return a field of a content with a length."""
    length, head = len(content), bytearray([number << 3 | _WITH_LENGTH])
    while length >= _MORE:
        head.append(length % _MORE + _MORE)
        length >>= _BITS
    return bytes([*head, length]) + content
