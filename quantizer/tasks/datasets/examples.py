"""The examples of data sets, the registry of data sets, and ``load_examples``.

An example is one labelled entry of a data set: a text with its class, an image with its boxes. A data set is a function
``(path, split, subset) -> list[Example]``, registered by name, that returns all examples:

    @datasets.add("my-data")
    def read_my_data(path: Path | None, split: str | None, subset: str | None) -> list[Example]: ...

Helpers for readers check paths and options, and read CSV files with a header and files of JSON lines. The data set
``choices-jsonl`` has questions with answers to choose from, one JSON object per line:

    {"question": "What flies?", "choices": ["a cat", "a plane"], "label": 1}

``context`` may hold a text that the question is about. A label is the place of the right choice, from 0, or its text;
the key may also be ``answer``. Other keys are ignored.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from quantizer.errors import TaskError
from quantizer.utils.paths import expanded, is_file, is_folder, regular_file
from quantizer.utils.plain_values import json_values
from quantizer.utils.registry import Registry, named_in_errors


@dataclass(frozen=True)
class Pair:
    """Two texts and their similarity, on any scale (STS: 0 to 5)."""

    first: str
    second: str
    score: float


@dataclass(frozen=True)
class Text:
    """One text and its class, an integer from 0; another number is for tasks that override ``targets``."""

    text: str
    label: float


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
    """One text without a label, for language models, which predict its own tokens."""

    text: str


@dataclass(frozen=True)
class Rewritten:
    """A text and its target text, such as a translation or a summary."""

    text: str
    target: str


@dataclass(frozen=True)
class Words:
    """One text in words, with the tag of each, such as ``B-person``."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """A question about a text, and its answers as (text, first character in the context); () if unanswerable."""

    question: str
    context: str
    answers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Documents:
    """The texts of a collection, in a fixed order."""

    texts: tuple[str, ...]

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(repr(self.texts).encode()).hexdigest()

    def __repr__(self) -> str:
        """Return a short text that identifies the content, because each query names its collection."""
        return f"Documents({len(self.texts)} texts, SHA-256 {self._digest})"


@dataclass(frozen=True)
class Query:
    """A query of a search, its relevant documents as (index in the collection, gain above 0), and the collection."""

    text: str
    gains: tuple[tuple[int, float], ...]
    documents: Documents


@dataclass(frozen=True)
class Choices:
    """A question, its context or "", the answers to choose from, and the index of the right answer."""

    question: str
    context: str
    choices: tuple[str, ...]
    label: int


@dataclass(frozen=True)
class Masked:
    """One image file, and the file with the class number of each pixel."""

    path: Path
    mask: Path


@dataclass(frozen=True)
class Depths:
    """One image file, and the file with the distance at each pixel."""

    path: Path
    depths: Path


@dataclass(frozen=True)
class Boxes:
    """One image file and its objects: boxes as (x, y, width, height) in pixels, and the class of each.

    A crowd is a box around many objects; detections inside it count neither as right nor as wrong.
    """

    path: Path
    boxes: tuple[tuple[float, float, float, float], ...]
    labels: tuple[str, ...]
    crowds: tuple[bool, ...]


_MOST_DIGITS = 9
"""The most digits of a class number, so that it fits in 64 bits."""

Example: TypeAlias = (
    Audio
    | Boxes
    | Choices
    | Depths
    | Image
    | Masked
    | Pair
    | Plain
    | Query
    | Question
    | Rewritten
    | Speech
    | Text
    | Words
    | str
    | Path
)
"""An entry of a data set. A text or a path alone has no label: it can calibrate, but not be scored."""


def content_of(examples: Sequence[Example]) -> str:
    """Return a SHA-256 of the content of examples, including the content of their files."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr(example).encode())
        if isinstance(example, Audio | Boxes | Depths | Image | Masked | Speech | Path):
            digest.update(_file_digest(example if isinstance(example, Path) else example.path))
        if isinstance(example, Depths):
            digest.update(_file_digest(example.depths))
        if isinstance(example, Masked):
            digest.update(_file_digest(example.mask))
    return digest.hexdigest()


def _file_digest(path: Path) -> bytes:
    try:
        with regular_file(path).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").digest()
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror or error}") from error


datasets: Registry[Callable[[Path | None, str | None, str | None], list[Example]]] = Registry(
    "data set", call=("path", "split", "subset"), returns="a list of examples, such as Text(text, label)"
)


def refuse_options(name: str, *, split: str | None, subset: str | None) -> None:
    """Raise ``TaskError`` if a split or subset is requested from a data set without any."""
    for option, value in (("split", split), ("subset", subset)):
        if value is not None:
            raise TaskError(
                f"data set {name!r} has no {option}s, but {option}={value!r} was given: remove it, and set "
                f"'path' to another file instead"
            )


def require_file(name: str, path: Path | None) -> Path:
    """Return the path of a data set's file, with ``~`` expanded; raise ``TaskError`` if it does not exist."""
    return _required(name, path, "file", "folder")


def require_folder(name: str, path: Path | None) -> Path:
    """Return the path of a data set's folder, with ``~`` expanded; raise ``TaskError`` if it does not exist."""
    return _required(name, path, "folder", "file")


def _required(name: str, path: Path | None, kind: str, other: str) -> Path:
    if path is None:
        raise TaskError(f"data set {name!r} needs a {kind}, but no path was given: set 'path'")
    path = expanded(path)
    is_kind = {"file": is_file, "folder": is_folder}
    if is_kind[other](path):
        raise TaskError(f"data set {name!r}: {path} is a {other}, expected a {kind}")
    if not is_kind[kind](path):
        raise TaskError(f"data set {name!r}: there is no {kind} {path} (a relative path starts at {Path.cwd()})")
    return path


def class_number(label: str) -> int | None:
    """Return a label as a class number; None for anything but an integer from 0 with at most 9 digits."""
    # isdecimal alone also accepts digits of other scripts, which no label file has on purpose.
    digits = label.lstrip("0") or label[:1]
    return int(digits) if label.isascii() and label.isdecimal() and len(digits) <= _MOST_DIGITS else None


def read_lines(name: str, path: Path) -> list[str]:
    """Return the lines of a UTF-8 file with their line ends, which a quoted CSV field may contain."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return file.readlines()
    except UnicodeDecodeError as error:
        raise TaskError(f"data set {name!r}: {path} is not UTF-8 text ({error}): save it as UTF-8") from error
    except OSError as error:
        raise TaskError(f"data set {name!r}: cannot read {path}: {error.strerror or error}") from error


def read_columns(name: str, file: Path, columns: Sequence[Sequence[str]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the position (``FILE:LINE``) and the requested fields of each line of a CSV file with a header."""
    reader = csv.reader(read_lines(name, file), strict=True)
    try:
        first = next(reader, None)
        if first is None:
            return
        header = [column.strip() for column in first]
        indices = [next((header.index(name) for name in names if name in header), None) for names in columns]
        if None in indices:
            expected = " and ".join(" or ".join(map(repr, names)) for names in columns)
            raise TaskError(f"{file}:1: the columns are {header}, expected a header line with {expected}")
        for fields in filter(None, reader):
            where = f"{file}:{reader.line_num}"
            if len(fields) != len(header):
                raise TaskError(f"{where}: {len(fields)} fields, expected {len(header)} as in the header")
            yield where, [fields[index].strip() for index in indices if index is not None]
    except csv.Error as error:
        raise TaskError(f"{file}:{reader.line_num}: not CSV ({error})") from error


def read_objects(name: str, file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the position (``FILE:LINE``) and the object of each non-empty line of a file of JSON lines."""
    for number, line in enumerate(read_lines(name, file), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            values = json_values(line)
        except ValueError as error:
            raise TaskError(f"{where}: not JSON ({error})") from error
        if not isinstance(values, dict):
            raise TaskError(f'{where}: {line.strip()[:60]!r}, expected an object like {{"key": "value"}}')
        yield where, values


_FORM = '{"question": "What flies?", "choices": ["a cat", "a plane"], "label": 1}'


@datasets.add("choices-jsonl")
def read_choices(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return all questions of a file of JSON lines."""
    refuse_options("choices-jsonl", split=split, subset=subset)
    file = require_file("choices-jsonl", path)
    return [_choices(values, where) for where, values in read_objects("choices-jsonl", file)]


def _choices(values: dict[str, Any], where: str) -> Choices:
    question, context = values.get("question", ""), values.get("context", "")
    choices: Any = values.get("choices")
    label = values.get("label", values.get("answer"))
    texts = isinstance(choices, list) and len(choices) > 1 and all(isinstance(choice, str) for choice in choices)
    if not texts or not isinstance(question, str) or not isinstance(context, str) or not (question or context):
        raise TaskError(f"{where}: expected a question or a context and two choices or more, as in {_FORM}")
    index = _place(label, choices)
    if index is None:
        raise TaskError(
            f"{where}: the label is {label!r}, expected the index of the right choice, 0 to {len(choices) - 1}, or its "
            "text"
        )
    return Choices(question, context, tuple(choices), index)


def _place(label: object, choices: list[str]) -> int | None:
    """Return the index of the choice that a label names; None if it names none."""
    if isinstance(label, str) and choices.count(label) == 1:
        return choices.index(label)
    # True is an int in Python, but not an index.
    number = class_number(str(label)) if isinstance(label, int | str) and not isinstance(label, bool) else None
    return number if number is not None and number < len(choices) else None


def load_examples(
    name: str,
    *,
    path: str | Path | None = None,
    split: str | None = None,
    subset: str | None = None,
    samples: int | None = None,
    offset: int = 0,
) -> list[Example]:
    """Return examples ``offset`` to ``offset + samples`` of a data set, in the order of the data set.

    Args:
        name: a registered data set ("image-csv", "image-folder", "stsb-csv", "sst2-text", "text-csv", "vader").
        path: the file or folder, for data sets that read one.
        split: the split, for data sets that have splits.
        subset: the subset, for data sets that have subsets.
        samples: the number of examples; None: all from ``offset`` on.
        offset: the number of examples to skip at the start.

    Raises:
        ConfigError: no data set has this name.
        TaskError: the data cannot be read, a line is malformed, or there are fewer samples than requested.
    """
    if offset < 0 or (samples is not None and samples < 1):
        raise TaskError(
            f"data set {name!r}: samples={samples} and offset={offset}, expected samples >= 1 and offset >= 0"
        )
    return part_of_examples(all_examples(name, path, split, subset), name, path, samples, offset)


def all_examples(name: str, path: str | Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return all examples of a data set; see ``load_examples``."""
    with named_in_errors(f"data set {name!r}"):
        examples = datasets[name](None if path is None else Path(path), split, subset)
    if not isinstance(examples, list):
        raise TaskError(f"data set {name!r} returned an object of {type(examples).__name__}; expected a list")
    return examples


def part_of_examples(
    examples: list[Example], name: str, path: str | Path | None, samples: int | None, offset: int
) -> list[Example]:
    """Return examples ``offset`` to ``offset + samples`` of all examples; see ``load_examples``."""
    where = f"data set {name!r}" + (f" ({path})" if path is not None else "")
    if not examples:
        raise TaskError(f"{where} has no samples: check that this is the right file")
    if offset >= len(examples):
        raise TaskError(f"{where} has {len(examples)} samples, so offset={offset} leaves none: lower it")
    if samples is not None and offset + samples > len(examples):
        raise TaskError(
            f"{where} has {len(examples)} samples, fewer than offset={offset} and samples={samples} ask for "
            f"({offset + samples}): lower one of them, or leave 'samples' out to take all"
        )
    return examples[offset:] if samples is None else examples[offset : offset + samples]
