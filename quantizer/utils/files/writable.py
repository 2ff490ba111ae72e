"""The real place of a path, checks that it can be written, and syncing to disk."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quantizer.errors import QuantizerError
from quantizer.utils.files.temporary import temporary_beside

_PROBE = 4096
_DEEPEST = 256
"""How many folders may lie in one another: Python makes them by as many calls within each other."""
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors of the system that only writing has."""
_REFUSED = (errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTEMPTY, errno.ETXTBSY)
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


def real_place(path: str | os.PathLike[str], error: type[QuantizerError] = QuantizerError) -> Path:
    """Return the absolute path with all links resolved."""
    text = os.fspath(path)
    if not text:
        raise error("the path to write to is empty; give the name of a file or folder")
    try:
        whole = Path(text).absolute()
        for part in (whole, *whole.parents):
            if part.is_symlink() and not part.exists():
                raise error(
                    f"{text} cannot be written: {part} is a link to {os.readlink(part)}, which does not exist; make "
                    "that, remove the link, or choose another path"
                )
        found = Path(os.path.realpath(whole))
        # The system does not check the names of folders that do not exist yet.
        there = next(part for part in (found, *found.parents) if part.is_dir())
        longest = max(len(os.fsencode(name)) for name in found.parts)
        if longest > os.pathconf(there, "PC_NAME_MAX") or len(found.parts) > _DEEPEST:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    except OSError as refused:
        raise error(f"{text} cannot be written: {refused.strerror}; choose another path") from refused
    except ValueError as refused:
        raise error(f"{text!r} is no name of a file or folder: {refused}") from refused
    return found


def file_behind(path: str | os.PathLike[str], error: type[QuantizerError] = QuantizerError) -> Path:
    """Return the real place of a file that may be written or replaced."""
    found = real_place(path, error)
    try:
        mode = found.stat().st_mode
    except OSError:
        # It does not exist yet; its folder is checked below.
        mode = stat.S_IFREG
    if stat.S_ISDIR(mode):
        raise error(f"cannot write {path}: it is a folder; expected the name of a file, such as model.onnx")
    if not stat.S_ISREG(mode):
        raise error(f"cannot write {path}: it is a device, a pipe or a socket; expected the name of a file")
    if not found.parent.is_dir():
        what = "is no folder" if found.parent.exists() else "does not exist"
        raise error(f"cannot write {path}: the folder {found.parent} {what}; make it first")
    return found


def checked_file(path: str | os.PathLike[str], error: type[QuantizerError] = QuantizerError) -> Path:
    """Return the real place of a file, after a test write into its folder, before any work."""
    found = file_behind(path, error)
    if not os.access(found.parent, os.W_OK | os.X_OK):
        raise error(
            f"{path} cannot be written: no permission to write in the folder {found.parent}; choose another folder"
        )
    try:
        with temporary_beside(found) as folder:
            probe(folder)
    except OSError as refused:
        raise error(f"{path} cannot be written: {refused.strerror}; choose another folder") from refused
    return found


def protected_reason(folder: Path) -> str | None:
    """Return why an existing folder must never be replaced, whatever its content; None if it may be."""
    if folder == folder.parent:
        return "is the root of a file system"
    with suppress(FileNotFoundError):
        here = Path.cwd()
        if any(_same(folder, part) for part in (here, *here.parents)):
            return "is the current folder, or holds it"
    if any(_same(folder, home) for home in _homes()):
        return "is a home"
    if os.path.lexists(folder / ".git"):
        return "is a working tree of git"
    if folder.is_mount():
        return "is where a file system is mounted"
    return None


def require_room(folder: Path, size: int, what: str) -> None:
    """Raise, before the work, if a disk has too little free space."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise QuantizerError(
            f"no room in {folder.parent}: {what} takes {size / 2**20:.0f} MiB at least, and {free / 2**20:.0f} MiB are "
            "free; make room, or choose another folder"
        )


def require_writable(folder: Path, error: type[QuantizerError] = QuantizerError) -> None:
    """Raise if a folder cannot be made, by the nearest folder above that exists; nothing is written."""
    with said_plainly(folder, error):
        above = next(place for place in (folder, *folder.parents) if place.exists())
    if not above.is_dir():
        raise error(f"{folder} cannot be written: {above} is no folder; choose another folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise error(f"{folder} cannot be written: {above} is read-only for you; choose another folder")


def probe(folder: Path) -> None:
    """Write a small file into a folder and remove it."""
    file = folder / "probe"
    file.write_bytes(bytes(_PROBE))
    file.unlink()


def settle(folder: Path) -> None:
    """Set the mode of everything below a folder according to the umask, and sync it to disk.

    Some libraries write a file under a temporary name, and leave it readable only by its owner.
    """
    mode = stat.S_IMODE(folder.stat().st_mode)
    for root, folders, names in os.walk(folder):
        for name in names:
            file = os.path.join(root, name)
            if os.path.islink(file):
                continue
            os.chmod(file, mode & 0o666)
            _sync(file)
        for name in folders:
            if not os.path.islink(os.path.join(root, name)):
                os.chmod(os.path.join(root, name), mode)
        sync_folder(Path(root))


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk, if its file system supports that."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EBADF):
            raise


def _system_error(error: Exception) -> OSError | None:
    """Return the system error behind an error, which Rust libraries put into their messages; None if there is none."""
    if isinstance(error, OSError):
        return error
    said = _SYSTEM_ERROR.search(str(error))
    return OSError(int(said[1]), os.strerror(int(said[1]))) if said is not None else None


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _homes() -> Iterator[Path]:
    with suppress(RuntimeError):
        yield Path.home()
    # Also the home in the user database, if the system has one, since HOME may be another folder.
    with suppress(ImportError, KeyError):
        import pwd

        yield Path(pwd.getpwuid(os.getuid()).pw_dir)


@contextmanager
def said_plainly(path: object, error: type[QuantizerError] = QuantizerError) -> Iterator[None]:
    """Turn errors of the operating system into one about a path that cannot be written."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as refused:
        where = refused.filename or path
        raise error(f"{path} cannot be written: {where} is no folder; choose another folder") from refused
    except OSError as refused:
        raise error(f"{path} cannot be written: {refused.strerror}; choose another folder") from refused


@contextmanager
def system_errors_as(words: str, error: type[QuantizerError] = QuantizerError, *, within: Path) -> Iterator[None]:
    """Turn errors of the operating system, including those in messages of libraries, into a ``QuantizerError``.

    An error about another place than the one written names that place, and says whether it was read or written.
    """
    try:
        yield
    except QuantizerError:
        raise
    except Exception as other:
        refused = _system_error(other)
        if refused is None:
            raise
        raise error(_told(other, refused, words, within)) from other


def _told(other: Exception, refused: OSError, words: str, within: Path) -> str:
    """Return what a system error says: ``words`` and the reason if it came from writing into ``within``."""
    reason = refused.strerror or str(refused)
    if isinstance(refused.filename, str | bytes | os.PathLike):
        place = os.fsdecode(refused.filename)
        if _lies_in(place, within):
            return f"{words}: {reason}"
        # A file that can be read was refused for writing.
        write = refused.errno in _WRITE_ERRORS or (refused.errno in _REFUSED and os.access(place, os.R_OK))
        return f"{place} cannot be {'written' if write else 'read'}: {reason}; {words}"
    if refused.errno in (*_WRITE_ERRORS, errno.EIO):
        return f"{words}: {reason}"
    return f"{type(other).__name__}: {(str(other).strip() or reason).splitlines()[0]}; {words}"


def _lies_in(place: str, folder: Path) -> bool:
    """Return whether a path is that of a folder or lies in it, by name or by its real place."""
    paths = (Path(place).absolute(), Path(os.path.realpath(place)))
    return any(path.is_relative_to(real) for path in paths for real in (folder, Path(os.path.realpath(folder))))
