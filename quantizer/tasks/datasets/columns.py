"""Columns of a CSV file with a header, by their names; the objects of a file of JSON lines."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quantizer.common.plain_values import json_values
from quantizer.errors import TaskError
from quantizer.tasks.datasets.rows import read_lines


def read_columns(name: str, file: Path, wanted: Sequence[Sequence[str]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the place (``FILE:LINE``) and the wanted fields of each line; nothing if the file is empty.

    Args:
        name: the name of the data set, for messages.
        file: a CSV file with a header line; other columns are ignored.
        wanted: for each wanted column, the names that it may have.

    Raises:
        TaskError: the file cannot be read, lacks a column, or has a malformed line.
    """
    reader = csv.reader(read_lines(name, file), strict=True)
    try:
        first = next(reader, None)
        if first is None:
            return
        header = [column.strip() for column in first]
        places = [next((header.index(name) for name in names if name in header), None) for names in wanted]
        if None in places:
            expected = " and ".join(" or ".join(map(repr, names)) for names in wanted)
            raise TaskError(f"{file}:1: the columns are {header}, expected a header line with {expected}")
        for fields in filter(None, reader):
            where = f"{file}:{reader.line_num}"
            if len(fields) != len(header):
                raise TaskError(f"{where}: {len(fields)} fields, expected {len(header)} as in the header")
            yield where, [fields[place].strip() for place in places if place is not None]
    except csv.Error as error:
        raise TaskError(f"{file}:{reader.line_num}: not CSV ({error})") from error


def read_objects(name: str, file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place (``FILE:LINE``) and the object of each line of a file of JSON lines; empty lines are skipped.

    Args:
        name: the name of the data set, for messages.
        file: the file.

    Raises:
        TaskError: the file cannot be read, or a line is no JSON object.
    """
    for number, line in enumerate(read_lines(name, file), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            told = json_values(line)
        except ValueError as error:
            raise TaskError(f"{where}: not JSON ({error})") from error
        if not isinstance(told, dict):
            raise TaskError(f'{where}: {line.strip()[:60]!r}, expected an object like {{"key": "value"}}')
        yield where, told
