"""Checks of a path that somebody typed: a name that no file can have is the name of none."""

from __future__ import annotations

from pathlib import Path

__all__ = ["is_file", "is_folder", "is_there"]


def is_file(path: Path) -> bool:
    """Return whether there is such a file; not where the name is too long, or has a character that no name has."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Return whether there is such a folder; see ``is_file``."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def is_there(path: Path) -> bool:
    """Return whether there is such a file or folder; see ``is_file``."""
    return is_file(path) or is_folder(path)
