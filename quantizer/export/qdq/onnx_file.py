"""ONNX files, of which the frame, the names of inputs, or all but the data of large initializers is read.

protobuf makes a message of bytes, so that the bytes of a file and the message that has them again are in memory at
once. Of the data of large initializers a check needs a few at most. So the fields of the file are walked, as
https://protobuf.dev/programming-guides/encoding lays them out: a number and a kind, then a length and so many bytes.
Reading a large file is quick, and does not need the package onnx.

``unreadable_is`` is the one boundary for all that reads the graph of a file which may be damaged. Readers rely on what
ONNX promises: that a name was made before it is read, that the shapes of operands fit. A damaged file breaks that in
more ways than readers can check each for itself.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quantizer.errors import EngineError, QuantizerError, is_out_of_memory
from quantizer.export.qdq.structure import structural_fault
from quantizer.utils.lazy import import_library
from quantizer.utils.paths import existing_file

_LARGE = 1 << 16
"""The bytes from which on the data of an initializer stays in the file."""

_MODEL_FIELDS = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 14, 20, 25, 26})
"""Fields of ModelProto: messages, strings and numbers."""
_GRAPH = 7  # of ModelProto
_INPUT, _INITIALIZER = 11, 5  # of GraphProto
_RAW_DATA, _NAME, _LOCATION = 9, 8, 14  # of TensorProto
_INPUT_NAME, _DIMENSIONS, _DIMENSION_NAME = 1, (2, 1, 2, 1), 2
"""Of ValueInfoProto: its name; its type, tensor, shape and dimensions; the name of one of these."""
_VARINT, _EIGHT_BYTES, _WITH_LENGTH, _FOUR_BYTES = 0, 1, 2, 5

_BITS = 7
"""The bits of a number in each of its bytes, the lowest first; the bit above them says that more bytes follow."""
_MORE = 1 << _BITS


@dataclass(frozen=True)
class TensorSpec:
    """Input of a graph or an engine: its name, type and shape, with None for a dynamic dimension.

    Attributes:
        dimensions: the name of each axis in the ONNX file, empty where it has none; none at all: they are not known.
            Axes of one name have one size, in all inputs.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]
    dimensions: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.name}: {self.dtype}[{sizes}]"


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


class UnknownLayout(ValueError):
    """Bytes that are no sequence of fields of the known kinds."""


class _CutShort(UnknownLayout):
    """A field that ends behind the bytes that it is in."""

    def __init__(self, field: _Field, end: int) -> None:
        super().__init__(f"the part at byte {field.begin} ends at byte {field.end}, the file at {end}")
        self.field = field


def checked_onnx(path: Path) -> Path:
    """Return ``path`` if it is a complete ONNX file; only the frame is read, so a large file takes no longer.

    The libraries' own messages for a broken file range from a failed assertion to an attempt to read another format.
    """
    numbers: set[int] = set()
    try:
        with _bytes_of(existing_file(path, "ONNX")) as data:
            for field in _model_fields(data):
                numbers.add(field.number)
    except _CutShort as error:
        raise EngineError(f"ONNX file {path} is cut short: {error}; export or copy it again") from error
    except UnknownLayout as error:
        raise EngineError(f"{path} is not an ONNX file, or is damaged: {error}; export it again") from error
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror or error}") from error
    if _GRAPH not in numbers:
        raise EngineError(f"{path} holds no graph: it is not an ONNX file, or is damaged; export it again")
    return path


def input_dimensions(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the name of each axis of each input of an ONNX file; empty for an axis without a name."""
    with _bytes_of(path) as data:
        whole = _Field(0, _WITH_LENGTH, 0, 0, len(data))
        return {
            _text(data, given, _INPUT_NAME): tuple(
                _text(data, axis, _DIMENSION_NAME) for axis in _below(data, given, *_DIMENSIONS)
            )
            for given in _below(data, whole, _GRAPH, _INPUT)
        }


def read_graph(path: Path, mend: Callable[[Any], None] | None = None) -> Any:
    """Read the ``onnx.ModelProto`` without its external data; ``mend`` may change it before its check."""
    checked_onnx(path)
    onnx = import_library("onnx", "onnx")
    try:
        model = onnx.load(str(path), load_external_data=False)
        if mend is not None:
            mend(model)
        fault = structural_fault(onnx, model)
    except Exception as error:
        # The class of protobuf's error depends on the implementation that is installed.
        raise EngineError(f"{path} is damaged: {error}; export it again") from error
    if fault is not None:
        raise EngineError(f"{path} is damaged, or was written wrongly: {fault}; export it again")
    return model


def light_message(path: Path) -> tuple[bytes, dict[str, HeldBack]] | None:
    """Return the bytes of a model without the data of large initializers, and where these are, by name.

    None for a file whose layout is another than ONNX's own writers give it, and for one without large initializers:
    such a file is to be read as a whole.
    """
    if path.stat().st_size < _LARGE:
        return None
    with _bytes_of(path) as data:
        try:
            return _without_large(data)
        except UnknownLayout:
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
    parts = [with_length(_GRAPH, inside) if field in graphs else data[field.begin : field.end] for field in model]
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
    return with_length(_INITIALIZER, b"".join(data[field.begin : field.end] for field in fields if field is not raw))


@contextmanager
def _bytes_of(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def _text(data: mmap.mmap, field: _Field, number: int) -> str:
    found = next(_below(data, field, number), None)
    return "" if found is None else data[found.content : found.end].decode()


def _below(data: mmap.mmap, field: _Field, *numbers: int) -> Iterator[_Field]:
    """Yield the messages or strings that a path of field numbers leads to."""
    if not numbers:
        yield field
        return
    for inner in _fields(data, field.content, field.end):
        if inner.number == numbers[0] and inner.kind == _WITH_LENGTH:
            yield from _below(data, inner, *numbers[1:])


def _model_fields(data: mmap.mmap) -> Iterator[_Field]:
    """Yield the fields of a model, of which no other numbers and kinds are known."""
    fields = _fields(data, 0, len(data))
    while True:
        try:
            field = next(fields)
        except StopIteration:
            return
        except _CutShort as error:
            if error.field.number in _MODEL_FIELDS:
                raise
            field = error.field
        if field.number not in _MODEL_FIELDS or field.kind not in (_VARINT, _WITH_LENGTH):
            raise UnknownLayout(f"unexpected data at byte {field.begin}")
        yield field


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
            raise UnknownLayout(f"unexpected data at byte {begin}")
        field = _Field(number, kind, begin, content, last)
        if last > end:
            raise _CutShort(field, end)
        yield field
        begin = last


def _varint(data: mmap.mmap, begin: int, end: int) -> tuple[int, int]:
    """Return a number in 7 bits a byte, the lowest first, and the place behind it."""
    number = 0
    for place in range(begin, min(end, begin + 10)):
        number |= data[place] % _MORE << _BITS * (place - begin)
        if data[place] < _MORE:
            return number, place + 1
    if end - begin < 10:
        raise UnknownLayout("it ends in the middle of a number")
    raise UnknownLayout(f"a number at byte {begin + 10} is too long")


def with_length(number: int, content: bytes) -> bytes:
    """Return a field of a content with a length."""
    length, head = len(content), bytearray([number << 3 | _WITH_LENGTH])
    while length >= _MORE:
        head.append(length % _MORE + _MORE)
        length >>= _BITS
    return bytes([*head, length]) + content


_LONGEST = 300


@contextmanager
def unreadable_is(kind: type[QuantizerError], path: Path) -> Iterator[None]:
    """Raise an error of this kind for whatever else is raised in the block, which reads the graph of an ONNX file."""
    try:
        yield
    except (QuantizerError, OSError):
        # An OSError may come from what is written meanwhile.
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        fault = _checker_fault(path)
        if fault is None:
            why = (
                f"{path} cannot be read ({_line(error)}), though onnx.checker finds no fault in it: run it in ONNX "
                "Runtime; if it runs there, quantizer is wrong: report it, with the file"
            )
        else:
            why = f"{path} is damaged, or was written wrongly: {fault}; export or copy it again"
        raise kind(why) from error


def _checker_fault(path: Path) -> str | None:
    """Return what ONNX's own checker, with the shapes of all values, says of a file; None: nothing."""
    if find_spec("onnx") is None:
        return None
    import onnx

    try:
        # By its path, for files over 2 GB.
        onnx.checker.check_model(os.fspath(path), full_check=True)
    except Exception as fault:  # noqa: BLE001 - each part of the checker raises a class of its own
        return _line(fault)
    return None


def _line(error: BaseException) -> str:
    """Return an error in one line, with the notes on it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    name, notes = type(error).__name__, getattr(error, "__notes__", ())
    return ", ".join([f"{name}: {text[:_LONGEST]}" if text else name, *notes])
