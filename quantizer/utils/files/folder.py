"""Atomic writing of a folder, which replaces only a folder that this package wrote, of the same kind.

A new folder is filled beside its place, marked, synced to disk and renamed in one step. It is exchanged with a former
folder in one step too, so that a kill at any moment leaves one of the two in place, complete. If the system cannot
exchange folders, the former folder is renamed first; after a kill in between, the next process that reads or writes
the folder restores it.

Atomic writing of a file.
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

_SHOWN = 3


def checked_folder(folder: str | os.PathLike[str], kind: str, *, replace: bool) -> Path:
    """Return the real place of a folder, after a check that a folder of this kind may be written there."""
    place = real_place(folder)
    with said_plainly(folder):
        if not place.exists():
            return place
        if not place.is_dir():
            raise QuantizerError(f"{folder} cannot be written: it is no folder; choose another folder")
        reason = protected_reason(place) or _kept_reason(place, kind)
    if reason is not None:
        raise QuantizerError(f"{folder} {reason}; nothing was changed: choose another folder")
    if not replace:
        raise QuantizerError(
            f"{folder} exists already; choose another folder, or replace it with --force, in Python replace=True"
        )
    return place


def require_sole_writer(folder: str | os.PathLike[str]) -> None:
    """Check before long work that no other process of this machine is writing the same folder."""
    owner = other_writer(real_place(folder))
    if owner is not None:
        raise QuantizerError(
            f"{folder} is being written by process {owner} now: wait for it, end it, or choose another folder"
        )


def write_folder(
    folder: str | os.PathLike[str], fill: Callable[[Path], object], *, kind: str, replace: bool = True
) -> Path:
    """Write a folder atomically by ``fill(path)``, as in ``with new_folder(...) as path``; return its place."""
    with new_folder(folder, kind=kind, replace=replace) as new:
        fill(new)
    return Path(folder).absolute()


@contextmanager
def new_folder(folder: str | os.PathLike[str], *, kind: str, replace: bool = True) -> Iterator[Path]:
    """Write a folder atomically: yield a temporary folder beside it, which takes its place at the end of the block.

    A former folder of the same kind is replaced when the new one is complete. After an error nothing is left behind;
    new parent folders are removed too. If the place has something at the end that must not be replaced, the new folder
    is kept beside it, and the error names its path.
    """
    restore_folder(folder)
    place = checked_folder(folder, kind, replace=replace)
    made = [parent for parent in place.parents if not parent.exists()]
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
        for parent in made:
            with suppress(OSError):
                parent.rmdir()


@contextmanager
def said_complete(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Add to an interrupt in the block, which must follow the work, the message that the folder is complete."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise type(stop)(f"{Path(folder).absolute()} is complete") from stop


def restore_folder(folder: str | os.PathLike[str]) -> None:
    """Restore a folder whose replacement was killed: the new folder if it is complete, otherwise the former one."""
    with suppress(OSError, ValueError):
        place = Path(os.path.realpath(folder))
        for old in leftovers(place, OLD):
            if not os.path.lexists(place):
                new = old.with_suffix(NEW)
                os.rename(new if (new / MARKER).exists() else old, place)


def _kept_reason(place: Path, kind: str) -> str | None:
    """Return why a folder must be kept because of its content; None if this package wrote all of it."""
    names = sorted(os.listdir(place))
    if not names:
        return None
    marker = read_marker(place)
    if marker is None:
        what = "cannot be read" if MARKER in names else "is missing"
        return (
            f"was not written by this quantizer ({MARKER} {what} in it): it holds {_some(names)}. Remove it yourself "
            "if nothing in it is needed"
        )
    if marker.kind != kind:
        return f"holds a {marker.kind}, which a {kind} does not replace"
    others = foreign(place, marker)
    if others:
        return f"holds {_some(others)}, which quantizer did not write: move that elsewhere"
    return None


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:_SHOWN])) + (" and more" if len(names) > _SHOWN else "")


def _put_in_place(new: Path, place: Path, kind: str) -> None:
    if not place.exists() or not os.listdir(place):
        # A rename can replace an empty folder, but no other.
        os.rename(new, place)
        return
    if not (place / MARKER).exists():
        # A folder of an earlier version gets a marker, since its removal needs the list of names.
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
    """Remove the new folder if it is still temporary, and the former folder if it was replaced."""
    discard(new)
    if os.path.lexists(place):
        discard(new.with_suffix(OLD))


def _kept_beside(new: Path, place: Path, refused: QuantizerError) -> QuantizerError:
    """Keep a new folder that could not be put in place, which may be hours of work; return an error with its path."""
    number = 1
    while os.path.lexists(kept := place.with_name(f"{place.name}.new{number}")):
        number += 1
    try:
        os.rename(new, kept)
    except OSError:
        return refused
    return QuantizerError(f"{refused}. What was made is kept in {kept}")


@contextmanager
def whole_file(path: str | os.PathLike[str], error: type[QuantizerError] = QuantizerError) -> Iterator[Path]:
    """Yield a path to write to; at the end its file replaces ``path``, after an exception it is removed.

    If ``path`` is a link, the file that it refers to is replaced.
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
# The kernel, file system or container does not support the call; the two folders are in order.
_UNABLE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM})


def exchange(one: Path, other: Path) -> bool:
    """Exchange two paths of one file system atomically; return False, with no change, if the system cannot do that."""
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
    if code in _UNABLE:
        return False
    raise OSError(code, os.strerror(code), str(other))
