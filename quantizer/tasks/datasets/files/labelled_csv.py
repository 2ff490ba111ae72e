"""The data sets ``image-csv`` and ``audio-csv``: labelled files in a CSV file with the header ``path,label``.

    path,label
    cats/one.jpg,cat

A relative path starts at the folder of the CSV file. A label is the model's name for the class, or the class number
from 0. The columns may also be called ``file`` and ``class_index``; other columns are ignored. The rows are in the
order of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quantizer.common.paths import is_file
from quantizer.errors import TaskError
from quantizer.tasks.datasets.columns import read_columns
from quantizer.tasks.datasets.rows import Audio, Image, Row, datasets, refuse_options, require_file


@datasets.add("image-csv")
def read_image_csv(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all images that a CSV file names.

    Raises:
        TaskError: the file, a column or an image does not exist, or a line is malformed.
    """
    refuse_options("image-csv", split=split, subset=subset)
    return [Image(*row) for row in _labelled("image-csv", require_file("image-csv", path), "image")]


@datasets.add("audio-csv")
def read_audio_csv(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all recordings that a CSV file names.

    Raises:
        TaskError: the file, a column or a recording does not exist, or a line is malformed.
    """
    refuse_options("audio-csv", split=split, subset=subset)
    return [Audio(*row) for row in _labelled("audio-csv", require_file("audio-csv", path), "recording")]


def beside(file: Path, name: str, where: str, what: str) -> Path:
    """Return the path that a line of a file names, from the file's own folder on.

    Args:
        file: the file with the line.
        name: the path in it.
        where: the place of the line, for messages.
        what: the kind of file, for messages.

    Raises:
        TaskError: there is no such file.
    """
    path = file.parent / name
    if not is_file(path):
        raise TaskError(f"{where}: there is no {what} {path} (a relative path starts at the file's own folder)")
    return path


def _labelled(dataset: str, file: Path, what: str) -> Iterator[tuple[Path, str]]:
    for where, (name, label) in read_columns(dataset, file, [["path", "file"], ["label", "class_index"]]):
        path = beside(file, name, where, what)
        if not label:
            raise TaskError(f"{where}: the label is empty, expected the name of a class or its number from 0")
        yield path, label
