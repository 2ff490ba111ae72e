"""Facts about this machine's CPU, and its use of compiled code.

Most engine files are data for a library. A compiled torch engine holds a shared library, whose code runs with the
rights of the process as soon as it is loaded.
"""

from __future__ import annotations

import hashlib
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
"""CPU flags that decide the speed of INT8 and of floats beside it, as /proc/cpuinfo spells them."""

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
    """Return those of ``INSTRUCTIONS`` that this CPU has; empty on other systems."""
    flags = cpu_flags()
    return tuple(name for name in INSTRUCTIONS if name in flags)


def cpu_flags() -> set[str]:
    """Return the names of the CPU's instruction sets as /proc/cpuinfo spells them; empty on other systems."""
    info = cpu_info()
    return set(info.get("flags", info.get("features", "")).split())


def saturates() -> bool:
    """Return whether this is an x86 CPU without VNNI; False if the system does not tell.

    OpenVINO and ONNX Runtime multiply bytes by VPMADDUBSW there, which adds two products in 16 bits and saturates: a
    linear with full ranges kept an SQNR of 19 dB.
    """
    flags = cpu_flags()
    return "avx2" in flags and not any("vnni" in flag for flag in flags)


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
