"""The data of a conversion: a data set by name, a plain file of texts, or a folder of images or recordings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantizer.common.paths import is_file, is_folder
from quantizer.errors import ConfigError, TaskError
from quantizer.tasks import (
    Row,
    Sample,
    Task,
    datasets,
    folder_holds,
    load_rows,
    read_images,
    read_recordings,
    read_texts,
    text_files,
)

CALIBRATION_ROWS = 128
"""The default number of calibration rows, if there are so many."""


@dataclass(frozen=True)
class DataSource:
    """The source of data that ``NAME:PATH``, ``FILE`` or ``FOLDER`` names.

    Attributes:
        path: the file or folder.
        name: the registered data set, whose rows have labels or scores; None: plain texts, images or recordings.
    """

    path: Path
    name: str | None = None

    def __str__(self) -> str:
        return f"{self.name}:{self.path}" if self.name is not None else str(self.path)

    @property
    def holds(self) -> str | None:
        """The kind of plain data: "text", "image" or "audio"; None: rows of a data set, which have a kind each."""
        if self.name is not None:
            return None
        return folder_holds(self.path) if is_folder(self.path) else "text"


@dataclass(frozen=True)
class Samples:
    """Calibration data, and the data after it, to which nothing was fitted; rows of a data set, texts or files."""

    calibration: Sequence[Row | Sample]
    held_out: Sequence[Row | Sample]

    @property
    def rows(self) -> list[Row | Sample]:
        """The calibration and the held-out data."""
        return [*self.calibration, *self.held_out]

    def of(self, task: Task) -> tuple[list[Sample], list[Sample]]:
        """Return the calibration and the held-out data as samples of the task."""
        return task.all_samples(self.calibration), task.all_samples(self.held_out)


def data_source(text: str, option: str) -> DataSource:
    """Return the source that ``NAME:PATH``, the ``FILE`` of texts or the ``FOLDER`` of images or recordings names."""
    name, colon, path = text.partition(":")
    if name in datasets.names():
        if not path:
            raise ConfigError([f"{option} {text}: the path is missing; expected {name}:PATH"])
        return DataSource(Path(path), name)
    plain = Path(text)
    if is_folder(plain) or (plain.suffix.lower() in text_files and (not colon or is_file(plain))):
        return DataSource(plain)
    raise ConfigError(
        [
            f"{option} {text}: expected a file of texts ({', '.join(text_files)}), a folder of images that exists or "
            f"one of recordings (.wav), or NAME:PATH with one of the data sets {', '.join(datasets.names())}"
        ]
    )


def read_calibration(source: DataSource, rows: int | None, column: str) -> Samples:
    """Return the data of a source, of which the first ``rows`` rows are for calibration."""
    found: Sequence[Row | Sample]
    if source.name is not None:
        found = load_rows(source.name, path=source.path)
    else:
        folders = {"image": read_images, "audio": read_recordings}
        found = folders[source.holds](source.path) if source.holds in folders else read_texts(source.path, column)
    if rows is not None and rows > len(found):
        raise TaskError(f"{source} has {len(found)} rows, fewer than --rows {rows}: lower it, or give more data")
    count = rows or min(CALIBRATION_ROWS, len(found))
    return Samples(found[:count], found[count:])


def read_labelled(source: DataSource | None, option: str) -> list[Row]:
    """Return all rows of a data set with labels; none if there is no source."""
    if source is None:
        return []
    if source.name is None:
        holds = source.holds or "text"
        named = f"text-csv:{source.path.with_suffix('.csv').name}" if holds == "text" else f"{holds}-csv:labels.csv"
        raise TaskError(
            f"{option} {source}: {holds}s alone cannot be scored; expected NAME:PATH with labelled rows, such "
            f"as {named} (data sets: {', '.join(datasets.names())})"
        )
    return load_rows(source.name, path=source.path)
