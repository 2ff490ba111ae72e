"""Data sets of texts in files of your own.

``text-csv``: labelled texts in a CSV file with the header ``text,label``. Labels are integers from 0; other columns are
ignored.

    text,label
    "Fast, friendly and cheap",1

``texts`` and ``text-lines``: texts without labels. ``.txt`` has one text per line, ``.csv`` a header and a column of
texts, ``.jsonl`` one object with a text per line. ``texts`` is enough for calibration; ``text-lines`` is for language
models.

``conll``: words with tags in columns separated by tabs or spaces, and an empty line between texts. The first column is
the word, the last one its tag; others are ignored.

    EU      B-ORG
    rejects O

``squad-json``: questions about texts in the format of SQuAD 1.1 or 2.0.

``text-pairs``: source and target texts in a ``.csv`` file, or a ``.jsonl`` file of objects with the same keys. The
first column may also be called ``text`` or ``document``, the second ``translation`` or ``summary``.

    source,target
    translate English to German: A good film.,Ein guter Film.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantizer.errors import TaskError
from quantizer.tasks.datasets.examples import (
    Example,
    Plain,
    Question,
    Rewritten,
    Text,
    Words,
    class_number,
    datasets,
    read_columns,
    read_lines,
    read_objects,
    refuse_options,
    require_file,
)
from quantizer.utils.plain_values import json_values


@datasets.add("text-csv")
def read_text_csv(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return all texts of a CSV file with the columns ``text`` and ``label``."""
    refuse_options("text-csv", split=split, subset=subset)
    file = require_file("text-csv", path)
    columns = read_columns("text-csv", file, [["text"], ["label"]])
    return [_text(text, label, where) for where, (text, label) in columns]


def _text(text: str, label: str, where: str) -> Text:
    if not text:
        raise TaskError(f"{where}: the text is empty")
    number = class_number(label)
    if number is None:
        raise TaskError(f"{where}: the label is {label[:60]!r}, expected an integer from 0 (number your classes)")
    return Text(text, number)


_KIND = "texts"


def read_texts(path: Path, column: str = "text") -> list[str]:
    """Return all non-empty texts of a file.

    Args:
        path: a file whose ending names its format, see ``text_files``.
        column: the column of a ``.csv`` file, or the key of a ``.jsonl`` file.

    Raises:
        TaskError: the file does not exist, is malformed, lacks the column, or has no text.
    """
    file = require_file(_KIND, path)
    if file.suffix.lower() not in text_files:
        raise TaskError(f"{file}: expected a file that ends in {', '.join(text_files)}")
    texts = [text.strip() for text in text_files[file.suffix.lower()](file, column) if text.strip()]
    if not texts:
        raise TaskError(f"{file} has no texts: check that this is the right file")
    return texts


@datasets.add("texts")
def read_plain_texts(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return the texts of a file without labels; ``subset`` is the column or key. See ``read_texts``."""
    refuse_options("texts", split=split, subset=None)
    return [*read_texts(require_file("texts", path), subset or "text")]


@datasets.add("text-lines")
def read_text_lines(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return the texts of a file as examples of language models; see ``read_texts``."""
    refuse_options("text-lines", split=split, subset=subset)
    return [Plain(text) for text in read_texts(require_file("text-lines", path))]


def _from_csv(file: Path, column: str) -> Iterator[str]:
    reader = csv.reader(read_lines(_KIND, file), strict=True)
    try:
        columns = [name.strip() for name in next(reader, [])]
        if columns and column not in columns:
            raise TaskError(f"{file}:1: the columns are {columns}, without {column!r}: name one of them")
        for fields in filter(None, reader):
            if len(fields) != len(columns):
                raise TaskError(
                    f"{file}:{reader.line_num}: {len(fields)} fields, expected {len(columns)} as in the header"
                )
            yield fields[columns.index(column)]
    except csv.Error as error:
        raise TaskError(f"{file}:{reader.line_num}: not CSV ({error})") from error


def _from_jsonl(file: Path, column: str) -> Iterator[str]:
    for where, values in read_objects(_KIND, file):
        text = values.get(column)
        if not isinstance(text, str):
            raise TaskError(f'{where}: {str(values)[:60]!r}, expected an object like {{"{column}": "a text"}}')
        yield text


text_files = {".txt": lambda file, _: iter(read_lines(_KIND, file)), ".csv": _from_csv, ".jsonl": _from_jsonl}
"""The reader of each format, by the ending of the file."""


_DOCUMENT = "-DOCSTART-"


@datasets.add("conll")
def read_conll(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return the words and tags of all texts of a file."""
    refuse_options("conll", split=split, subset=subset)
    file = require_file("conll", path)
    examples: list[Example] = []
    words: list[str] = []
    tags: list[str] = []
    for number, line in enumerate([*read_lines("conll", file), ""], start=1):
        # A line with tabs is split at tabs only: a word may contain other spaces.
        columns = line.strip("\r\n").split("\t") if "\t" in line else line.split()
        if any(column.strip() for column in columns) and columns[0] != _DOCUMENT:
            if len(columns) < 2 or not columns[-1].strip():
                raise TaskError(f"{file}:{number}: {line.strip()[:60]!r}, expected a word and its tag")
            words.append(columns[0].strip())
            tags.append(columns[-1].strip())
        elif words:
            examples.append(Words(tuple(words), tuple(tags)))
            words, tags = [], []
    return examples


_FORM = '{"data": [{"paragraphs": [{"context": ..., "qas": [{"question": ..., "answers": [...]}]}]}]}'


@datasets.add("squad-json")
def read_squad_json(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return all questions of a file."""
    refuse_options("squad-json", split=split, subset=subset)
    file = require_file("squad-json", path)
    try:
        document: Any = json_values("".join(read_lines("squad-json", file)))
        return [question for article in document["data"] for question in _of_article(article, file)]
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise TaskError(f"{file} is not in the format of SQuAD ({problem}): expected {_FORM}") from error


def _of_article(article: Any, file: Path) -> Iterator[Question]:
    for paragraph in article["paragraphs"]:
        context = str(paragraph["context"])
        for entry in paragraph["qas"]:
            answers = tuple((str(answer["text"]), int(answer["answer_start"])) for answer in entry["answers"])
            for text, start in answers:
                if start < 0 or context[start : start + len(text)] != text:
                    raise TaskError(
                        f"{file}: the answer {text[:60]!r} to {str(entry['question'])[:60]!r} does not begin at "
                        f"character {start} of its context, where {context[max(start, 0) :][:60]!r} stands"
                    )
            yield Question(str(entry["question"]), context, answers)


_COLUMNS = (("source", "text", "document"), ("target", "translation", "summary"))


@datasets.add("text-pairs")
def read_text_pairs(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return all source and target texts of a file."""
    refuse_options("text-pairs", split=split, subset=subset)
    file = require_file("text-pairs", path)
    readers = {".csv": lambda: read_columns("text-pairs", file, _COLUMNS), ".jsonl": lambda: _pairs_from_jsonl(file)}
    if file.suffix.lower() not in readers:
        raise TaskError(f"{file}: expected a file that ends in {' or '.join(readers)}")
    examples: list[Example] = []
    for where, (text, target) in readers[file.suffix.lower()]():
        if not text.strip() or not target.strip():
            raise TaskError(f"{where}: a text is empty, expected a source text and a target text")
        examples.append(Rewritten(text, target))
    return examples


def _pairs_from_jsonl(file: Path) -> Iterator[tuple[str, list[str]]]:
    for where, values in read_objects("text-pairs", file):
        pair = [next((values[key] for key in keys if key in values), None) for keys in _COLUMNS]
        texts = [text for text in pair if isinstance(text, str)]
        if len(texts) < len(_COLUMNS):
            raise TaskError(f'{where}: expected an object like {{"source": "a text", "target": "its translation"}}')
        yield where, texts
