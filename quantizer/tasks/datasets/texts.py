"""Plain files of texts without labels, which are enough for calibration; as rows, the data set ``text-lines``.

``.txt`` has one text per line, ``.csv`` a header and a column of texts, ``.jsonl`` one object with a text per line.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from quantizer.errors import TaskError
from quantizer.tasks.datasets.columns import read_objects
from quantizer.tasks.datasets.rows import Plain, Row, datasets, read_lines, refuse_options, require_file

_KIND = "texts"


def read_texts(path: Path, column: str = "text") -> list[str]:
    """Return all texts of a file that are not empty.

    Args:
        path: a file whose ending names its format, see ``text_files``.
        column: the column of a ``.csv`` file, or the key of a ``.jsonl`` file.

    Raises:
        TaskError: the file does not exist, is malformed, lacks the column, or has no text.
    """
    file = require_file(_KIND, path)
    if file.suffix.lower() not in text_files:
        raise TaskError(f"{file}: expected a file that ends in {', '.join(text_files)}")
    texts = [text.strip() for text in text_files[file.suffix.lower()](file, column) if text.strip()]
    if not texts:
        raise TaskError(f"{file} holds no texts: check that this is the right file")
    return texts


@datasets.add("text-lines")
def read_text_lines(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return the texts of a file as rows, for models that fill in words or go on; see ``read_texts``.

    Raises:
        TaskError: the file does not exist, is malformed, or has no text.
    """
    refuse_options("text-lines", split=split, subset=subset)
    return [Plain(text) for text in read_texts(require_file("text-lines", path))]


def _from_csv(file: Path, column: str) -> Iterator[str]:
    reader = csv.reader(read_lines(_KIND, file), strict=True)
    try:
        columns = [name.strip() for name in next(reader, [])]
        if columns and column not in columns:
            raise TaskError(f"{file}:1: the columns are {columns}, and {column!r} is none of them: name one")
        for fields in filter(None, reader):
            if len(fields) != len(columns):
                raise TaskError(f"{file}:{reader.line_num}: {len(fields)} fields, expected {len(columns)} as above")
            yield fields[columns.index(column)]
    except csv.Error as error:
        raise TaskError(f"{file}:{reader.line_num}: not CSV ({error})") from error


def _from_jsonl(file: Path, column: str) -> Iterator[str]:
    for where, row in read_objects(_KIND, file):
        text = row.get(column)
        if not isinstance(text, str):
            raise TaskError(f'{where}: {str(row)[:60]!r}, expected an object like {{"{column}": "a text"}}')
        yield text


text_files = {".txt": lambda file, _: iter(read_lines(_KIND, file)), ".csv": _from_csv, ".jsonl": _from_jsonl}
"""The reader of each format, by the ending of the file."""
