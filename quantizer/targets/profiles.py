"""The profiles by name: ``profiles.add(name)(TargetProfile(...))`` in a file of its own adds one."""

from __future__ import annotations

from dataclasses import replace

from quantizer.common.registry import Registry
from quantizer.targets.base import FloatDtype
from quantizer.targets.base import TargetProfile

__all__ = ["profile", "profiles"]

profiles: Registry[TargetProfile] = Registry("backend")


def profile(name: str, float_dtype: FloatDtype | None = None) -> TargetProfile:
    """Return the profile of a backend.

    Args:
        name: the backend, as a configuration names it.
        float_dtype: the type of what is not quantized; None: what the backend wants.

    Raises:
        ConfigError: no such backend; the message lists those there are.
    """
    found = profiles[name]
    return found if float_dtype is None else replace(found, float_dtype=float_dtype)
