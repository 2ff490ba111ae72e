"""The data set ``conll``: words with tags in columns, an empty line between texts, for data of your own.

    EU      B-ORG
    rejects O

The first column is the word and the last one its tag; others are ignored. Columns are separated by tabs or spaces.
"""

from __future__ import annotations

from pathlib import Path

from quantizer.errors import TaskError
from quantizer.tasks.datasets.rows import Row, Words, datasets, read_lines, refuse_options, require_file

_DOCUMENT = "-DOCSTART-"


@datasets.add("conll")
def read_conll(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all texts of a file.

    Raises:
        TaskError: the file does not exist, or a line has one column alone.
    """
    refuse_options("conll", split=split, subset=subset)
    file = require_file("conll", path)
    rows: list[Row] = []
    words: list[str] = []
    tags: list[str] = []
    for number, line in enumerate([*read_lines("conll", file), ""], start=1):
        # By tabs where there are any: a word may hold another kind of space.
        columns = line.strip("\r\n").split("\t") if "\t" in line else line.split()
        if any(column.strip() for column in columns) and columns[0] != _DOCUMENT:
            if len(columns) < 2 or not columns[-1].strip():
                raise TaskError(f"{file}:{number}: {line.strip()[:60]!r}, expected a word and its tag")
            words.append(columns[0].strip())
            tags.append(columns[-1].strip())
        elif words:
            rows.append(Words(tuple(words), tuple(tags)))
            words, tags = [], []
    return rows
