"""A cache of results in a folder, each made once for its key: calibrations, scores, times, engines, ONNX files.

An entry is a folder whose name is the SHA-256 of its key. It appears atomically, by a rename, and contains a JSON value
and optional files with their SHA-256. A damaged entry is removed and made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any, TypeVar

from quantizer.errors import QuantizerError
from quantizer.utils.files.temporary import temporary_beside
from quantizer.utils.files.writable import real_place, require_writable, settle, sync_folder
from quantizer.utils.paths import regular_file

T = TypeVar("T")

logger = logging.getLogger(__name__)

_RECORD, _FILE = "entry.json", "file"
_ENTRY_NAME = re.compile(r"\.?[0-9a-f]{64}(\..+)?")
"""Names of entries, of nested stores, and of partial entries of killed processes."""


class Store:
    """A cache of results in ``folder``. A part of a key is a text, or the path of a file, which stands for its content.

    The folder is created with the first entry. A folder with other content is refused. Without a folder, nothing is
    stored.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, error: type[QuantizerError] = QuantizerError) -> None:
        self.folder = None if folder is None else real_place(folder, error)
        if self.folder is None:
            return
        require_writable(self.folder, error)
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        foreign_names = [name for name in names if not _ENTRY_NAME.fullmatch(name)]
        if foreign_names:
            raise error(
                f"{folder} contains {min(foreign_names)!r}, which quantizer did not write, so results cannot be stored "
                "there: move that elsewhere, or choose another folder"
            )

    def under(self, *key: object) -> Store:
        """Return the nested store for all results that depend on ``key``."""
        return self if self.folder is None else Store(self.folder / _name(key))

    @property
    def count(self) -> int:
        """The number of entries."""
        return 0 if self.folder is None else sum(1 for _ in self.folder.glob(f"[0-9a-f]*/{_RECORD}"))

    def find(self, key: Iterable[object]) -> Any:
        """Return the value of a key; None without an entry."""
        record = None if self.folder is None else _read(self.folder / _name(key))
        return None if record is None else record["value"]

    def get(self, key: Iterable[object], make: Callable[[], T], path: Path | None = None) -> T:
        """Return the value of a key; ``make`` computes it at the first call only.

        With ``path``, ``make`` writes this file, and later calls copy it there.
        """
        if self.folder is None:
            return make()
        place = self.folder / _name(key)
        if (record := _read(place)) is None or (path is not None and not _copied(place, record, path)):
            value = make()
            self._put(place, value, None if path is None else partial(copy_file, path))
            return value
        stored: T = record["value"]
        return stored

    def find_bytes(self, key: Iterable[object]) -> bytes | None:
        """Return the bytes that ``put_bytes`` stored for a key; None without an entry."""
        if self.folder is None or _read(place := self.folder / _name(key)) is None:
            return None
        # Another process may clear the folder.
        with suppress(OSError):
            return (place / _FILE).read_bytes()
        return None

    def put_bytes(self, key: Iterable[object], content: bytes) -> None:
        """Store bytes for a key; without room on the disk, only warn."""
        if self.folder is not None:
            self._put(self.folder / _name(key), None, lambda file: file.write_bytes(content))

    def _put(self, place: Path, value: object, fill: Callable[[Path], object] | None) -> None:
        try:
            _write(place, value, fill)
        except OSError as error:
            # A command does not fail on a full disk. If the entry exists, another process was faster.
            if not place.exists():
                logger.warning("a result is not stored in %s: %s", self.folder, error.strerror or error)

    def drop(self, key: Iterable[object]) -> None:
        """Remove an entry."""
        if self.folder is not None:
            shutil.rmtree(self.folder / _name(key), ignore_errors=True)

    def clear(self) -> None:
        """Remove all entries, and the folder if empty afterwards."""
        if self.folder is None:
            return
        with suppress(OSError):
            for path in self.folder.iterdir():
                if _ENTRY_NAME.fullmatch(path.name):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            self.folder.rmdir()


NO_STORE = Store(None)
"""A store that stores nothing."""


def copy_file(path: Path, target: Path) -> None:
    """Copy a file; an ONNX file together with the file of its weights over 2 GB."""
    shutil.copyfile(path, target)
    for data in data_beside(path):
        shutil.copyfile(data, target.parent / data.name)


def data_beside(path: Path) -> list[Path]:
    """Return the files that contain the weights of an ONNX file."""
    return sorted(path.parent.glob(f"{escape(path.name)}.*.data"))


def _name(key: Iterable[object]) -> str:
    parts = [_content(part) if isinstance(part, Path) else str(part) for part in key]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _content(path: Path) -> list[str]:
    return [_sum(path), *(f"{data.name} {_sum(data)}" for data in data_beside(path))]


def _sum(path: Path) -> str:
    with regular_file(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sealed(record: Any) -> str:
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def _read(place: Path) -> dict[str, Any] | None:
    """Return the record of an entry; None if missing or damaged. A damaged entry is removed."""
    if not os.path.lexists(place):
        return None
    try:
        document = json.loads(regular_file(place / _RECORD).read_bytes())
        files = {path.name: _sum(path) for path in place.iterdir() if path.name != _RECORD}
        record: dict[str, Any] = document["record"]
        if document["sha256"] == _sealed(record) and record["files"] == files:
            return record
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        pass
    # Otherwise another process has cleared the folder.
    if os.path.lexists(place):
        logger.warning("a stored result is damaged, so it is made again: %s", place)
        shutil.rmtree(place, ignore_errors=True)
    return None


def _copied(place: Path, record: Mapping[str, Any], path: Path) -> bool:
    """Copy the files of an entry to ``path``; return False if another process cleared the folder meanwhile."""
    try:
        for name in record["files"]:
            shutil.copyfile(place / name, path if name == _FILE else path.parent / name)
    except FileNotFoundError:
        if place.exists():
            raise
        return False
    return True


def _write(place: Path, value: object, fill: Callable[[Path], object] | None) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with temporary_beside(place) as part:
        if fill is not None:
            fill(part / _FILE)
        record = {"value": value, "files": {file.name: _sum(file) for file in part.iterdir()}}
        document = {"record": record, "sha256": _sealed(record)}
        (part / _RECORD).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        settle(part)
        part.rename(place)
    sync_folder(place.parent)
