"""Atomic writing of a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantizer.errors import QuantizerError
from quantizer.files.place import file_behind, settle, sync_folder, system_errors_as
from quantizer.files.temporary import temporary_beside


@contextmanager
def whole_file(path: str | os.PathLike[str], error: type[QuantizerError] = QuantizerError) -> Iterator[Path]:
    """Yield a path to write to; at the end its file replaces ``path``, after an exception it is removed.

    If ``path`` is a link, the file that it refers to is replaced.

    Raises:
        QuantizerError: the path cannot be that of a file, or writing failed; ``error`` is the class raised.
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
