"""The rows of a data set, the registry of data sets, and how one is read.

A data set is a function ``(path, split, subset) -> list[Row]`` in a file of its own, registered by name:

@datasets.add("my-data")
    def read_my_data(path: Path | None, split: str | None, subset: str | None) -> list[Row]: ...

It returns all rows; ``load_rows`` takes the part that a run asks for.

Columns of a CSV file with a header, by their names; the objects of a file of JSON lines.

The data set ``choices-jsonl``: questions with answers to choose from, one object of JSON a line.

{"question": "What flies?", "choices": ["a cat", "a plane"], "label": 1}

A text that the question is about may stand beside it as ``context``. A label is the place of the right choice from 0,
or its text; it may also be called ``answer``. Other keys are ignored.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from quantizer.errors import TaskError
from quantizer.utils.paths import expanded, is_file, is_folder, regular_file
from quantizer.utils.plain_values import json_values
from quantizer.utils.registry import Registry


@dataclass(frozen=True)
class Pair:
    """Two texts and their similarity, on any scale (STS: 0 to 5)."""

    first: str
    second: str
    score: float


@dataclass(frozen=True)
class Text:
    """One text and its class, an integer from 0."""

    text: str
    label: int


@dataclass(frozen=True)
class Image:
    """One image file and its class: the model's name for the class, or its number from 0."""

    path: Path
    label: str


@dataclass(frozen=True)
class Audio:
    """One recording and its class: the model's name for the class, or its number from 0."""

    path: Path
    label: str


@dataclass(frozen=True)
class Speech:
    """One recording and the words in it, with one space between them."""

    path: Path
    text: str


@dataclass(frozen=True)
class Plain:
    """One text, whose own words are what is right: for models that fill in or go on."""

    text: str


@dataclass(frozen=True)
class Rewritten:
    """A text, and the text that is to be written for it: its translation, its summary."""

    text: str
    target: str


@dataclass(frozen=True)
class Words:
    """One text in words, with the tag of each, such as ``B-person``."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """A question about a text, and its answers as (text, first character in the context); none: it has no answer."""

    question: str
    context: str
    answers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Choices:
    """A question, the text that it is about or "", answers to choose from, and the place of the right one."""

    question: str
    context: str
    choices: tuple[str, ...]
    label: int


@dataclass(frozen=True)
class Masked:
    """One image file, and the file with the class number of each of its pixels."""

    path: Path
    mask: Path


@dataclass(frozen=True)
class Depths:
    """One image file, and the file with the distance at each of its pixels."""

    path: Path
    depths: Path


@dataclass(frozen=True)
class Boxes:
    """One image file, and its objects: boxes as (x, y, width, height) in pixels, and the class of each.

    A crowd is a box around many objects: what is found in it counts neither as right nor as wrong.
    """

    path: Path
    boxes: tuple[tuple[float, float, float, float], ...]
    labels: tuple[str, ...]
    crowds: tuple[bool, ...]


_MOST_DIGITS = 9
"""The limit on the digits of a class number: no model has so many classes, and more may not fit in 64 bits."""

Row: TypeAlias = (
    Audio
    | Boxes
    | Choices
    | Depths
    | Image
    | Masked
    | Pair
    | Plain
    | Question
    | Rewritten
    | Speech
    | Text
    | Words
    | str
    | Path
)
"""What one sample is made of, and its label; a text or a file alone has none, and cannot be scored."""


def content_of(rows: Sequence[Row]) -> str:
    """Return a hash of the content of rows; for images and recordings also of their files, which may change."""
    whole = hashlib.sha256()
    for row in rows:
        whole.update(repr(row).encode())
        if isinstance(row, Audio | Boxes | Depths | Image | Masked | Speech | Path):
            whole.update(_file_digest(row if isinstance(row, Path) else row.path))
        if isinstance(row, Depths):
            whole.update(_file_digest(row.depths))
        if isinstance(row, Masked):
            whole.update(_file_digest(row.mask))
    return whole.hexdigest()


def _file_digest(path: Path) -> bytes:
    try:
        with regular_file(path).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").digest()
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror or error}") from error


datasets: Registry[Callable[[Path | None, str | None, str | None], list[Row]]] = Registry("data set")


def refuse_options(name: str, *, split: str | None, subset: str | None) -> None:
    """Raise ``TaskError`` if a split or a subset is asked of a data set that has none."""
    for option, value in (("split", split), ("subset", subset)):
        if value is not None:
            raise TaskError(
                f"data set {name!r} has no {option}s, but {option}={value!r} was asked for: remove it, and name "
                f"another file in 'path' instead"
            )


def require_file(name: str, path: Path | None) -> Path:
    """Return the path of a data set's file, with ``~`` expanded."""
    return _required(name, path, "file", "folder")


def require_folder(name: str, path: Path | None) -> Path:
    """Return the path of a data set's folder, with ``~`` expanded."""
    return _required(name, path, "folder", "file")


def _required(name: str, path: Path | None, kind: str, other: str) -> Path:
    if path is None:
        raise TaskError(f"data set {name!r} reads a {kind} of yours, but no path was given: set 'path'")
    path = expanded(path)
    is_kind = {"file": is_file, "folder": is_folder}
    if is_kind[other](path):
        raise TaskError(f"data set {name!r}: {path} is a {other}, expected a {kind}")
    if not is_kind[kind](path):
        raise TaskError(f"data set {name!r}: there is no {kind} {path} (a relative path starts at {Path.cwd()})")
    return path


def class_number(label: str) -> int | None:
    """Return a label as a class number; None if it is not a whole number from 0, or is too large."""
    # isdecimal alone also accepts digits of other scripts, which no label file has on purpose.
    digits = label.lstrip("0") or label[:1]
    return int(digits) if label.isascii() and label.isdecimal() and len(digits) <= _MOST_DIGITS else None


def read_lines(name: str, path: Path) -> list[str]:
    """Return the lines of a UTF-8 file, with their line ends (a CSV field may hold one)."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return file.readlines()
    except UnicodeDecodeError as error:
        raise TaskError(f"data set {name!r}: {path} is not UTF-8 text ({error}): save it as UTF-8") from error
    except OSError as error:
        raise TaskError(f"data set {name!r}: cannot read {path}: {error.strerror or error}") from error


def read_columns(name: str, file: Path, wanted: Sequence[Sequence[str]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the place (``FILE:LINE``) and the wanted fields of each line; nothing if the file is empty."""
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
    """Yield the place (``FILE:LINE``) and the object of each line of a file of JSON lines; empty lines are skipped."""
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


_FORM = '{"question": "What flies?", "choices": ["a cat", "a plane"], "label": 1}'


@datasets.add("choices-jsonl")
def read_choices(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all questions of a file."""
    refuse_options("choices-jsonl", split=split, subset=subset)
    file = require_file("choices-jsonl", path)
    return [_row(told, where) for where, told in read_objects("choices-jsonl", file)]


def _row(told: dict[str, Any], where: str) -> Choices:
    question, context = told.get("question", ""), told.get("context", "")
    choices: Any = told.get("choices")
    label = told.get("label", told.get("answer"))
    texts = isinstance(choices, list) and len(choices) > 1 and all(isinstance(one, str) for one in choices)
    if not texts or not isinstance(question, str) or not isinstance(context, str) or not (question or context):
        raise TaskError(f"{where}: expected a question or a context and two choices or more, as in {_FORM}")
    place = _place(label, choices)
    if place is None:
        raise TaskError(
            f"{where}: the label is {label!r}, expected the place of the right choice, 0 to {len(choices) - 1}, or its "
            "text"
        )
    return Choices(question, context, tuple(choices), place)


def _place(label: object, choices: list[str]) -> int | None:
    """Return the place that a label names; None if it names none."""
    if isinstance(label, str) and choices.count(label) == 1:
        return choices.index(label)
    # True is a number of Python, and no place.
    named = class_number(str(label)) if isinstance(label, int | str) and not isinstance(label, bool) else None
    return named if named is not None and named < len(choices) else None


def load_rows(
    name: str,
    *,
    path: str | Path | None = None,
    split: str | None = None,
    subset: str | None = None,
    samples: int | None = None,
    offset: int = 0,
) -> list[Row]:
    """Return rows ``offset`` to ``offset + samples`` of a data set, in its own order.

    Args:
        name: a registered data set ("image-csv", "image-folder", "stsb-csv", "sst2-text", "text-csv", "vader").
        path: the file or folder, for data sets that read one.
        split: the split, for data sets that have splits.
        subset: the subset, for data sets that have subsets.
        samples: the number of samples; None: all from ``offset`` on.
        offset: the number of samples to skip at the start.

    Raises:
        ConfigError: no data set has this name.
        TaskError: the data cannot be read, a line is malformed, or there are fewer samples than asked for.
    """
    if offset < 0 or (samples is not None and samples < 1):
        raise TaskError(
            f"data set {name!r}: samples={samples} and offset={offset}, expected samples >= 1 and offset >= 0"
        )
    return part_of_rows(whole_data(name, path, split, subset), name, path, samples, offset)


def whole_data(name: str, path: str | Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all rows of a data set; arguments and errors as those of ``load_rows``."""
    return datasets[name](None if path is None else Path(path), split, subset)


def part_of_rows(found: list[Row], name: str, path: str | Path | None, samples: int | None, offset: int) -> list[Row]:
    """Return a part of the rows of a whole data set; arguments and errors as those of ``load_rows``."""
    where = f"data set {name!r}" + (f" ({path})" if path is not None else "")
    if not found:
        raise TaskError(f"{where} has no samples: check that this is the right file")
    if offset >= len(found):
        raise TaskError(f"{where} has {len(found)} samples, so offset={offset} leaves none: lower it")
    if samples is not None and offset + samples > len(found):
        raise TaskError(
            f"{where} has {len(found)} samples, fewer than offset={offset} and samples={samples} ask for "
            f"({offset + samples}): lower one of them, or leave 'samples' out to take all"
        )
    return found[offset:] if samples is None else found[offset : offset + samples]
