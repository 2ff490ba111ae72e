"""Engine files: written whole or not at all, and signed with a footer that tells what the library does not."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quantizer.errors import EngineError
from quantizer.export.qdq.onnx_file import with_length
from quantizer.utils import files
from quantizer.utils.paths import is_file, regular_file
from quantizer.utils.plain_values import json_values

_MARK = b"\nquantizer engine: "
_KEY = "quantizer.engine"
"""What stands before the footer of an engine file, and its key in the metadata of an ONNX file."""
_METADATA = 14
"""The field of ModelProto whose entries have a key (field 1) and a value (field 2)."""
_LONGEST = 2**20
_PIECE = 2**20


def checked_output(path: Path, source: Path | None = None) -> Path:
    """Return ``path`` if a file can be written there, which is asked before a build."""
    place = files.checked_file(path, EngineError)
    if source is not None and place.exists() and place.samefile(source):
        raise EngineError(f"{path} is the file that the engine is built from; give the engine another name")
    return path


def whole_file(path: Path) -> AbstractContextManager[Path]:
    """Return ``quantizer.utils.files.whole_file``, which raises ``EngineError`` here."""
    return files.whole_file(path, EngineError)


def write_engine(
    path: Path, content: memoryview, note: Mapping[str, Any] = MappingProxyType({}), cpu: Sequence[str] = ()
) -> None:
    """Write what a library built, and after it a footer with its SHA-256: the library would run a damaged file too.

    The footer is one line of JSON with the entries of ``note`` and the instruction sets of this CPU.
    """
    with whole_file(path) as part, part.open("wb") as stream:
        stream.write(content)
        stream.write(_MARK + _signed(hashlib.sha256(content), {"cpu": list(cpu), **note}) + b"\n")


def read_engine(path: Path, *, verify: bool = True) -> tuple[bytes, dict[str, Any]]:
    """Return what a library built, and the note after it; an empty note if there is none, or no complete one."""
    try:
        whole = regular_file(path).read_bytes()
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror or error}") from error
    size, told = _footer(len(whole), whole[-_LONGEST:])
    if told and verify:
        _compare(path, hashlib.sha256(memoryview(whole)[:size]), told)
    return whole[:size] if told else whole, {
        name: value for name, value in told.items() if name not in ("cpu", "sha256")
    }


def copy_content(path: Path, place: Path) -> None:
    """Write what a library built to a file of its own: it refuses one with a footer."""
    left = content_bytes(path)
    with path.open("rb") as stream, place.open("wb") as copy:
        while left and (piece := stream.read(min(left, _PIECE))):
            copy.write(piece)
            left -= len(piece)


def content_bytes(path: Path) -> int:
    """Return how many bytes of an engine file are what a library built, without the footer."""
    return _read_footer(path)[0]


def built_on(path: Path) -> tuple[str, ...]:
    """Return the instruction sets of the CPU that an engine file was built on; empty if it does not say."""
    return tuple(map(str, _read_footer(path)[1].get("cpu", ()))) if is_file(path) else ()


def sign_onnx(path: Path, cpu: Sequence[str] = ()) -> None:
    """Append a footer to the metadata of an ONNX file, as its last bytes; ONNX readers still read the file."""
    with path.open("rb+") as stream:
        digest = hashlib.file_digest(stream, "sha256")
        stream.seek(0, os.SEEK_END)
        stream.write(_entry(_signed(digest, {"cpu": list(cpu)})))


def check_signature(path: Path) -> None:
    """Raise if an ONNX file does not match the SHA-256 that ``sign_onnx`` appended; a file without one passes."""
    left, told = _read_footer(path)
    if not told:
        return
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while left and (piece := stream.read(min(left, _PIECE))):
            digest.update(piece)
            left -= len(piece)
    _compare(path, digest, told)


def _read_footer(path: Path) -> tuple[int, dict[str, Any]]:
    size = path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(max(0, size - _LONGEST))
        return _footer(size, stream.read())


def _footer(size: int, tail: bytes) -> tuple[int, dict[str, Any]]:
    """Return the size of what stands before the footer of a file that ends with ``tail``, and the footer, or {}."""
    line, entry = tail.rfind(_MARK), tail.rfind(with_length(1, _KEY.encode()))
    text = tail[line + len(_MARK) :] if line > entry else tail[tail.find(b"{", entry) :]
    footer = _MARK + text.strip() + b"\n" if line > entry else _entry(text)
    try:
        told = json_values(text)
    except ValueError:
        told = None
    if max(line, entry) < 0 or not isinstance(told, dict) or "sha256" not in told or not tail.endswith(footer):
        return size, {}
    return size - len(footer), told


def _entry(text: bytes) -> bytes:
    return with_length(_METADATA, with_length(1, _KEY.encode()) + with_length(2, text))


def _signed(digest: Any, told: Mapping[str, Any]) -> bytes:
    """Return a footer with its checksum, which covers the content that ``digest`` has read, and the footer."""
    digest.update(json.dumps(told, sort_keys=True).encode())
    return json.dumps({**told, "sha256": digest.hexdigest()}, sort_keys=True).encode()


def _compare(path: Path, digest: Any, told: Mapping[str, Any]) -> None:
    digest.update(
        json.dumps({name: value for name, value in told.items() if name != "sha256"}, sort_keys=True).encode()
    )
    if digest.hexdigest() != told["sha256"]:
        raise EngineError(
            f"{path} is damaged: it is not as it was written (its SHA-256 differs); copy it again, or build it again "
            "from its ONNX file"
        )
