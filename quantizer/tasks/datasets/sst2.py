"""The data set ``sst2-text``: one labelled text per line, the integer label first (SST-2's format).

1 a stirring , funny and finally transporting re-imagining
"""

from __future__ import annotations

from pathlib import Path

from quantizer.errors import TaskError
from quantizer.tasks.datasets.rows import Row, Text, class_number, datasets, read_lines, refuse_options, require_file


@datasets.add("sst2-text")
def read_sst2(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all texts of a file.

    Raises:
        TaskError: the file does not exist, or a line is not ``label text``.
    """
    refuse_options("sst2-text", split=split, subset=subset)
    file = require_file("sst2-text", path)
    rows: list[Row] = []
    for number, line in enumerate(read_lines("sst2-text", file), start=1):
        if not line.strip():
            continue
        label, _, text = line.strip().partition(" ")
        number_of_class = class_number(label)
        if number_of_class is None or not text.strip():
            raise TaskError(f"{file}:{number}: {line.strip()[:60]!r}, expected an integer label, a space and a text")
        rows.append(Text(text.strip(), number_of_class))
    return rows
