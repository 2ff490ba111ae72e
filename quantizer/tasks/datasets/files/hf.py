"""The data set ``hf``: whatever the package ``datasets`` of Hugging Face reads.

    {name: hf, path: my-data, split: test}      a folder of save_to_disk, or of files that load_dataset takes
    {name: hf, path: rows.parquet}              a file: .parquet, .arrow, .jsonl, .json, .csv, .tsv or .txt
    {name: hf, path: org/name, subset: en}      a data set of the hub, where there is a network

A path may end in ``@SPLIT``, which is the split. No code of a data set is run: the package has run none since its
version 4. What a row is follows from the columns; see ``hf_rows``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from quantizer.common.paths import expanded, is_file, is_folder, is_there
from quantizer.errors import MissingDependencyError, TaskError
from quantizer.tasks.datasets.files.hf_rows import rows_of_table
from quantizer.tasks.datasets.rows import Row, datasets

_BUILDERS = {
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tsv": "csv",
    ".txt": "text",
}
_SAVED = ("dataset_dict.json", "state.json")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@datasets.add("hf")
def read_hf(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return the rows of a split.

    Raises:
        MissingDependencyError: the package ``datasets`` is not installed.
        TaskError: there is no such data, it has several splits and none is named, or its columns make no rows.
    """
    if path is None:
        raise TaskError(
            "data set 'hf' reads a file, a folder or a name of the hub, but no path was given: set 'path', such as "
            "rows.parquet or stanfordnlp/sst2"
        )
    name = str(expanded(path))
    if split is None and not is_there(Path(name)):
        name, _, told = name.partition("@")
        split = told or None
    return rows_of_table(_table(_opened(Path(name), subset), name, split), name)


def _opened(path: Path, subset: str | None) -> Any:
    """Return the ``datasets.Dataset`` or ``DatasetDict`` at a path."""
    try:
        import datasets as library
    except ModuleNotFoundError as error:
        raise MissingDependencyError("datasets", "datasets") from error
    there = is_folder(path) or is_file(path)
    if not there and not _HUB_NAME.fullmatch(str(path)):
        raise TaskError(
            f"data set 'hf': there is no file or folder {path} (a relative path starts at {Path.cwd()}), and that is "
            "no name of the hub, such as stanfordnlp/sst2"
        )
    try:
        if any((path / name).is_file() for name in _SAVED):
            return library.load_from_disk(str(path))
        if not is_file(path):
            return library.load_dataset(str(path), subset)
        builder = _BUILDERS.get(path.suffix.lower())
        if builder is None:
            raise TaskError(
                f"data set 'hf': {path} ends in {path.suffix!r}; expected a folder, or a file that ends in "
                f"{', '.join(sorted(_BUILDERS))}"
            )
        options = {"sep": "\t"} if path.suffix.lower() == ".tsv" else {}
        return library.load_dataset(builder, data_files=str(path), **options)
    except (library.exceptions.DatasetsError, IndexError, OSError, ValueError, RuntimeError) as error:
        # The error itself often says no more than that the rows could not be made. A table without rows is an
        # IndexError.
        lines = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        where = "" if there else ", and there is no file or folder of this name"
        raise TaskError(f"data set 'hf': {path} cannot be read{where}: {lines[0]}") from error


def _table(opened: Any, name: str, split: str | None) -> Any:
    """Return one split of what was opened."""
    if not isinstance(opened, dict):
        if split is not None:
            raise TaskError(f"data set 'hf': {name} is one split by itself, but {split!r} was asked for: leave it out")
        return opened
    splits = ", ".join(map(str, opened))
    if split is None and len(opened) > 1:
        raise TaskError(f"data set 'hf': {name} has the splits {splits}: set 'split', or write {name}@SPLIT")
    if split is not None and split not in opened:
        raise TaskError(f"data set 'hf': {name} has no split {split!r}; it has {splits}")
    return next(iter(opened.values())) if split is None else opened[split]
