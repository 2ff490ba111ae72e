"""Checks of paths from users, which treat an impossible name as that of a missing file."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["expanded", "is_file", "is_folder", "is_there"]


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with the home for its ``~``; with an unknown user's it stays as it is, as in a shell."""
    return Path(os.path.expanduser(path))


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
