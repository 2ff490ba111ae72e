"""The data that a conversion is given: a data set by name, or a plain file of texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantizer.errors import ConfigError
from quantizer.errors import TaskError
from quantizer.tasks import Row
from quantizer.tasks import Task
from quantizer.tasks import datasets
from quantizer.tasks import load_rows
from quantizer.tasks import read_texts
from quantizer.tasks import text_files

__all__ = ["CALIBRATION_ROWS", "DataSource", "Texts", "data_source", "read_calibration", "read_labelled"]

CALIBRATION_ROWS = 128
"""How many rows calibrate where none are asked for and there are that many."""


@dataclass(frozen=True)
class DataSource:
    """What ``NAME:FILE`` or ``FILE`` names.

    Attributes:
        name: the registered data set, whose rows have labels or scores; None: a plain file of texts.
    """

    path: Path
    name: str | None = None

    def __str__(self) -> str:
        return f"{self.name}:{self.path}" if self.name is not None else str(self.path)


@dataclass(frozen=True)
class Texts:
    """Rows to calibrate on, and those after them, which nothing was fitted to; both still in their own form."""

    calibration: list[Row] | list[str]
    held_out: list[Row] | list[str]

    def of(self, task: Task) -> tuple[list[str], list[str]]:
        """Both as the texts that the task makes of them."""
        return _texts(self.calibration, task), _texts(self.held_out, task)


def data_source(text: str, option: str) -> DataSource:
    """Read ``NAME:FILE`` or ``FILE``.

    Args:
        text: as typed.
        option: where it was typed, for the message.

    Raises:
        ConfigError: it is neither.
    """
    name, colon, path = text.partition(":")
    if name in datasets.names():
        if not path:
            raise ConfigError([f"{option} {text}: the file is missing; expected {name}:FILE"])
        return DataSource(Path(path), name)
    if Path(text).suffix.lower() in text_files and (not colon or Path(text).exists()):
        return DataSource(Path(text))
    raise ConfigError(
        [
            f"{option} {text}: expected a file of texts ({', '.join(text_files)}), or NAME:FILE with one of the data "
            f"sets {', '.join(datasets.names())}"
        ]
    )


def read_calibration(source: DataSource, rows: int | None, column: str) -> Texts:
    """Cut a source in two: the first ``rows`` calibrate.

    Args:
        source: where from.
        rows: how many; None: ``CALIBRATION_ROWS``, or all where there are fewer.
        column: of a plain ``.csv`` or ``.jsonl`` file.

    Raises:
        TaskError: the file cannot be read, has no rows, or fewer than asked for.
    """
    found: list[Row] | list[str]
    found = read_texts(source.path, column) if source.name is None else load_rows(source.name, path=source.path)
    if rows is not None and rows > len(found):
        raise TaskError(f"{source} has {len(found)} rows, fewer than --rows {rows}: lower it, or give more data")
    count = rows or min(CALIBRATION_ROWS, len(found))
    return Texts(found[:count], found[count:])


def read_labelled(source: DataSource | None, option: str) -> list[Row]:
    """All rows of a data set with labels; none, where there is no source.

    Raises:
        TaskError: a plain file, or one that cannot be read.
    """
    if source is None:
        return []
    if source.name is None:
        raise TaskError(
            f"{option} {source}: texts alone cannot be scored; expected NAME:FILE with labelled rows, such as "
            f"text-csv:{source.path.with_suffix('.csv').name} (data sets: {', '.join(datasets.names())})"
        )
    return load_rows(source.name, path=source.path)


def _texts(rows: list[Row] | list[str], task: Task) -> list[str]:
    texts = [row for row in rows if isinstance(row, str)]
    return texts + task.texts([row for row in rows if not isinstance(row, str)])
