"""The real place behind a path, checked for writing before any work, and again after it."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import suppress
from pathlib import Path

from quantizer.errors import QuantizerError
from quantizer.files.temporary import temporary_beside

__all__ = [
    "checked_file",
    "file_behind",
    "probe",
    "protected_reason",
    "real_place",
    "require_room",
    "said_plainly",
    "settle",
    "sync_folder",
    "system_errors_as",
]

_PROBE = 4096
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


def real_place(path: str | os.PathLike[str], error: type[QuantizerError] = QuantizerError) -> Path:
    """Return the absolute place that a path means, with every link followed.

    Raises:
        QuantizerError: it is empty or no name of a file, or a link on the way leads nowhere; ``error`` is the kind.
    """
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
        # Of folders that are not there yet the system does not say it.
        there = next(part for part in (found, *found.parents) if part.is_dir())
        if any(len(os.fsencode(name)) > os.pathconf(there, "PC_NAME_MAX") for name in found.parts):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    except OSError as refused:
        raise error(f"{text} cannot be written: {refused.strerror}; choose another path") from refused
    except ValueError as refused:
        raise error(f"{text!r} is no name of a file or folder: {refused}") from refused
    return found


def file_behind(path: str | os.PathLike[str], error: type[QuantizerError] = QuantizerError) -> Path:
    """Return the place of a file that may be written or replaced.

    Raises:
        QuantizerError: it is no name of a file, its folder is missing, or what stands there is no file.
    """
    found = real_place(path, error)
    try:
        mode = found.stat().st_mode
    except OSError:
        # One that is not there yet; whether it can be there is for the folder to say.
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
    """Return the place of a file, when one can be written there: tried, so that no work is lost to it.

    Raises:
        QuantizerError: it cannot; ``error`` is the kind.
    """
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
    """Return why an existing folder is never replaced, whatever lies in it; None where it may be."""
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
    """Say before the work that a disk has no room for what will come of it.

    Raises:
        QuantizerError: fewer than ``size`` bytes are free there.
    """
    free = shutil.disk_usage(folder).free
    if free < size:
        raise QuantizerError(
            f"no room in {folder.parent}: {what} takes {size / 2**20:.0f} MiB at least, and {free / 2**20:.0f} MiB are "
            "free; make room, or choose another folder"
        )


def probe(folder: Path) -> None:
    """Write a little into a folder and remove it.

    Raises:
        OSError: the system refuses, as where the disk is full.
    """
    file = folder / "probe"
    file.write_bytes(bytes(_PROBE))
    file.unlink()


def settle(folder: Path) -> None:
    """Give all that was written below a folder the mode that the umask asks for, and see it onto the disk.

    Libraries that write a file under another name first leave it readable to its owner alone.
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
    """See the names in a folder onto the disk, where its file system has that for folders."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EBADF):
            raise


def _system_error(error: Exception) -> OSError | None:
    """Return the system's error behind one of a library in Rust, which has it in its words; None: there is none."""
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
    # Whatever HOME says, where the system has such a table.
    with suppress(ImportError, KeyError):
        import pwd

        yield Path(pwd.getpwuid(os.getuid()).pw_dir)


@contextmanager
def said_plainly(path: object) -> Iterator[None]:
    """Turn errors of the operating system into ours, in the words of a folder that cannot be written."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        where = error.filename or path
        raise QuantizerError(f"{path} cannot be written: {where} is no folder; choose another folder") from error
    except OSError as error:
        raise QuantizerError(f"{path} cannot be written: {error.strerror}; choose another folder") from error


@contextmanager
def system_errors_as(words: str, error: type[QuantizerError] = QuantizerError) -> Iterator[None]:
    """Turn errors of the operating system, those that libraries pass on included, into ours.

    Raises:
        QuantizerError: the system refused something, with ``words`` before its reason; ``error`` is the kind.
    """
    try:
        yield
    except QuantizerError:
        raise
    except Exception as other:
        refused = _system_error(other)
        if refused is None:
            raise
        raise error(f"{words}: {refused.strerror or refused}") from other
