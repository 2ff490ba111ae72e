"""The profiles by name; ``profiles.add(name)(TargetProfile(...))``, in a file of its own, adds one."""

from __future__ import annotations

from dataclasses import replace

from quantizer.common.registry import Registry
from quantizer.targets.base import FloatDtype, TargetProfile

AUTO = "auto"
"""In place of a backend's name: the one whose engine is the fastest here."""

profiles: Registry[TargetProfile] = Registry("backend", reserved=(AUTO,))


def profile(name: str, float_dtype: FloatDtype | None = None) -> TargetProfile:
    """Return the profile of a backend."""
    found = profiles[name]
    return found if float_dtype is None else replace(found, float_dtype=float_dtype)
