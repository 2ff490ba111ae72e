"""Engine files: written atomically, and signed with a footer of facts that the library does not store."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from quantizer.errors import EngineError
from quantizer.export.qdq.onnx_file import with_length
from quantizer.utils import files
from quantizer.utils.paths import is_file, regular_file
from quantizer.utils.plain_values import json_values

_MARK = b"\nquantizer engine: "
_KEY = "quantizer.engine"
"""Marker before the footer of an engine file, and its key in the metadata of an ONNX file."""
_METADATA = 14
"""Field ``metadata_props`` of ModelProto, with a key (field 1) and a value (field 2)."""
_MAX_FOOTER = 2**20
_CHUNK = 2**20


def checked_output(path: Path, source: Path | None = None) -> Path:
    """Return ``path`` after a check that a file can be written there."""
    destination = files.checked_file(path, EngineError)
    if source is not None and destination.exists() and destination.samefile(source):
        raise EngineError(f"{path} is the ONNX file of this build; give the engine another name")
    return path


def whole_file(path: Path) -> AbstractContextManager[Path]:
    """Return ``quantizer.utils.files.whole_file`` with ``EngineError`` for its errors."""
    return files.whole_file(path, EngineError)


def write_engine(
    path: Path, content: memoryview, note: Mapping[str, Any] = MappingProxyType({}), cpu: Sequence[str] = ()
) -> None:
    """Write the library's engine, and a footer with its SHA-256: the library also runs damaged files.

    The footer is one line of JSON with the entries of ``note`` and the instruction sets of this CPU.
    """
    with whole_file(path) as part, part.open("wb") as stream:
        stream.write(content)
        stream.write(_MARK + _signed(hashlib.sha256(content), {"cpu": list(cpu), **note}) + b"\n")


def read_engine(path: Path, *, verify: bool = True) -> tuple[memoryview, dict[str, Any]]:
    """Return the library's engine, and its note; the note is empty without a complete footer.

    Engines may have hundreds of megabytes, so the bytes are neither copied nor set to zero before they are read.
    """
    try:
        with regular_file(path).open("rb") as stream:
            content = np.empty(os.fstat(stream.fileno()).st_size, dtype=np.uint8).data
            content = content[: stream.readinto(content)]
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror or error}") from error
    size, footer = _footer(len(content), bytes(content[-_MAX_FOOTER:]))
    if footer and verify:
        _compare(path, hashlib.sha256(content[:size]), footer)
    return content[:size], {name: value for name, value in footer.items() if name not in ("cpu", "sha256")}


def copy_content(path: Path, destination: Path) -> None:
    """Copy the library's engine without the footer, which the library refuses."""
    remaining = content_bytes(path)
    with path.open("rb") as stream, destination.open("wb") as copy:
        while remaining and (chunk := stream.read(min(remaining, _CHUNK))):
            copy.write(chunk)
            remaining -= len(chunk)


def content_bytes(path: Path) -> int:
    """Return the size in bytes of the library's engine in a file, without the footer."""
    return _read_footer(path)[0]


def built_on(path: Path) -> tuple[str, ...]:
    """Return the instruction sets of the CPU on which an engine file was built; empty if unknown."""
    return tuple(map(str, _read_footer(path)[1].get("cpu", ()))) if is_file(path) else ()


def sign_onnx(path: Path, cpu: Sequence[str] = ()) -> None:
    """Append a footer to an ONNX file, as metadata that ONNX readers accept."""
    with path.open("rb+") as stream:
        digest = hashlib.file_digest(stream, "sha256")
        stream.seek(0, os.SEEK_END)
        stream.write(_entry(_signed(digest, {"cpu": list(cpu)})))


def check_signature(path: Path) -> None:
    """Raise if an ONNX file does not match the SHA-256 of ``sign_onnx``; an unsigned file passes."""
    remaining, footer = _read_footer(path)
    if not footer:
        return
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while remaining and (chunk := stream.read(min(remaining, _CHUNK))):
            digest.update(chunk)
            remaining -= len(chunk)
    _compare(path, digest, footer)


def _read_footer(path: Path) -> tuple[int, dict[str, Any]]:
    size = path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(max(0, size - _MAX_FOOTER))
        return _footer(size, stream.read())


def _footer(size: int, tail: bytes) -> tuple[int, dict[str, Any]]:
    """Return the size of the content before the footer of a file that ends with ``tail``, and the footer, or {}."""
    line, entry = tail.rfind(_MARK), tail.rfind(with_length(1, _KEY.encode()))
    text = tail[line + len(_MARK) :] if line > entry else tail[tail.find(b"{", entry) :]
    footer = _MARK + text.strip() + b"\n" if line > entry else _entry(text)
    try:
        values = json_values(text)
    except ValueError:
        values = None
    if max(line, entry) < 0 or not isinstance(values, dict) or "sha256" not in values or not tail.endswith(footer):
        return size, {}
    return size - len(footer), values


def _entry(text: bytes) -> bytes:
    return with_length(_METADATA, with_length(1, _KEY.encode()) + with_length(2, text))


def _signed(digest: Any, values: Mapping[str, Any]) -> bytes:
    """Return a footer with a checksum of the content, which ``digest`` has read, and of the footer."""
    digest.update(json.dumps(values, sort_keys=True).encode())
    return json.dumps({**values, "sha256": digest.hexdigest()}, sort_keys=True).encode()


def _compare(path: Path, digest: Any, footer: Mapping[str, Any]) -> None:
    digest.update(
        json.dumps({name: value for name, value in footer.items() if name != "sha256"}, sort_keys=True).encode()
    )
    if digest.hexdigest() != footer["sha256"]:
        raise EngineError(
            f"{path} is damaged: its SHA-256 differs; copy it again, or build it again from its ONNX file"
        )
