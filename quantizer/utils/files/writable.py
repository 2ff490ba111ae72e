"""Resolution of paths, checks that they can be written, and syncing to disk."""

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
"""Largest depth of nested folders, because Python creates them recursively."""
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors of the system that only writing causes."""
_PERMISSION_ERRORS = (errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTEMPTY, errno.ETXTBSY)
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


def real_place(path: str | os.PathLike[str], error: type[QuantizerError] = QuantizerError) -> Path:
    """Return the absolute path with all links resolved."""
    text = os.fspath(path)
    if not text:
        raise error("the path to write to is empty; pass the name of a file or folder")
    try:
        absolute = Path(text).absolute()
        for part in (absolute, *absolute.parents):
            if part.is_symlink() and not part.exists():
                raise error(
                    f"{text} cannot be written: {part} is a link to {os.readlink(part)}, which does not exist; make "
                    "that, remove the link, or choose another path"
                )
        resolved = Path(os.path.realpath(absolute))
        # The system does not check the names of folders that do not exist yet.
        existing = next(part for part in (resolved, *resolved.parents) if part.is_dir())
        longest = max(len(os.fsencode(name)) for name in resolved.parts)
        if longest > os.pathconf(existing, "PC_NAME_MAX") or len(resolved.parts) > _DEEPEST:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    except OSError as refused:
        raise error(f"{text} cannot be written: {refused.strerror}; choose another path") from refused
    except ValueError as refused:
        raise error(f"{text!r} is not a valid name of a file or folder: {refused}") from refused
    return resolved


def file_behind(path: str | os.PathLike[str], error: type[QuantizerError] = QuantizerError) -> Path:
    """Return the resolved path of a file that may be written or replaced."""
    resolved = real_place(path, error)
    try:
        mode = resolved.stat().st_mode
    except OSError:
        # It does not exist yet; its folder is checked below.
        mode = stat.S_IFREG
    if stat.S_ISDIR(mode):
        raise error(f"cannot write {path}: it is a folder; expected the name of a file, such as model.onnx")
    if not stat.S_ISREG(mode):
        raise error(f"cannot write {path}: it is a device, a pipe or a socket; expected the name of a file")
    if not resolved.parent.is_dir():
        problem = "is not a folder" if resolved.parent.exists() else "does not exist"
        raise error(f"cannot write {path}: the folder {resolved.parent} {problem}; create it first")
    return resolved


def checked_file(path: str | os.PathLike[str], error: type[QuantizerError] = QuantizerError) -> Path:
    """Return the resolved path of a file after a test write into its folder, before any work."""
    resolved = file_behind(path, error)
    if not os.access(resolved.parent, os.W_OK | os.X_OK):
        raise error(
            f"{path} cannot be written: no permission to write in the folder {resolved.parent}; choose another folder"
        )
    try:
        with temporary_beside(resolved) as folder:
            probe(folder)
    except OSError as refused:
        raise error(f"{path} cannot be written: {refused.strerror}; choose another folder") from refused
    return resolved


def protected_reason(folder: Path) -> str | None:
    """Return why an existing folder must never be replaced, whatever its content; None if it may be."""
    if folder == folder.parent:
        return "is the root of a file system"
    with suppress(FileNotFoundError):
        here = Path.cwd()
        if any(_same(folder, part) for part in (here, *here.parents)):
            return "is or contains the current folder"
    if any(_same(folder, home) for home in _homes()):
        return "is a home folder"
    if os.path.lexists(folder / ".git"):
        return "is a git working tree"
    if folder.is_mount():
        return "is a mount point"
    return None


def require_room(folder: Path, size: int, content: str) -> None:
    """Raise, before the work, if a disk has less than ``size`` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise QuantizerError(
            f"no room in {folder.parent}: {content} takes at least {size / 2**20:.0f} MiB, but {free / 2**20:.0f} MiB "
            "are free; free some space, or choose another folder"
        )


def require_writable(folder: Path, error: type[QuantizerError] = QuantizerError) -> None:
    """Raise if a folder cannot be created, judged by its nearest existing parent; nothing is written."""
    with said_plainly(folder, error):
        above = next(place for place in (folder, *folder.parents) if place.exists())
    if not above.is_dir():
        raise error(f"{folder} cannot be written: {above} is not a folder; choose another folder")
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
    """Return the system error behind an error, also from the messages of Rust libraries; otherwise None."""
    if isinstance(error, OSError):
        return error
    match = _SYSTEM_ERROR.search(str(error))
    return OSError(int(match[1]), os.strerror(int(match[1]))) if match is not None else None


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
    # Also the home in the user database, if the system has one, because HOME may be another folder.
    with suppress(ImportError, KeyError):
        import pwd

        yield Path(pwd.getpwuid(os.getuid()).pw_dir)


@contextmanager
def said_plainly(path: object, error: type[QuantizerError] = QuantizerError) -> Iterator[None]:
    """Turn errors of the operating system into an error about a path that cannot be written."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as refused:
        where = refused.filename or path
        raise error(f"{path} cannot be written: {where} is not a folder; choose another folder") from refused
    except OSError as refused:
        raise error(f"{path} cannot be written: {refused.strerror}; choose another folder") from refused


@contextmanager
def system_errors_as(words: str, error: type[QuantizerError] = QuantizerError, *, within: Path) -> Iterator[None]:
    """Turn errors of the operating system, also those in messages of libraries, into a ``QuantizerError``.

    An error about a path outside of ``within`` names that path, and whether it was read or written.
    """
    try:
        yield
    except QuantizerError:
        raise
    except Exception as other:
        refused = _system_error(other)
        if refused is None:
            raise
        raise error(_message(other, refused, words, within)) from other


def _message(other: Exception, refused: OSError, words: str, within: Path) -> str:
    """Return the message for a system error: ``words`` with the reason, and the path if outside of ``within``."""
    reason = refused.strerror or str(refused)
    if isinstance(refused.filename, str | bytes | os.PathLike):
        place = os.fsdecode(refused.filename)
        if _lies_in(place, within):
            return f"{words}: {reason}"
        # A file that can be read was refused for writing.
        write = refused.errno in _WRITE_ERRORS or (refused.errno in _PERMISSION_ERRORS and os.access(place, os.R_OK))
        return f"{place} cannot be {'written' if write else 'read'}: {reason}; {words}"
    if refused.errno in (*_WRITE_ERRORS, errno.EIO):
        return f"{words}: {reason}"
    return f"{type(other).__name__}: {(str(other).strip() or reason).splitlines()[0]}; {words}"


def _lies_in(place: str, folder: Path) -> bool:
    """Return whether a path is a folder or lies in it, by name or with links resolved."""
    paths = (Path(place).absolute(), Path(os.path.realpath(place)))
    return any(path.is_relative_to(real) for path in paths for real in (folder, Path(os.path.realpath(folder))))
