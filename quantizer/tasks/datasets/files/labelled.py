"""Rows of files with a label each, from a CSV or a folder.

The data sets ``image-csv`` and ``audio-csv``: labelled files in a CSV file with the header ``path,label``.

    path,label
    cats/one.jpg,cat

A relative path starts at the folder of the CSV file. A label is the model's name for the class, or the class number
from 0. The columns may also be called ``file`` and ``class_index``; other columns are ignored. The rows are in the
order of the file.

The data sets ``image-folder`` and ``audio-folder``: a folder of files per class, named by the class or its number.

    animals/cat/one.jpg
    animals/dog/two.png

The rows are in a fixed order that mixes the classes; see ``file_paths``.

The data set ``transcripts``: recordings with what is said in them, in a ``.csv`` or ``.jsonl`` file.

    path,text
    one.wav,a good film

A line of a ``.jsonl`` file is an object with the same two keys. A relative path starts at the folder of the file. The
first column may also be called ``file`` or ``audio``, the second ``transcript`` or ``sentence``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from quantizer.common.paths import is_file
from quantizer.errors import TaskError
from quantizer.tasks.datasets.files.paths import AUDIO_FILES, IMAGE_FILES, file_paths
from quantizer.tasks.datasets.rows import (
    Audio,
    Image,
    Row,
    Speech,
    datasets,
    read_columns,
    read_objects,
    refuse_options,
    require_file,
    require_folder,
)


@datasets.add("image-csv")
def read_image_csv(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all images that a CSV file names."""
    refuse_options("image-csv", split=split, subset=subset)
    return [Image(*row) for row in _labelled("image-csv", require_file("image-csv", path), "image")]


@datasets.add("audio-csv")
def read_audio_csv(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all recordings that a CSV file names."""
    refuse_options("audio-csv", split=split, subset=subset)
    return [Audio(*row) for row in _labelled("audio-csv", require_file("audio-csv", path), "recording")]


def beside(file: Path, name: str, where: str, what: str) -> Path:
    """Return the path that a line of a file names, from the file's own folder on."""
    path = file.parent / name
    if not is_file(path):
        raise TaskError(f"{where}: there is no {what} {path} (a relative path starts at the file's own folder)")
    return path


def _labelled(dataset: str, file: Path, what: str) -> Iterator[tuple[Path, str]]:
    for where, (name, label) in read_columns(dataset, file, [["path", "file"], ["label", "class_index"]]):
        path = beside(file, name, where, what)
        if not label:
            raise TaskError(f"{where}: the label is empty, expected the name of a class or its number from 0")
        yield path, label


@datasets.add("image-folder")
def read_image_folder(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all images below a folder, labelled by the name of their class folder."""
    refuse_options("image-folder", split=split, subset=subset)
    return [Image(*row) for row in _labelled_files("image-folder", require_folder("image-folder", path), IMAGE_FILES)]


@datasets.add("audio-folder")
def read_audio_folder(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all recordings below a folder, labelled by the name of their class folder."""
    refuse_options("audio-folder", split=split, subset=subset)
    return [Audio(*row) for row in _labelled_files("audio-folder", require_folder("audio-folder", path), AUDIO_FILES)]


def _labelled_files(name: str, folder: Path, endings: Sequence[str]) -> list[tuple[Path, str]]:
    """Return the files below a folder and the names of their class folders."""
    what = {IMAGE_FILES: "images", AUDIO_FILES: "recordings"}[tuple(endings)]
    rows: list[tuple[Path, str]] = []
    for file in file_paths(folder, endings):
        label, *inside = file.relative_to(folder).parts
        if not inside:
            raise TaskError(
                f"data set {name!r}: {file} lies in no folder of a class; expected {folder}/CLASS/{file.name}. "
                f"{what.capitalize()} without labels can calibrate, but not be scored"
            )
        rows.append((file, label))
    if not rows:
        raise TaskError(
            f"data set {name!r}: {folder} holds no {what}; expected {folder}/CLASS/FILE with files that end in "
            f"{', '.join(endings)}"
        )
    return rows


_COLUMNS = (("path", "file", "audio"), ("text", "transcript", "sentence"))


@datasets.add("transcripts")
def read_transcripts(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all recordings that a file names, with their words."""
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
