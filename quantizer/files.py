"""Writing files and folders that appear at once."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantizer.errors import QuantizerError

__all__ = ["whole_file", "write_folder"]


@contextmanager
def whole_file(path: Path, error: type[QuantizerError] = QuantizerError) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to; at the end it takes its place, after an exception it is gone.

    Raises:
        QuantizerError: the system refused to write; ``error`` is the kind.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        part.replace(path)
    except OSError as refused:
        raise error(f"cannot write {path}: {refused.strerror or refused}") from refused
    finally:
        part.unlink(missing_ok=True)


def write_folder(folder: str | os.PathLike[str], fill: Callable[[Path], object]) -> Path:
    """Make a folder that appears at once: ``fill(path)`` writes into a temporary one beside it.

    A folder that stands there already is replaced when the new one is complete. After an error nothing is left behind,
    the parent folders that were made for it included.

    Raises:
        QuantizerError: the folder cannot be made there, or ``fill`` met an error of the operating system.
    """
    target = Path(folder).absolute()
    made = [parent for parent in target.parents if not parent.exists()]
    try:
        with _said_plainly(target):
            if target.exists() and not target.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target))
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            try:
                fill(temporary)
            except OSError as error:
                raise QuantizerError(f"nothing was written to {target}: {error}") from error
            with _said_plainly(target):
                _put_in_place(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except BaseException:
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        raise
    return target


def _put_in_place(temporary: Path, target: Path) -> None:
    temporary.chmod(0o755)
    if not target.exists():
        os.replace(temporary, target)
        return
    former = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent)) / target.name
    os.replace(target, former)
    try:
        os.replace(temporary, target)
    except OSError:
        os.replace(former, target)
        raise
    finally:
        shutil.rmtree(former.parent, ignore_errors=True)


@contextmanager
def _said_plainly(target: Path) -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        where = error.filename or target.parent
        raise QuantizerError(f"{target} cannot be written: {where} is no folder; choose another folder") from error
    except OSError as error:
        raise QuantizerError(f"{target} cannot be written: {error.strerror}; choose another folder") from error
