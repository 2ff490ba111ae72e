"""Rows of a table of the package ``datasets``, whose columns say by their names what a row is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from quantizer.errors import TaskError
from quantizer.files import whole_file
from quantizer.tasks.datasets.fetch import cache_folder
from quantizer.tasks.datasets.rows import (
    Audio,
    Choices,
    Image,
    Pair,
    Plain,
    Question,
    Rewritten,
    Row,
    Speech,
    Text,
    Words,
    class_number,
)

Field: TypeAlias = tuple[str, ...]
"""The names that a column may have."""

_LABEL = ("label", "labels")
_TEXT = ("text", "sentence", "content")


def _question(question: Any, context: Any, answers: Any) -> Question:
    texts, starts = answers["text"], answers["answer_start"]
    return Question(str(question), str(context), tuple(zip(map(str, texts), map(int, starts), strict=True)))


def _choices(question: Any, choices: Any, label: Any) -> Choices:
    texts = tuple(map(str, choices))
    number = texts.index(label) if label in texts else class_number(str(label))
    if number is None or number >= len(texts):
        raise ValueError(f"the label {label!r} is none of {len(texts)} choices")
    return Choices(str(question), "", texts, number)


def _text(text: Any, label: Any) -> Text:
    number = class_number(str(label))
    if number is None:
        raise ValueError(f"the label is {label!r}, expected an integer from 0: class_encode_column() makes it one")
    return Text(str(text), number)


def _words(words: Any, tags: Any) -> Words:
    if len(words) != len(tags):
        raise ValueError(f"{len(words)} words, but {len(tags)} tags")
    return Words(tuple(map(str, words)), tuple(map(str, tags)))


# The first kind of row whose columns are all there is taken.
_KINDS: Sequence[tuple[tuple[Field, ...], Callable[..., Row]]] = (
    ((("question",), ("context",), ("answers",)), _question),
    ((("question",), ("choices",), ("label", "answer")), _choices),
    ((("tokens", "words"), ("ner_tags", "tags", "labels")), _words),
    (
        (("sentence1", "text1"), ("sentence2", "text2"), ("score", "similarity_score", "label")),
        lambda first, second, score: Pair(str(first), str(second), float(score)),
    ),
    ((("image", "img"), _LABEL), lambda file, label: Image(_file(file), str(label))),
    ((("audio",), _LABEL), lambda file, label: Audio(_file(file), str(label))),
    (
        (("audio",), ("text", "sentence", "transcription")),
        lambda file, text: Speech(_file(file), " ".join(text.split())),
    ),
    (
        (("source", *_TEXT, "document", "article"), ("target", "summary", "highlights")),
        lambda text, target: Rewritten(str(text), str(target)),
    ),
    ((_TEXT, _LABEL), _text),
    ((_TEXT,), lambda text: Plain(str(text))),
)


def rows_of_table(table: Any, name: str) -> list[Row]:
    """Return the rows of a table, as the kind that its columns make.

    Classes that the table knows by name get their names, except those of texts, whose rows hold the number.

    Args:
        table: a ``datasets.Dataset``.
        name: its name, for messages.

    Raises:
        TaskError: no kind of row has these columns, or a row is malformed.
    """
    columns = list(table.column_names)
    for fields, make in _KINDS:
        found = [next((name for name in names if name in columns), None) for names in fields]
        if None not in found:
            return list(_rows(table, [str(column) for column in found], make, name))
    expected = "; ".join(" with ".join("/".join(names) for names in fields) for fields, _ in _KINDS)
    raise TaskError(
        f"data set 'hf': {name} has the columns {', '.join(columns)}; expected {expected}. In Python, "
        "rename_column() and save_to_disk() give them these names"
    )


def _rows(table: Any, columns: Sequence[str], make: Callable[..., Row], name: str) -> Iterator[Row]:
    table = table.select_columns(list(dict.fromkeys(columns)))
    by_number = make is _text
    for column in columns:
        feature = table.features[column]
        if type(feature).__name__ in ("Image", "Audio"):
            # The bytes as they are, which the model's own processor decodes.
            table = table.cast_column(column, type(feature)(decode=False))
    for at, row in enumerate(table):
        values = (_named(row[column], table.features[column], by_number) for column in columns)
        try:
            yield make(*values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TaskError(f"data set 'hf': row {at} of {name}: {_told(error)}") from error


def _named(value: Any, feature: Any, by_number: bool) -> Any:
    """Return a value with the names of classes in the place of their numbers."""
    inner: Any = getattr(feature, "feature", None)
    if by_number or value is None:
        return value
    if hasattr(feature, "int2str"):
        return feature.int2str(value)
    return [inner.int2str(one) for one in value] if hasattr(inner, "int2str") else value


def _file(held: Mapping[str, Any]) -> Path:
    """Return the path of an image or a recording; what the table holds itself is put into a cache."""
    path = Path(held["path"] or "")
    if held["path"] and path.is_file():
        return path.absolute()
    content = held["bytes"]
    if content is None:
        raise ValueError(f"there is no file {path}")
    kept = cache_folder() / "files" / f"{hashlib.sha256(content).hexdigest()}{path.suffix.lower()}"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(kept) as part:
            part.write_bytes(content)
    return kept


def _told(error: Exception) -> str:
    return f"there is no {error}" if isinstance(error, KeyError) else str(error)
