"""Native code in engine files: this process loads what it has built itself, and anything else only when told to.

Most engine files are data for a library. A compiled torch engine holds a shared library, whose code runs with the
rights of the process as soon as it is loaded.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable
from pathlib import Path

from quantizer.errors import EngineError

COMPILED = "compiled.pt2"
"""The file with native code in the archive of a compiled torch engine."""

_BUILT: set[str] = set()


def note_built(code: bytes) -> None:
    """Remember native code that this process has built."""
    _BUILT.add(hashlib.sha256(code).hexdigest())


def built_here() -> list[str]:
    """Return the SHA-256 of all native code that this process, or a process that it started, has built."""
    return sorted(_BUILT)


def note_digests(digests: Iterable[str]) -> None:
    """Remember what ``built_here`` returned in a process that this one started, or that started this one."""
    _BUILT.update(digests)


def native_code(path: Path) -> bytes | None:
    """Return the native code in an engine file; None where it has none."""
    try:
        with zipfile.ZipFile(path) as archive:
            # One that is compressed could grow without an end, and is refused when the file is loaded.
            stored = [one for one in archive.infolist() if one.compress_type == zipfile.ZIP_STORED]
            return next((archive.read(one) for one in stored if one.filename == COMPILED), None)
    except (zipfile.BadZipFile, NotImplementedError, OSError, RuntimeError):
        # Another kind of engine.
        return None


def is_untrusted(path: Path) -> bool:
    """Return whether an engine file holds native code that this process has not built."""
    code = native_code(path)
    return code is not None and hashlib.sha256(code).hexdigest() not in _BUILT


def check_trust(path: Path, code: bytes, *, trust: bool) -> None:
    """Raise for native code that is not trusted and that this process has not built.

    Args:
        path: the engine file, for the message.
        code: the native code in it.
        trust: whether the caller trusts whoever built it.

    Raises:
        EngineError: as said.
    """
    if trust or hashlib.sha256(code).hexdigest() in _BUILT:
        return
    raise EngineError(
        f"{path} holds compiled native code, which this process did not build. Loading it runs that code with your "
        "rights: pass trust=True (--trust on the command line) if you trust whoever built it, or build the engine "
        "again from its ONNX file"
    )
