"""Facts about this machine's CPU, from the system."""

from __future__ import annotations

import re
from pathlib import Path

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
