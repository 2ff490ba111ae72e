"""Checks of paths from users; an invalid name counts as a missing file."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from quantizer.errors import EngineError


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with ``~`` expanded; as in a shell, an unknown user's ``~name`` does not change."""
    return Path(os.path.expanduser(path))


def is_file(path: Path) -> bool:
    """Return whether a path is a file; False if the name is invalid."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder; False if the name is invalid."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def is_there(path: Path) -> bool:
    """Return whether a path is a file or folder; False if the name is invalid."""
    return is_file(path) or is_folder(path)


def regular_file(path: Path) -> Path:
    """Return the path of a readable file or folder; raise for devices and pipes, which may have no end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is a device or a pipe; expected a regular file", str(path))
    if not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return path


def existing_file(path: Path, kind: str = "engine") -> Path:
    """Return the path of a non-empty file; raise for any other path."""
    if not is_file(path):
        exists = is_folder(path) or os.path.lexists(path)
        raise EngineError(
            f"{path} is not a file: expected the {kind} file" if exists else f"{kind} file not found: {path}"
        )
    if path.stat().st_size == 0:
        raise EngineError(f"{kind} file {path} is empty: write it again")
    return path
