"""Temporary folders beside their targets, and the marker file of a folder.

The name of a temporary folder contains its owner: ``.NAME.MACHINE-OWNER-START-TOKEN.part``. OWNER is the number of a
thread in the system. A killed process leaves its folder, and the next process that writes NAME removes it, unless the
owner is alive. A thread writes NAME to one folder at a time, so its other folders are left from interruptions. For a
folder of another machine or from before a restart, the owner is unknown; it is removed after a week without changes.

The marker of a folder is a hidden file with the folder's kind and the names of all files in it. It is written last, so
a folder with a marker is complete. Only a folder with a marker may be replaced or removed, and only the files in the
marker: all others belong to the user.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from quantizer.utils.paths import regular_file

NEW = ".part"
OLD = ".old"
_OWNER = r"(?P<machine>[0-9a-f]{8})-(?P<owner>[0-9]{1,9})-(?P<start>[0-9]+)-[0-9a-f]{8}"
_SCRATCH = re.compile(f"quantizer-{_OWNER}")
_TEMPORARY = re.compile(rf"\.(?P<stem>.+)\.{_OWNER}(?P<ending>{re.escape(NEW)}|{re.escape(OLD)})", re.DOTALL)
_UNCHANGED_S = 7 * 24 * 3600
_LONGEST_NAME = 150
_ENDED = ("Z", "X")
_THREADS = sys.platform == "linux"


@contextmanager
def temporary_beside(target: Path) -> Iterator[Path]:
    """Yield a new folder beside ``target``, and remove it at the end."""
    remove_leftovers(target)
    folder = new_name(target)
    try:
        folder.mkdir()
        yield folder
    finally:
        discard(folder)


def new_name(target: Path) -> Path:
    """Return an unused name beside ``target`` that identifies this thread as the owner."""
    owner = f"{_machine()}-{_own_number()}-{_started(_own_number()) or 0}"
    return target.with_name(f".{_stem(target)}.{owner}-{secrets.token_hex(4)}{NEW}")


def scratch_folder() -> Path:
    """Return a new folder in the system's temporary folder, and remove leftovers of killed processes of this user.

    The owner is the process, because a result outlives the thread that made it.
    """
    place = Path(tempfile.gettempdir())
    with suppress(OSError), os.scandir(place) as scan:
        for entry in scan:
            name = _SCRATCH.fullmatch(entry.name)
            if name is not None and entry.is_dir(follow_symlinks=False) and _is_abandoned(Path(entry.path), name):
                shutil.rmtree(entry.path, ignore_errors=True)
    folder = place / f"quantizer-{_machine()}-{os.getpid()}-{_started(os.getpid()) or 0}-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    return folder


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a new folder of ``scratch_folder``, and remove it at the end."""
    folder = scratch_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _is_abandoned(folder: Path, name: re.Match[str]) -> bool:
    """Return whether a folder belongs to this user and its process has ended."""
    if hasattr(os, "getuid") and folder.lstat().st_uid != os.getuid():
        return False
    if name["machine"] != _machine():
        return time.time() - _changed(folder) > _UNCHANGED_S
    started = _started(int(name["owner"]))
    return started is None or started not in (int(name["start"]), 0)


def remove_leftovers(target: Path) -> None:
    """Remove folders of killed processes beside ``target``; an earlier folder only if ``target`` exists."""
    for folder in leftovers(target, NEW):
        discard(folder)
    if os.path.lexists(target):
        for folder in leftovers(target, OLD):
            discard(folder)


def leftovers(target: Path, ending: str) -> list[Path]:
    """Return the temporary folders of ``target`` with this ending whose owners are not alive."""
    return [folder for folder, name in _temporaries(target, ending) if _is_left(folder, name)]


def begun_in(folder: Path) -> frozenset[str]:
    """Return the names in a folder that have temporary folders, for ``is_begun``."""
    return frozenset(name["stem"] for _, name in _all_temporaries(folder))


def is_begun(target: Path, begun: Container[str]) -> bool:
    """Return whether ``target`` had temporary folders when ``begun_in`` read its folder."""
    return _stem(target) in begun


def other_writer(target: Path) -> int | None:
    """Return the number of another process or thread of this machine that writes ``target``; None without one."""
    for folder, name in _temporaries(target, NEW):
        if name["machine"] == _machine() and int(name["owner"]) != _own_number() and not _is_left(folder, name):
            return int(name["owner"])
    return None


def _temporaries(target: Path, ending: str) -> list[tuple[Path, re.Match[str]]]:
    """Return the temporary folders of ``target`` with this ending, and the parts of their names."""
    stem = _stem(target)
    return [
        (folder, name)
        for folder, name in _all_temporaries(target.parent)
        if name["stem"] == stem and name["ending"] == ending
    ]


def _all_temporaries(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    """Yield the temporary folders of all targets in a folder, and the parts of their names."""
    with suppress(OSError), os.scandir(folder) as scan:
        for entry in scan:
            match = _TEMPORARY.fullmatch(entry.name) if entry.name.endswith((NEW, OLD)) else None
            if match is not None and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path), match


def _is_left(folder: Path, name: re.Match[str]) -> bool:
    if name["machine"] != _machine():
        return time.time() - _changed(folder) > _UNCHANGED_S
    if int(name["owner"]) == _own_number():
        return _THREADS
    started = _started(int(name["owner"]))
    return started is None or started not in (int(name["start"]), 0)


def _own_number() -> int:
    """Return the number of this thread, or of the process if the system has no table of threads."""
    return threading.get_native_id() if _THREADS else os.getpid()


def _started(owner: int) -> int | None:
    """Return the start of a thread of this machine in kernel ticks; 0 if unknown, None after its end."""
    try:
        os.kill(owner, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass  # another user's
    try:
        # Split after the program's name, which is in brackets and may have any character.
        fields = Path(f"/proc/{owner}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] in _ENDED else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0


@functools.cache
def _machine() -> str:
    """Return a hash of this machine, its boot and its container, within which a number identifies one process."""
    parts = [platform.node()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def _stem(target: Path) -> str:
    """Return the name of ``target``, or its hash if the name is too long to be extended."""
    name = os.fsencode(target.name)
    return target.name if len(name) <= _LONGEST_NAME else hashlib.sha256(name).hexdigest()


def _changed(folder: Path) -> float:
    latest = folder.lstat().st_mtime
    for root, folders, names in os.walk(folder):
        for name in (*folders, *names):
            with suppress(OSError):
                latest = max(latest, os.lstat(os.path.join(root, name)).st_mtime)
    return latest


logger = logging.getLogger(__name__)

MARKER = ".quantizer.json"
_FORMAT = 1

# A saved quantizer of a version without markers has only these files, and the first one begins with these bytes.
_FORMER_KIND = "saved quantizer"
_FORMER = ("quantizer.yaml", "ranges.safetensors", "observed.safetensors")
_FORMER_BEGIN = b"format: 1\n"


@dataclass(frozen=True)
class Marker:
    """The content of a folder's marker.

    Attributes:
        kind: the kind of folder, such as "run".
        holds: the names of its files, relative to the folder; names of folders end with a slash.
    """

    kind: str
    holds: frozenset[str]


def write_marker(folder: Path, kind: str) -> None:
    """Write the marker of a folder, with the names of its current content."""
    holds = sorted(name for name, _ in _entries(folder) if name != MARKER)
    document = {"format": _FORMAT, "kind": kind, "holds": holds}
    part = folder / f"{MARKER}.part"
    part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(part, folder / MARKER)


def read_marker(folder: Path) -> Marker | None:
    """Return the marker of a folder; None if missing or unreadable."""
    try:
        document = json.loads(regular_file(folder / MARKER).read_text(encoding="utf-8"))
        kind, holds, known = document["kind"], document["holds"], document["format"] == _FORMAT
    except FileNotFoundError:
        return _former(folder)
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    if not (known and isinstance(kind, str) and isinstance(holds, list) and all(isinstance(n, str) for n in holds)):
        return None
    return Marker(kind, frozenset(holds))


def foreign(folder: Path, marker: Marker) -> list[str]:
    """Return the first three names in a folder that its marker does not list."""
    others = (name for name, _ in _entries(folder) if name not in marker.holds and name != MARKER)
    return list(islice(others, 3))


def discard(folder: Path) -> None:
    """Remove a folder: with a marker only the files in it, without one all files.

    Files that cannot be removed stay. Files that are not in the marker stay, with a warning in the log.
    """
    marker = read_marker(folder) if (folder / MARKER).exists() else None
    if marker is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    with suppress(OSError):
        for name, path in _entries(folder):
            if name in marker.holds:
                with suppress(OSError):
                    path.rmdir() if name.endswith("/") else path.unlink()
        # The marker is removed last, so that an interrupted removal can continue.
        if os.listdir(folder) == [MARKER]:
            (folder / MARKER).unlink()
            folder.rmdir()
        elif others := foreign(folder, marker):
            logger.warning("%s is not removed: quantizer did not write %s in it", folder, ", ".join(others))


def _entries(folder: Path, inside: str = "") -> Iterator[tuple[str, Path]]:
    """Yield name and path of everything below a folder; folders follow their content, links are not followed."""
    with os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    for entry in entries:
        name, path = f"{inside}{entry.name}", Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(path, f"{name}/")
            yield f"{name}/", path
        else:
            yield name, path


def _former(folder: Path) -> Marker | None:
    try:
        with regular_file(folder / _FORMER[0]).open("rb") as stream:
            begin = stream.read(len(_FORMER_BEGIN))
    except OSError:
        return None
    return Marker(_FORMER_KIND, frozenset(_FORMER)) if begin == _FORMER_BEGIN else None
