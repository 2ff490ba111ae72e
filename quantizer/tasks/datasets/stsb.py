"""The data set ``stsb-csv``: sentence pairs with a similarity score, one per line, no header (as in the STS benchmark).

A plane is taking off.,An air plane is taking off.,5.0
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

from quantizer.errors import TaskError
from quantizer.tasks.datasets.rows import Pair, Row, datasets, read_lines, refuse_options, require_file


@datasets.add("stsb-csv")
def read_stsb(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all pairs of a CSV file.

    Raises:
        TaskError: the file does not exist, or a line is not ``sentence,sentence,score``.
    """
    refuse_options("stsb-csv", split=split, subset=subset)
    file = require_file("stsb-csv", path)
    reader = csv.reader(read_lines("stsb-csv", file), strict=True)
    rows: list[Row] = []
    try:
        rows.extend(_pair(fields, f"{file}:{reader.line_num}") for fields in reader if fields)
    except csv.Error as error:
        raise TaskError(f"{file}:{reader.line_num}: not CSV ({error})") from error
    return rows


def _pair(fields: list[str], where: str) -> Pair:
    if len(fields) != 3:
        raise TaskError(f"{where}: {len(fields)} fields, expected 3: sentence,sentence,score (quote commas)")
    first, second, score = (field.strip() for field in fields)
    if not first or not second:
        raise TaskError(f"{where}: an empty sentence, expected sentence,sentence,score")
    try:
        value = float(score)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise TaskError(f"{where}: the score is {score!r}, expected a finite number")
    return Pair(first, second, value)
