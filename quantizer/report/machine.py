"""The conditions of a measurement: installed versions and the machine."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from functools import cache
from importlib import metadata

from quantizer import __version__
from quantizer.plan.targets import profile, profiles
from quantizer.utils import gpu
from quantizer.utils.cpu import cpu_info, cpu_instructions, usable_cores

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "scipy",
    "scikit-learn",
    "onnx",
    "onnx-ir",
    "onnxscript",
)
"""Distributions whose version can change the figures of a run; backends add theirs."""


def collect_versions(packages: Iterable[str] | None = None) -> dict[str, str]:
    """Return the versions of this package and of all installed packages, in the given order.

    The version of torch includes its build (``2.13.0+cu130``), which the metadata of some wheels omits.
    """
    versions = {}
    if packages is None:
        # A source tree has no metadata, and another distribution may be called quantizer.
        versions["quantizer"] = __version__
        backends = (package for name in profiles.names() for package in profile(name).packages)
        packages = (*PACKAGES, *dict.fromkeys(backends), "nncf")
    for package in packages:
        try:
            versions[package] = _version(package)
        except metadata.PackageNotFoundError:
            continue
    # Importing torch only for its version would take seconds.
    if "torch" in versions and "torch" in sys.modules:
        versions["torch"] = str(sys.modules["torch"].__version__)
    return versions


@cache
def _version(package: str) -> str:
    """Return the installed version of a package; a run asks for all of them at each file that it builds."""
    return metadata.version(package)


def collect_machine() -> dict[str, str | int | float | None]:
    """Return ``cpu``, ``instructions``, ``cores`` (usable by this process), ``memory_gib``, ``os`` and ``python``.

    ``memory_gib`` is the memory of the machine; None if unknown. ``gpu`` is the GPU, if there is one.
    """
    # Without torch, nothing has run on a GPU, and importing it takes seconds.
    has_gpu = "torch" in sys.modules and gpu.is_present()
    return {
        "cpu": cpu_info().get("model name") or platform.processor() or platform.machine(),
        "instructions": ", ".join(cpu_instructions()) or None,
        "cores": usable_cores(),
        "memory_gib": _memory_gib(),
        "os": platform.platform(),
        "python": platform.python_version(),
        **({"gpu": gpu.description()} if has_gpu else {}),
    }


def _memory_gib() -> float | None:
    try:
        pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    return round(pages * page_bytes / 2**30, 1) if pages > 0 else None
