"""Writing folders that appear at once."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from quantizer.errors import QuantizerError

__all__ = ["write_folder"]


def write_folder(folder: str | os.PathLike[str], fill: Callable[[Path], object]) -> Path:
    """Make a folder that appears at once: ``fill(path)`` writes into a temporary one beside it.

    A folder that stands there already is replaced when the new one is complete, and comes back if that fails.

    Raises:
        QuantizerError: the folder cannot be written.
    """
    target = Path(folder).absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise QuantizerError(f"{target} cannot be written: {error.strerror}; choose another folder") from error
    try:
        fill(temporary)
        temporary.chmod(0o755)
        if target.is_dir():
            _swap(temporary, target)
        else:
            os.replace(temporary, target)
    except OSError as error:
        raise QuantizerError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _swap(new: Path, target: Path) -> None:
    """Put ``new`` in the place of the folder ``target``, or leave everything as it was."""
    former = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    os.replace(target, former)
    try:
        os.replace(new, target)
    except BaseException:
        os.replace(former, target)
        raise
    shutil.rmtree(former)
