"""The data set ``text-pairs``: texts with what is to be written for them, in a ``.csv`` or ``.jsonl`` file.

    source,target
    translate English to German: A good film.,Ein guter Film.

A line of a ``.jsonl`` file is an object with the same two keys. The first column may also be called ``text`` or
``document``, the second ``translation`` or ``summary``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quantizer.errors import TaskError
from quantizer.tasks.datasets.columns import read_columns, read_objects
from quantizer.tasks.datasets.rows import Rewritten, Row, datasets, refuse_options, require_file

_COLUMNS = (("source", "text", "document"), ("target", "translation", "summary"))


@datasets.add("text-pairs")
def read_text_pairs(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all texts of a file, with what is to be written for them.

    Raises:
        TaskError: the file or a column does not exist, or a line is malformed or has an empty text.
    """
    refuse_options("text-pairs", split=split, subset=subset)
    file = require_file("text-pairs", path)
    readers = {".csv": lambda: read_columns("text-pairs", file, _COLUMNS), ".jsonl": lambda: _from_jsonl(file)}
    if file.suffix.lower() not in readers:
        raise TaskError(f"{file}: expected a file that ends in {' or '.join(readers)}")
    rows: list[Row] = []
    for where, (text, target) in readers[file.suffix.lower()]():
        if not text.strip() or not target.strip():
            raise TaskError(f"{where}: a text is empty, expected what is read and what is to be written for it")
        rows.append(Rewritten(text, target))
    return rows


def _from_jsonl(file: Path) -> Iterator[tuple[str, list[str]]]:
    for where, told in read_objects("text-pairs", file):
        found = [next((told[key] for key in keys if key in told), None) for keys in _COLUMNS]
        texts = [text for text in found if isinstance(text, str)]
        if len(texts) < len(_COLUMNS):
            raise TaskError(f'{where}: expected an object like {{"source": "a text", "target": "what is written"}}')
        yield where, texts
