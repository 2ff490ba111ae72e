"""Readers of ONNX files that avoid large weights: frame, names of inputs, or the model without large data.

protobuf holds the bytes of a file and the parsed message in memory at once. These readers walk the fields of the file
(https://protobuf.dev/programming-guides/encoding) and leave large data in it, which is fast and works without onnx.

``unreadable_is`` turns errors of reading a damaged graph into one error: readers rely on the promises of ONNX.
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
"""Minimum bytes of initializer data that stays in the file."""

_MODEL_FIELDS = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 14, 20, 25, 26})
"""Fields of ModelProto: messages, strings and numbers."""
_GRAPH = 7  # of ModelProto
_INPUT, _OUTPUT, _INITIALIZER = 11, 12, 5  # of GraphProto
_RAW_DATA, _NAME, _LOCATION = 9, 8, 14  # of TensorProto
_VALUE_NAME, _DIMENSIONS, _DIMENSION_NAME = 1, (2, 1, 2, 1), 2
"""Of ValueInfoProto: name; path of type, tensor, shape and dimensions; name of a dimension."""
_VARINT, _EIGHT_BYTES, _WITH_LENGTH, _FOUR_BYTES = 0, 1, 2, 5

_BITS = 7
"""Bits of a varint in each byte, lowest first; the highest bit of a byte marks that more bytes follow."""
_MORE = 1 << _BITS


@dataclass(frozen=True)
class TensorSpec:
    """Input of a graph or engine: name, type, and shape with None for a dynamic dimension.

    Attributes:
        dimensions: name of each axis in the ONNX file, empty for an axis without a name. An empty tuple: unknown. Axes
            with one name have one size in all inputs.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]
    dimensions: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.name}: {self.dtype}[{sizes}]"


class UnreadData(NamedTuple):
    """Position of an initializer's data in a file: offset and number of bytes."""

    offset: int
    length: int


class _Field(NamedTuple):
    """Field of a message: number, kind, and the positions of its tag, its content and its end."""

    number: int
    kind: int
    begin: int
    content: int
    end: int


class UnknownLayout(ValueError):
    """Bytes are not a sequence of fields of the known kinds."""


class _CutShort(UnknownLayout):
    """Field ends after the end of its container."""

    def __init__(self, field: _Field, end: int) -> None:
        super().__init__(f"the field at byte {field.begin} ends at byte {field.end}, but the file ends at byte {end}")
        self.field = field


def checked_onnx(path: Path) -> Path:
    """Return ``path`` after a check for a complete ONNX file.

    Only the frame is read, so large files take no longer. Errors of the libraries for broken files are often
    misleading.
    """
    numbers: set[int] = set()
    try:
        with _bytes_of(existing_file(path, "ONNX")) as data:
            for field in _model_fields(data):
                numbers.add(field.number)
    except _CutShort as error:
        raise EngineError(f"ONNX file {path} is cut short: {error}; export or copy it again") from error
    except UnknownLayout as error:
        raise EngineError(f"{path} is not an ONNX file or is damaged: {error}; export it again") from error
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror or error}") from error
    if _GRAPH not in numbers:
        raise EngineError(f"{path} contains no graph, so it is not an ONNX file or is damaged; export it again")
    return path


def input_dimensions(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the axis names of each input of an ONNX file; an empty name for an unnamed axis."""
    with _bytes_of(path) as data:
        model = _Field(0, _WITH_LENGTH, 0, 0, len(data))
        return {
            _text(data, graph_input, _VALUE_NAME): tuple(
                _text(data, axis, _DIMENSION_NAME) for axis in _below(data, graph_input, *_DIMENSIONS)
            )
            for graph_input in _below(data, model, _GRAPH, _INPUT)
        }


def output_names(path: Path) -> tuple[str, ...]:
    """Return the names of the outputs of an ONNX file."""
    with _bytes_of(path) as data:
        outputs = _below(data, _Field(0, _WITH_LENGTH, 0, 0, len(data)), _GRAPH, _OUTPUT)
        return tuple(_text(data, output, _VALUE_NAME) for output in outputs)


def read_graph(path: Path, mend: Callable[[Any], None] | None = None) -> Any:
    """Return the ``onnx.ModelProto`` without external data; ``mend`` may change it before its check."""
    checked_onnx(path)
    onnx = import_library("onnx", "onnx")
    try:
        model = onnx.load(str(path), load_external_data=False)
        if mend is not None:
            mend(model)
        fault = structural_fault(onnx, model)
    except Exception as error:
        # The error class of protobuf depends on its implementation.
        raise EngineError(f"{path} is damaged: {error}; export it again") from error
    if fault is not None:
        raise EngineError(f"{path} is damaged or was written wrongly: {fault}; export it again")
    return model


def light_message(path: Path) -> tuple[bytes, dict[str, UnreadData]] | None:
    """Return the bytes of a model without the data of large initializers, and the positions of that data by name.

    None for an unusual file layout or without large initializers: read such a file completely.
    """
    if path.stat().st_size < _LARGE:
        return None
    with _bytes_of(path) as data:
        try:
            return _without_large(data)
        except UnknownLayout:
            return None


def without_weights(proto: Any, unread: Container[str]) -> tuple[Any, list[Any]]:
    """Return a copy of a model with large initializers as inputs, and those initializers.

    ``unread`` contains the names of initializers without data. ONNX's shape inference and checker copy a model, which
    takes four times the file size with weights. They need only type and shape of a weight.
    """
    import onnx

    light, large = onnx.ModelProto(), []
    _copy_fields(proto, light, "graph")
    _copy_fields(proto.graph, light.graph, "initializer")
    inputs = {value.name for value in light.graph.input}
    for tensor in proto.graph.initializer:
        small = tensor.ByteSize() < _LARGE and tensor.name not in unread
        if small or tensor.data_location == tensor.EXTERNAL or tensor.name in inputs:
            light.graph.initializer.add().CopyFrom(tensor)
            continue
        large.append(tensor)
        light.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return light, large


def _copy_fields(source: Any, target: Any, excluded: str) -> None:
    """Copy all fields of a message except one."""
    for field, value in source.ListFields():
        if field.name == excluded:
            continue
        if hasattr(value, "extend"):
            getattr(target, field.name).extend(value)
        elif field.message_type is not None:
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def _without_large(data: mmap.mmap) -> tuple[bytes, dict[str, UnreadData]] | None:
    model = list(_fields(data, 0, len(data)))
    graphs = [field for field in model if field.number == _GRAPH]
    # protobuf merges several graph fields.
    if len(graphs) != 1 or graphs[0].kind != _WITH_LENGTH:
        return None
    unread: dict[str, UnreadData] = {}
    graph = []
    for field in _fields(data, graphs[0].content, graphs[0].end):
        content = data[field.begin : field.end] if field.end - field.content < _LARGE else None
        if content is None and field.number == _INITIALIZER and field.kind == _WITH_LENGTH:
            content = _without_data(data, field, unread)
        graph.append(data[field.begin : field.end] if content is None else content)
    if not unread:
        return None
    inside = b"".join(graph)
    parts = [with_length(_GRAPH, inside) if field in graphs else data[field.begin : field.end] for field in model]
    return b"".join(parts), unread


def _without_data(data: mmap.mmap, initializer: _Field, unread: dict[str, UnreadData]) -> bytes | None:
    """Return a tensor field without its data, and add its position to ``unread``; None for unusual tensors."""
    fields = list(_fields(data, initializer.content, initializer.end))
    numbers = [field.number for field in fields]
    if len(set(numbers) & {_RAW_DATA, _NAME}) < 2 or numbers.count(_RAW_DATA) + numbers.count(_NAME) > 2:
        return None
    raw, name = fields[numbers.index(_RAW_DATA)], fields[numbers.index(_NAME)]
    if _LOCATION in numbers or raw.kind != _WITH_LENGTH or name.kind != _WITH_LENGTH or raw.end - raw.content < _LARGE:
        return None
    try:
        tensor_name = data[name.content : name.end].decode()
    except UnicodeDecodeError:
        return None
    if tensor_name in unread:
        return None
    unread[tensor_name] = UnreadData(raw.content, raw.end - raw.content)
    return with_length(_INITIALIZER, b"".join(data[field.begin : field.end] for field in fields if field is not raw))


@contextmanager
def _bytes_of(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def _text(data: mmap.mmap, field: _Field, number: int) -> str:
    match = next(_below(data, field, number), None)
    return "" if match is None else data[match.content : match.end].decode()


def _below(data: mmap.mmap, field: _Field, *numbers: int) -> Iterator[_Field]:
    """Yield the messages or strings at a path of field numbers."""
    if not numbers:
        yield field
        return
    for inner in _fields(data, field.content, field.end):
        if inner.number == numbers[0] and inner.kind == _WITH_LENGTH:
            yield from _below(data, inner, *numbers[1:])


def _model_fields(data: mmap.mmap) -> Iterator[_Field]:
    """Yield the fields of a model; raise UnknownLayout for unknown numbers and kinds."""
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
    """Yield the fields between two positions."""
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
    """Return a number in 7 bits per byte, lowest first, and the position after it."""
    number = 0
    for position in range(begin, min(end, begin + 10)):
        number |= data[position] % _MORE << _BITS * (position - begin)
        if data[position] < _MORE:
            return number, position + 1
    if end - begin < 10:
        raise UnknownLayout("it ends within a number")
    raise UnknownLayout(f"a number at byte {begin + 10} is too long")


def with_length(number: int, content: bytes) -> bytes:
    """Return a field with a length."""
    length, head = len(content), bytearray([number << 3 | _WITH_LENGTH])
    while length >= _MORE:
        head.append(length % _MORE + _MORE)
        length >>= _BITS
    return bytes([*head, length]) + content


_MAX_LENGTH = 300


@contextmanager
def unreadable_is(kind: type[QuantizerError], path: Path) -> Iterator[None]:
    """Raise an error of type ``kind`` for unexpected errors in the block, which reads the graph of an ONNX file."""
    try:
        yield
    except (QuantizerError, OSError):
        # An OSError may come from files that the block writes.
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        fault = _checker_fault(path)
        if fault is None:
            message = (
                f"{path} cannot be read ({_line(error)}), although onnx.checker accepts it. Run it in ONNX Runtime; if "
                "it runs there, report a bug of quantizer with the file"
            )
        else:
            message = f"{path} is damaged or was written wrongly: {fault}; export or copy it again"
        raise kind(message) from error


def _checker_fault(path: Path) -> str | None:
    """Return the error of ``onnx.checker`` with full shape inference; None without errors."""
    if find_spec("onnx") is None:
        return None
    import onnx

    try:
        # A path supports files over 2 GB.
        onnx.checker.check_model(os.fspath(path), full_check=True)
    except Exception as fault:  # noqa: BLE001 - each part of the checker raises its own class
        return _line(fault)
    return None


def _line(error: BaseException) -> str:
    """Return an error and its notes in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    name, notes = type(error).__name__, getattr(error, "__notes__", ())
    return ", ".join([f"{name}: {text[:_MAX_LENGTH]}" if text else name, *notes])
