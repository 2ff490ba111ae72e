"""``text-csv``: labelled texts in a CSV file with the header ``text,label``: the form for data of your own.

    text,label
    "Fast, friendly and cheap",1

Labels are integers from 0. Further columns are ignored.
"""

from __future__ import annotations

import csv
from pathlib import Path

from quantizer.errors import TaskError
from quantizer.tasks.datasets.rows import Row
from quantizer.tasks.datasets.rows import Text
from quantizer.tasks.datasets.rows import datasets
from quantizer.tasks.datasets.rows import read_lines
from quantizer.tasks.datasets.rows import refuse_options
from quantizer.tasks.datasets.rows import require_file

__all__ = ["read_text_csv"]


@datasets.add("text-csv")
def read_text_csv(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """All texts of a CSV file with the columns ``text`` and ``label``.

    Raises:
        TaskError: no such file, no such columns, or a malformed line.
    """
    refuse_options("text-csv", split=split, subset=subset)
    file = require_file("text-csv", path)
    reader = csv.reader(read_lines("text-csv", file), strict=True)
    rows: list[Row] = []
    try:
        header = next(reader, None)
        if header is None:
            return rows
        columns = [column.strip() for column in header]
        if "text" not in columns or "label" not in columns:
            raise TaskError(f"{file}:1: the columns are {columns}, expected a header line with 'text' and 'label'")
        text_at, label_at = columns.index("text"), columns.index("label")
        for fields in reader:
            if not fields:
                continue
            where = f"{file}:{reader.line_num}"
            if len(fields) != len(columns):
                raise TaskError(f"{where}: {len(fields)} fields, expected {len(columns)} as in the header")
            rows.append(_text(fields[text_at].strip(), fields[label_at].strip(), where))
    except csv.Error as error:
        raise TaskError(f"{file}:{reader.line_num}: not CSV ({error})") from error
    return rows


def _text(text: str, label: str, where: str) -> Text:
    if not text:
        raise TaskError(f"{where}: the text is empty")
    if not (label.isascii() and label.isdecimal()):
        raise TaskError(f"{where}: the label is {label!r}, expected an integer from 0 (number your classes)")
    return Text(text, int(label))
