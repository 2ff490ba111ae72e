"""Properties of this machine's CPU, and trust in engine files with native code.

Most engine files are data for a library. A compiled torch engine contains a shared library, whose code runs with the
rights of the process when it is loaded.
"""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

from quantizer.errors import EngineError

INSTRUCTIONS = (
    "avx2",
    "avx512f",
    "avx_vnni",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
    "sve",
)
"""CPU flags that determine the speed of INT8 and floats, as /proc/cpuinfo spells them."""

_CPU_INFO = Path("/proc/cpuinfo")


def cpu_info() -> dict[str, str]:
    """Return the first block of /proc/cpuinfo, keys in lower case; empty on other systems."""
    try:
        text = _CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = re.findall(r"^([^:\n]+?)\s*:\s*(.*)$", text.split("\n\n")[0], flags=re.MULTILINE)
    return {key.lower(): value for key, value in pairs}


def cpu_instructions() -> tuple[str, ...]:
    """Return the entries of ``INSTRUCTIONS`` that this CPU has; empty on other systems."""
    flags = cpu_flags()
    return tuple(name for name in INSTRUCTIONS if name in flags)


def cpu_flags() -> set[str]:
    """Return the names of the CPU's instruction sets as /proc/cpuinfo spells them; empty on other systems."""
    info = cpu_info()
    return set(info.get("flags", info.get("features", "")).split())


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def has_vnni() -> bool:
    """Return whether this is an x86 CPU that multiplies bytes exactly, and faster than floats."""
    return any("vnni" in flag for flag in cpu_flags())


def saturates() -> bool:
    """Return whether this is an x86 CPU without VNNI; False if the flags are unknown.

    There, OpenVINO and ONNX Runtime multiply bytes by VPMADDUBSW, which adds two products in 16 bits and saturates. A
    linear with full INT8 ranges had an SQNR of 19 dB.
    """
    return "avx2" in cpu_flags() and not has_vnni()


COMPILED = "compiled.pt2"
"""Name of the native code in the archive of a compiled torch engine."""

_BUILT_DIGESTS: set[str] = set()


def note_built(code: bytes) -> None:
    """Remember native code that this process built."""
    _BUILT_DIGESTS.add(hashlib.sha256(code).hexdigest())


def built_here() -> list[str]:
    """Return the SHA-256 of all native code that this process or its child processes built."""
    return sorted(_BUILT_DIGESTS)


def note_digests(digests: Iterable[str]) -> None:
    """Remember the digests that ``built_here`` returned in a child or parent process."""
    _BUILT_DIGESTS.update(digests)


def native_code(path: Path) -> bytes | None:
    """Return the native code in an engine file; None for other files."""
    try:
        with zipfile.ZipFile(path) as archive:
            # A compressed entry could expand without limit; loading the file refuses it.
            stored = [entry for entry in archive.infolist() if entry.compress_type == zipfile.ZIP_STORED]
            return next((archive.read(entry) for entry in stored if entry.filename == COMPILED), None)
    except (zipfile.BadZipFile, NotImplementedError, OSError, RuntimeError):
        # Another kind of engine.
        return None


def is_untrusted(path: Path) -> bool:
    """Return whether an engine file contains native code that this process did not build."""
    code = native_code(path)
    return code is not None and hashlib.sha256(code).hexdigest() not in _BUILT_DIGESTS


def check_trust(path: Path, code: bytes, *, trust: bool) -> None:
    """Raise if native code is not trusted and this process did not build it.

    Args:
        path: the engine file, for the message.
        code: its native code.
        trust: whether the user trusts whoever built it.

    Raises:
        EngineError: the code is not trusted.
    """
    if trust or hashlib.sha256(code).hexdigest() in _BUILT_DIGESTS:
        return
    raise EngineError(
        f"{path} contains native code that this process did not build. Loading it runs that code with your rights: "
        "pass trust=True (--trust on the command line) if you trust whoever built it, or build the engine again "
        "from its ONNX file"
    )
