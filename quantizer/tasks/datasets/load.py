"""The rows that a run names: a part of a data set."""

from __future__ import annotations

from pathlib import Path

from quantizer.errors import TaskError
from quantizer.tasks.datasets.rows import Row, datasets


def load_rows(
    name: str,
    *,
    path: str | Path | None = None,
    split: str | None = None,
    subset: str | None = None,
    rows: int | None = None,
    offset: int = 0,
) -> list[Row]:
    """Return rows ``offset`` to ``offset + rows`` of a data set, in its own order.

    Args:
        name: a registered data set ("image-csv", "image-folder", "stsb-csv", "sst2-text", "text-csv", "vader").
        path: the file or folder, for data sets that read one.
        split: the split, for data sets that have splits.
        subset: the subset, for data sets that have subsets.
        rows: the number of rows; None: all from ``offset`` on.
        offset: the number of rows to skip at the start.

    Raises:
        ConfigError: no data set has this name.
        TaskError: the data cannot be read, a line is malformed, or there are fewer rows than asked for.
    """
    if offset < 0 or (rows is not None and rows < 1):
        raise TaskError(f"data set {name!r}: rows={rows} and offset={offset}, expected rows >= 1 and offset >= 0")
    return part_of_rows(whole_data(name, path, split, subset), name, path, rows, offset)


def whole_data(name: str, path: str | Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all rows of a data set; arguments and errors as those of ``load_rows``."""
    return datasets[name](None if path is None else Path(path), split, subset)


def part_of_rows(found: list[Row], name: str, path: str | Path | None, rows: int | None, offset: int) -> list[Row]:
    """Return a part of the rows of a whole data set; arguments and errors as those of ``load_rows``."""
    where = f"data set {name!r}" + (f" ({path})" if path is not None else "")
    if not found:
        raise TaskError(f"{where} has no rows: check that this is the right file")
    if offset >= len(found):
        raise TaskError(f"{where} has {len(found)} rows, so offset={offset} leaves none: lower it")
    if rows is not None and offset + rows > len(found):
        raise TaskError(
            f"{where} has {len(found)} rows, fewer than offset={offset} and rows={rows} ask for "
            f"({offset + rows}): lower one of them, or leave 'rows' out to take all"
        )
    return found[offset:] if rows is None else found[offset : offset + rows]
