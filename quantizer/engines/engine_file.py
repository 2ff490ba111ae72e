"""Files: an ONNX file is validated before a library reads it; an engine file is written whole or not at all."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from quantizer import files
from quantizer.common.paths import is_file, is_folder, regular_file
from quantizer.errors import EngineError

_NOTE = b"\nquantizer engine: "
_NOTE_WITHOUT_SUM = b"\nquantizer: "
"""Of files from before there was a checksum: a line of the other kind must have one, so that none gets lost."""
_LONGEST_NOTE = 2**20
_SUM = "sha256 "
_CPU = re.compile(r"(?:^| )cpu [a-z0-9_,]+$")
_CPU_KEY = "quantizer.cpu"
_TOLD_CPU = re.compile(rb" cpu ([a-z0-9_,]+) sha256 [0-9a-f]{64}\n$")
_TAIL = 2**10
_SUM_KEY = "quantizer.sha256"
_NO_SUM = "0" * 64
_PIECE = 2**20
# Fields of onnx.ModelProto that are messages, strings or numbers; field 7 is the graph.
_MODEL_FIELDS = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 14, 20, 25, 26})
_GRAPH_FIELD = 7


def checked_engine(path: Path, what: str = "engine") -> Path:
    """Return ``path`` if it is a file with content."""
    if not is_file(path):
        there = is_folder(path) or os.path.lexists(path)
        raise EngineError(
            f"{path} is not a file: expected the {what} file" if there else f"{what} file not found: {path}"
        )
    if path.stat().st_size == 0:
        raise EngineError(f"{what} file {path} is empty: write it again")
    return path


def checked_onnx(path: Path) -> Path:
    """Return ``path`` if it is a complete ONNX file; only the frame is read, so a large file takes no longer.

    The libraries' own messages for a broken file range from a failed assertion to an attempt to read another format.
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
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror or error}") from error
    if _GRAPH_FIELD not in fields:
        raise EngineError(f"{path} holds no graph: it is not an ONNX file, or is damaged; export it again")
    return path


def _skip_field(stream: BinaryIO) -> int:
    """Move past one top-level protobuf field and return its number."""
    position = stream.tell()
    tag = read_varint(stream)
    number, wire = tag >> 3, tag & 7
    if number not in _MODEL_FIELDS or wire not in (0, 2):
        raise ValueError(f"unexpected data at byte {position}")
    value = read_varint(stream)
    if wire == 2:
        stream.seek(value, os.SEEK_CUR)
    return number


def read_varint(stream: BinaryIO) -> int:
    """Read a protobuf varint: seven bits a byte, the lowest first."""
    value = 0
    for shift in range(0, 70, 7):
        byte = stream.read(1)
        if not byte:
            raise ValueError("it ends in the middle of a number")
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise ValueError(f"a number at byte {stream.tell()} is too long")


def checked_output(path: Path, source: Path | None = None) -> Path:
    """Return ``path`` if a file can be written there, which is asked before a build."""
    place = files.checked_file(path, EngineError)
    if source is not None and place.exists() and place.samefile(source):
        raise EngineError(f"{path} is the file that the engine is built from; give the engine another name")
    return path


def whole_file(path: Path) -> AbstractContextManager[Path]:
    """Return ``quantizer.files.whole_file``, which raises ``EngineError`` here."""
    return files.whole_file(path, EngineError)


def write_engine(path: Path, content: memoryview, note: str = "", cpu: Sequence[str] = ()) -> None:
    """Write what a library built, and after it a line with its SHA-256: the library would run a damaged file too."""
    line = "".join(f"{part} " for part in (note, f"cpu {','.join(cpu)}" if cpu else "") if part)
    digest = hashlib.sha256(content)
    digest.update(line.encode())
    with whole_file(path) as part, part.open("wb") as stream:
        stream.write(content)
        stream.write(_NOTE + f"{line}{_SUM}{digest.hexdigest()}\n".encode())


def read_engine(path: Path, *, verify: bool = True) -> tuple[bytes, str]:
    """Return what a library built, and the note after it; an empty note if there is none, or no complete one."""
    try:
        whole = regular_file(path).read_bytes()
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror or error}") from error
    place, tag = _place_of_note(whole[-_LONGEST_NOTE:])
    if place < 0:
        return whole, ""
    place += max(0, len(whole) - _LONGEST_NOTE)
    content, line = whole[:place], whole[place + len(tag) : -1].decode(errors="replace")
    if tag == _NOTE_WITHOUT_SUM:
        return content, line
    note, _, told = line.rpartition(_SUM)
    if verify:
        digest = hashlib.sha256(content)
        digest.update(note.encode())
        _compare(path, digest.hexdigest(), told)
    return content, _CPU.sub("", note.removesuffix(" "))


def content_bytes(path: Path) -> int:
    """Return how many bytes of an engine file are what a library built, without the line after them."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(max(0, size - _LONGEST_NOTE))
        place, _ = _place_of_note(stream.read())
    return size if place < 0 else max(0, size - _LONGEST_NOTE) + place


def copy_content(path: Path, place: Path) -> None:
    """Write what a library built to a file of its own: it refuses one with a line after it."""
    left = content_bytes(path)
    with path.open("rb") as stream, place.open("wb") as copy:
        while left and (piece := stream.read(min(left, _PIECE))):
            copy.write(piece)
            left -= len(piece)


def _place_of_note(tail: bytes) -> tuple[int, bytes]:
    """Return where the note begins in the end of a file, and how; a negative place if no whole one is there."""
    place, tag = max((tail.rfind(tag), tag) for tag in (_NOTE, _NOTE_WITHOUT_SUM))
    return (place if tail.endswith(b"\n") else -1), tag


def built_on(path: Path) -> tuple[str, ...]:
    """Return the instruction sets of the CPU that an engine file was built on; empty if it does not say."""
    if not is_file(path):
        return ()
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _TAIL))
        tail = stream.read()
    if (line := _TOLD_CPU.search(tail)) is not None:
        return tuple(line[1].decode().split(","))
    key = b"\x0a" + bytes([len(_CPU_KEY)]) + _CPU_KEY.encode() + b"\x12"
    _, found, rest = tail.rpartition(key)
    return tuple(rest[1 : 1 + rest[0]].decode(errors="replace").split(",")) if found and rest else ()


def sign_onnx(path: Path, cpu: Sequence[str] = ()) -> None:
    """Append the SHA-256 of an ONNX file to its own metadata, as its last bytes; ONNX readers still read the file."""
    with path.open("rb+") as stream:
        if cpu:
            stream.seek(0, os.SEEK_END)
            stream.write(_entry(_CPU_KEY, ",".join(cpu)))
            stream.seek(0)
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        stream.seek(0, os.SEEK_END)
        stream.write(_signature(digest))


def check_signature(path: Path) -> None:
    """Raise if an ONNX file does not match the SHA-256 that ``sign_onnx`` appended; a file without one passes."""
    size = path.stat().st_size - len(_signature(_NO_SUM))
    if size < 0:
        return
    with path.open("rb") as stream:
        stream.seek(size)
        told = stream.read()
        if not told.startswith(_signature(_NO_SUM)[: -len(_NO_SUM)]):
            return
        stream.seek(0)
        digest, left = hashlib.sha256(), size
        while left and (piece := stream.read(min(left, _PIECE))):
            digest.update(piece)
            left -= len(piece)
    _compare(path, digest.hexdigest(), told[-len(_NO_SUM) :].decode(errors="replace"))


def _compare(path: Path, found: str, told: str) -> None:
    if found != told:
        raise EngineError(
            f"{path} is damaged: it is not as it was written (its SHA-256 differs); copy it again, or build it again "
            "from its ONNX file"
        )


def _signature(digest: str) -> bytes:
    return _entry(_SUM_KEY, digest)


def _entry(key: str, value: str) -> bytes:
    """Return an entry of the metadata (field 14 of a model: key and value) in protobuf's encoding."""
    parts = b"".join(bytes([tag, len(part)]) + part.encode() for tag, part in ((0x0A, key), (0x12, value)))
    return bytes([0x72, len(parts)]) + parts
