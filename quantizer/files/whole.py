"""One file that is whole or absent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantizer.errors import QuantizerError
from quantizer.files.place import file_behind
from quantizer.files.place import settle
from quantizer.files.place import sync_folder
from quantizer.files.place import system_errors_as
from quantizer.files.temporary import temporary_beside

__all__ = ["whole_file"]


@contextmanager
def whole_file(path: str | os.PathLike[str], error: type[QuantizerError] = QuantizerError) -> Iterator[Path]:
    """Yield a path to write to; at the end it takes the place of ``path``, after an exception it is gone.

    Where ``path`` is a link, the file behind it is replaced.

    Raises:
        QuantizerError: the path is none of a file, or the system refused to write; ``error`` is the kind.
    """
    place = file_behind(path, error)
    with system_errors_as(f"cannot write {path}", error), temporary_beside(place) as folder:
        part = folder / place.name
        yield part
        settle(folder)
        os.replace(part, place)
        sync_folder(place.parent)
