"""The profiles by name: ``profiles.add(name)(TargetProfile(...))`` in a file of its own adds one."""

from __future__ import annotations

from quantizer.registry import Registry
from quantizer.targets.base import TargetProfile

__all__ = ["profile", "profiles"]

profiles: Registry[TargetProfile] = Registry("backend")


def profile(name: str) -> TargetProfile:
    """The profile of the backend ``name``.

    Raises:
        ConfigError: no such backend; the message lists those there are.
    """
    return profiles[name]
