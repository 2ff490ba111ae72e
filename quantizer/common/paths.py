"""Checks of paths from users, which treat an impossible name as that of a missing file."""

from __future__ import annotations

from pathlib import Path

__all__ = ["is_file", "is_folder", "is_there"]


def is_file(path: Path) -> bool:
    """Return whether a path is a file; False also if the name is too long or has a character that is not allowed."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder; see ``is_file``."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def is_there(path: Path) -> bool:
    """Return whether a path is a file or folder; see ``is_file``."""
    return is_file(path) or is_folder(path)
