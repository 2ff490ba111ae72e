"""``image-csv``: labelled images in a CSV file with the header ``path,label``.

    path,label
    cats/one.jpg,cat

A path starts at the folder that the file lies in. A label is the name that the model has for the class, or its number
from 0. The columns may be called ``file`` and ``class_index`` as well; further ones are ignored. The rows are in the
file's order.
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
        TaskError: no such file, no such columns, a malformed line, or an image that is not there.
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
