"""The data set ``transcripts``: recordings with what is said in them, in a ``.csv`` or ``.jsonl`` file.

    path,text
    one.wav,a good film

A line of a ``.jsonl`` file is an object with the same two keys. A relative path starts at the folder of the file. The
first column may also be called ``file`` or ``audio``, the second ``transcript`` or ``sentence``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quantizer.errors import TaskError
from quantizer.tasks.datasets.columns import read_columns, read_objects
from quantizer.tasks.datasets.files.labelled_csv import beside
from quantizer.tasks.datasets.rows import Row, Speech, datasets, refuse_options, require_file

_COLUMNS = (("path", "file", "audio"), ("text", "transcript", "sentence"))


@datasets.add("transcripts")
def read_transcripts(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all recordings that a file names, with their words.

    Raises:
        TaskError: the file, a column or a recording does not exist, or a line is malformed or has no words.
    """
    refuse_options("transcripts", split=split, subset=subset)
    file = require_file("transcripts", path)
    readers = {".csv": _from_csv, ".jsonl": _from_jsonl}
    if file.suffix.lower() not in readers:
        raise TaskError(f"{file}: expected a file that ends in {' or '.join(readers)}")
    rows: list[Row] = []
    for where, name, text in readers[file.suffix.lower()](file):
        if not text.split():
            raise TaskError(f"{where}: the text is empty, expected the words of {name}")
        rows.append(Speech(beside(file, name, where, "recording"), " ".join(text.split())))
    return rows


def _from_csv(file: Path) -> Iterator[tuple[str, str, str]]:
    for where, (name, text) in read_columns("transcripts", file, _COLUMNS):
        yield where, name, text


def _from_jsonl(file: Path) -> Iterator[tuple[str, str, str]]:
    for where, told in read_objects("transcripts", file):
        name, text = (next((told[key] for key in keys if key in told), None) for keys in _COLUMNS)
        if not (isinstance(name, str) and isinstance(text, str)):
            raise TaskError(f'{where}: expected an object like {{"path": "one.wav", "text": "its words"}}')
        yield where, name, text
