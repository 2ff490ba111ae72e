"""Atomic writing of files and folders, which replaces only folders that this package wrote, of the same kind.

A new folder is filled beside its target, marked, synced to disk and renamed in one step. If it replaces a folder, both
are exchanged in one step, so that a kill at any moment leaves one complete folder. If the system cannot exchange
folders, the earlier folder is renamed first. After a kill in between, the next process that reads or writes the folder
restores it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quantizer.errors import QuantizerError
from quantizer.utils.files.temporary import (
    MARKER,
    NEW,
    OLD,
    discard,
    foreign,
    leftovers,
    new_name,
    other_writer,
    read_marker,
    remove_leftovers,
    temporary_beside,
    write_marker,
)
from quantizer.utils.files.writable import (
    file_behind,
    probe,
    protected_reason,
    real_place,
    said_plainly,
    settle,
    sync_folder,
    system_errors_as,
)

_NAMES_SHOWN = 3


def checked_folder(folder: str | os.PathLike[str], kind: str, *, replace: bool) -> Path:
    """Return the resolved path of a folder after checking that a folder of this kind may be written there.

    Raises:
        QuantizerError: the path is a file, a protected folder, a folder with other content, or exists without
            ``replace``.
    """
    place = real_place(folder)
    with said_plainly(folder):
        if not place.exists():
            return place
        if not place.is_dir():
            raise QuantizerError(f"{folder} cannot be written: it is not a folder; choose another folder")
        reason = protected_reason(place) or _foreign_content_reason(place, kind)
    if reason is not None:
        raise QuantizerError(f"{folder} {reason}; nothing was changed: choose another folder")
    if not replace:
        raise QuantizerError(
            f"{folder} already exists; choose another folder, or replace it with --force (in Python replace=True)"
        )
    return place


def require_sole_writer(folder: str | os.PathLike[str]) -> None:
    """Raise if another process of this machine is writing the same folder; call this before long work."""
    owner = other_writer(real_place(folder))
    if owner is not None:
        raise QuantizerError(
            f"{folder} is being written by process {owner}: wait for it, stop it, or choose another folder"
        )


def write_folder(
    folder: str | os.PathLike[str], fill: Callable[[Path], object], *, kind: str, replace: bool = True
) -> Path:
    """Write a folder atomically with ``fill(path)``, as in ``with new_folder(...) as path``, and return its path."""
    with new_folder(folder, kind=kind, replace=replace) as new:
        fill(new)
    return Path(folder).absolute()


@contextmanager
def new_folder(folder: str | os.PathLike[str], *, kind: str, replace: bool = True) -> Iterator[Path]:
    """Yield a temporary folder, which atomically becomes ``folder`` at the end of the block.

    An earlier folder of the same kind is replaced when the new one is complete. After an error nothing is left behind,
    including new parent folders. If the target must not be replaced at the end, the new folder is kept beside it, and
    the error names its path.
    """
    restore_folder(folder)
    place = checked_folder(folder, kind, replace=replace)
    new_parents = [parent for parent in place.parents if not parent.exists()]
    new = new_name(place)
    try:
        with said_plainly(folder):
            place.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(place)
            new.mkdir()
            probe(new)
        with system_errors_as(f"nothing was written to {folder}", within=new):
            yield new
            write_marker(new, kind)
            settle(new)
        try:
            checked_folder(folder, kind, replace=replace)
            with said_plainly(folder):
                _put_in_place(new, place, kind)
        except QuantizerError as refused:
            raise _kept_beside(new, place, refused) from refused
        with said_plainly(folder), said_complete(folder):
            sync_folder(place.parent)
            _clear(new, place)
    finally:
        _clear(new, place)
        for parent in new_parents:
            with suppress(OSError):
                parent.rmdir()


@contextmanager
def said_complete(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Add the message that the folder is complete to an interrupt in the block, which must follow the work."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise type(stop)(f"{Path(folder).absolute()} is complete") from stop


def restore_folder(folder: str | os.PathLike[str]) -> None:
    """Restore a folder after a killed replacement: the new folder if complete, otherwise the earlier one."""
    with suppress(OSError, ValueError):
        place = Path(os.path.realpath(folder))
        for old in leftovers(place, OLD):
            if not os.path.lexists(place):
                new = old.with_suffix(NEW)
                os.rename(new if (new / MARKER).exists() else old, place)


def _foreign_content_reason(place: Path, kind: str) -> str | None:
    """Return why a folder must not be replaced because of its content; None if this package wrote all of it."""
    names = sorted(os.listdir(place))
    if not names:
        return None
    marker = read_marker(place)
    if marker is None:
        problem = "cannot be read" if MARKER in names else "is missing"
        return (
            f"was not written by this quantizer ({MARKER} {problem}): it contains {_first_names(names)}. Remove it "
            "yourself if you do not need its content"
        )
    if marker.kind != kind:
        return f"contains a {marker.kind}, which a {kind} does not replace"
    foreign_names = foreign(place, marker)
    if foreign_names:
        return f"contains {_first_names(foreign_names)}, which quantizer did not write: move that elsewhere"
    return None


def _first_names(names: list[str]) -> str:
    return ", ".join(map(repr, names[:_NAMES_SHOWN])) + (" and more" if len(names) > _NAMES_SHOWN else "")


def _put_in_place(new: Path, place: Path, kind: str) -> None:
    if not place.exists() or not os.listdir(place):
        # A rename can replace an empty folder, but no other.
        os.rename(new, place)
        return
    if not (place / MARKER).exists():
        # A folder of an earlier version gets a marker, because its removal needs the list of names.
        write_marker(place, kind)
    shutil.copymode(place, new)
    if exchange(new, place):
        return
    old = new.with_suffix(OLD)
    try:
        os.rename(place, old)
        os.rename(new, place)
    finally:
        if os.path.lexists(old) and not os.path.lexists(place):
            os.rename(old, place)


def _clear(new: Path, place: Path) -> None:
    discard(new)
    if os.path.lexists(place):
        discard(new.with_suffix(OLD))


def _kept_beside(new: Path, place: Path, refused: QuantizerError) -> QuantizerError:
    """Keep a new folder that could not replace its target, as it may be hours of work; return the error."""
    number = 1
    while os.path.lexists(backup := place.with_name(f"{place.name}.new{number}")):
        number += 1
    try:
        os.rename(new, backup)
    except OSError:
        return refused
    return QuantizerError(f"{refused}. The new folder is kept in {backup}")


@contextmanager
def whole_file(path: str | os.PathLike[str], error: type[QuantizerError] = QuantizerError) -> Iterator[Path]:
    """Yield a path to write to, which atomically replaces ``path`` at the end, or is removed after an error.

    If ``path`` is a link, its target is replaced.
    """
    place = file_behind(path, error)
    with (
        system_errors_as(f"cannot write {path}", error, within=place.parent),
        temporary_beside(place) as folder,
    ):
        part = folder / place.name
        yield part
        settle(folder)
        os.replace(part, place)
        sync_folder(place.parent)


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# Errors if the kernel, file system or container does not support the call.
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM})


def exchange(one: Path, other: Path) -> bool:
    """Exchange two paths of one file system atomically; return False without a change if not supported."""
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None, use_errno=True)
    # Older C libraries lack the function.
    call = getattr(library, "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(other))
