"""Checks of paths from users, which treat an impossible name as that of a missing file."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from quantizer.errors import EngineError


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


def regular_file(path: Path) -> Path:
    """Return the path of a file that has an end: in a folder from elsewhere it may be a link to a device or a pipe."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is a device or a pipe, expected a regular file", str(path))
    if not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return path


def existing_file(path: Path, what: str = "engine") -> Path:
    """Return ``path`` if it is a file with content."""
    if not is_file(path):
        there = is_folder(path) or os.path.lexists(path)
        raise EngineError(
            f"{path} is not a file: expected the {what} file" if there else f"{what} file not found: {path}"
        )
    if path.stat().st_size == 0:
        raise EngineError(f"{what} file {path} is empty: write it again")
    return path
