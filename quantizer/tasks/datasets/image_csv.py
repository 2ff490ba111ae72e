"""The data set ``image-csv``: labelled images in a CSV file with the header ``path,label``.

    path,label
    cats/one.jpg,cat

A relative path starts at the folder of the CSV file. A label is the model's name for the class, or the class number
from 0. The columns may also be called ``file`` and ``class_index``; other columns are ignored. The rows are in the
order of the file.
"""

from __future__ import annotations

from pathlib import Path

from quantizer.common.paths import is_file
from quantizer.errors import TaskError
from quantizer.tasks.datasets.columns import read_columns
from quantizer.tasks.datasets.rows import Image
from quantizer.tasks.datasets.rows import Row
from quantizer.tasks.datasets.rows import datasets
from quantizer.tasks.datasets.rows import refuse_options
from quantizer.tasks.datasets.rows import require_file

__all__ = ["read_image_csv"]


@datasets.add("image-csv")
def read_image_csv(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all images that a CSV file names.

    Raises:
        TaskError: the file, a column or an image does not exist, or a line is malformed.
    """
    refuse_options("image-csv", split=split, subset=subset)
    file = require_file("image-csv", path)
    columns = read_columns("image-csv", file, [["path", "file"], ["label", "class_index"]])
    return [_image(file.parent / name, label, where) for where, (name, label) in columns]


def _image(path: Path, label: str, where: str) -> Image:
    if not is_file(path):
        raise TaskError(f"{where}: there is no image {path} (a relative path starts at the file's own folder)")
    if not label:
        raise TaskError(f"{where}: the label is empty, expected the name of a class or its number from 0")
    return Image(path, label)
