"""Files in and out: an ONNX file is looked at before a library reads it, and an engine file is whole or absent."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from quantizer import files
from quantizer.errors import EngineError

__all__ = [
    "RTX_MAGIC",
    "checked_engine",
    "checked_onnx",
    "checked_output",
    "read_engine",
    "whole_file",
    "write_engine",
]

RTX_MAGIC = b"vtrt"
"""How an engine of TensorRT-RTX begins."""

_NOTE = b"\nquantizer: "
_LONGEST_NOTE = 2**20
# Fields of onnx.ModelProto that are messages, strings or numbers; field 7 is the graph.
_MODEL_FIELDS = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 14, 20, 25, 26})
_GRAPH_FIELD = 7


def checked_engine(path: Path, what: str = "engine") -> Path:
    """``path``, when it is a file with something in it.

    Raises:
        EngineError: it is missing, a folder, or empty.
    """
    if not path.exists():
        raise EngineError(f"{what} file not found: {path}")
    if not path.is_file():
        raise EngineError(f"{path} is not a file: expected the {what} file")
    if path.stat().st_size == 0:
        raise EngineError(f"{what} file {path} is empty: write it again")
    return path


def checked_onnx(path: Path) -> Path:
    """``path``, when it is a whole ONNX file; only the frame is read, so a large file costs nothing.

    The libraries' own words for a broken file range from a failed assertion to an attempt to read another format.

    Raises:
        EngineError: it is missing, empty, cut short, or no ONNX file.
    """
    size = checked_engine(path, "ONNX").stat().st_size
    fields: set[int] = set()
    try:
        with path.open("rb") as stream:
            while (position := stream.tell()) < size:
                fields.add(_skip_field(stream))
                if stream.tell() > size:
                    raise EngineError(
                        f"ONNX file {path} is cut short: the part at byte {position} ends at byte {stream.tell()}, "
                        f"the file at {size}; export or copy it again"
                    )
    except ValueError as error:
        raise EngineError(f"{path} is not an ONNX file, or is damaged: {error}; export it again") from error
    if _GRAPH_FIELD not in fields:
        raise EngineError(f"{path} holds no graph: it is not an ONNX file, or is damaged; export it again")
    return path


def _skip_field(stream: BinaryIO) -> int:
    """Move past one top-level protobuf field; its number."""
    position = stream.tell()
    tag = _varint(stream)
    number, wire = tag >> 3, tag & 7
    if number not in _MODEL_FIELDS or wire not in (0, 2):
        raise ValueError(f"unexpected data at byte {position}")
    value = _varint(stream)
    if wire == 2:
        stream.seek(value, os.SEEK_CUR)
    return number


def _varint(stream: BinaryIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = stream.read(1)
        if not byte:
            raise ValueError("it ends in the middle of a number")
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise ValueError(f"a number at byte {stream.tell()} is too long")


def checked_output(path: Path) -> Path:
    """``path``, when a file can be written there; asked before a build, so that no build is lost to a bad path.

    Raises:
        EngineError: the folder is missing or cannot be written, or ``path`` is a folder.
    """
    folder = path.parent
    if not folder.is_dir():
        raise EngineError(f"cannot write {path}: {folder} is not an existing folder; make it first")
    if path.is_dir():
        raise EngineError(f"cannot write {path}: it is a folder; give the name of a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EngineError(f"cannot write {path}: no permission to write in {folder}; choose another folder")
    return path


def whole_file(path: Path) -> AbstractContextManager[Path]:
    """``quantizer.files.whole_file`` in the words of engines.

    Raises:
        EngineError: the system refused to write.
    """
    return files.whole_file(path, EngineError)


def write_engine(path: Path, content: memoryview, note: str = "") -> None:
    """Write what a library built; ``note``: what it does not keep and loading needs, as a line after it.

    Raises:
        EngineError: the system refused to write.
    """
    with whole_file(path) as part, part.open("wb") as stream:
        stream.write(content)
        stream.write(_NOTE + note.encode() + b"\n" if note else b"")


def read_engine(path: Path) -> tuple[bytes, str]:
    """What a library built, and the note after it; an empty one where there is none, or no whole one."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(max(0, size - _LONGEST_NOTE))
        _, mark, note = stream.read().rpartition(_NOTE)
        stream.seek(0)
        if not mark or not note.endswith(b"\n"):
            return stream.read(), ""
        return stream.read(size - len(mark) - len(note)), note[:-1].decode(errors="replace")
