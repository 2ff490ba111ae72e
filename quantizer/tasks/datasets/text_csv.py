"""The data set ``text-csv``: labelled texts in a CSV file with the header ``text,label``, for data of your own.

    text,label
    "Fast, friendly and cheap",1

Labels are integers from 0. Other columns are ignored.
"""

from __future__ import annotations

from pathlib import Path

from quantizer.errors import TaskError
from quantizer.tasks.datasets.columns import read_columns
from quantizer.tasks.datasets.rows import Row, Text, class_number, datasets, refuse_options, require_file


@datasets.add("text-csv")
def read_text_csv(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all texts of a CSV file with the columns ``text`` and ``label``.

    Raises:
        TaskError: the file or a column does not exist, or a line is malformed.
    """
    refuse_options("text-csv", split=split, subset=subset)
    file = require_file("text-csv", path)
    columns = read_columns("text-csv", file, [["text"], ["label"]])
    return [_text(text, label, where) for where, (text, label) in columns]


def _text(text: str, label: str, where: str) -> Text:
    if not text:
        raise TaskError(f"{where}: the text is empty")
    number = class_number(label)
    if number is None:
        raise TaskError(f"{where}: the label is {label[:60]!r}, expected an integer from 0 (number your classes)")
    return Text(text, number)
