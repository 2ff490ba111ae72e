"""The data set ``hf``: tables of Hugging Face's package ``datasets``, whose column names decide the kind of examples.

    {name: hf, path: my-data, split: test}      a folder of save_to_disk, or of files that load_dataset accepts
    {name: hf, path: rows.parquet}              a file: .parquet, .arrow, .jsonl, .json, .csv, .tsv or .txt
    {name: hf, path: org/name, subset: en}      a data set of the hub, if there is a network

A path may end in ``@SPLIT``. No code of a data set is run: the package runs none since version 4.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any, TypeAlias

from quantizer.errors import MissingDependencyError, TaskError
from quantizer.tasks.datasets.builtin import cache_folder
from quantizer.tasks.datasets.examples import (
    Audio,
    Choices,
    Example,
    Image,
    Pair,
    Plain,
    Question,
    Rewritten,
    Speech,
    Text,
    Words,
    class_number,
    datasets,
)
from quantizer.utils.files import whole_file
from quantizer.utils.paths import expanded, is_file, is_folder, is_there

Field: TypeAlias = tuple[str, ...]
"""The names that a column may have."""

_LABEL = ("label", "labels")
_TEXT = ("text", "sentence", "content")


def _question(question: Any, context: Any, answers: Any) -> Question:
    texts, starts = answers["text"], answers["answer_start"]
    return Question(str(question), str(context), tuple(zip(map(str, texts), map(index, starts), strict=True)))


def _choices(question: Any, choices: Any, label: Any) -> Choices:
    texts = tuple(map(str, choices))
    number = texts.index(label) if label in texts else class_number(str(label))
    if number is None or number >= len(texts):
        raise ValueError(f"the label {label!r} is not one of the {len(texts)} choices")
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


_KINDS: Sequence[tuple[tuple[Field, ...], Callable[..., Example]]] = (
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


def examples_of_table(table: Any, name: str) -> list[Example]:
    """Return the examples of a table; the first kind whose columns are all present is used.

    Class numbers become class names if the table has them, except for texts, whose examples hold the number.
    """
    columns = list(table.column_names)
    for fields, make in _KINDS:
        matched = [next((name for name in names if name in columns), None) for names in fields]
        if None not in matched:
            return list(_examples(table, [str(column) for column in matched], make, name))
    expected = "; ".join(" with ".join("/".join(names) for names in fields) for fields, _ in _KINDS)
    raise TaskError(
        f"data set 'hf': {name} has the columns {', '.join(columns)}; expected {expected}. Rename them in "
        "Python with rename_column() and save_to_disk()"
    )


def _examples(table: Any, columns: Sequence[str], make: Callable[..., Example], name: str) -> Iterator[Example]:
    table = table.select_columns(list(dict.fromkeys(columns)))
    by_number = make is _text
    for column in columns:
        feature = table.features[column]
        if type(feature).__name__ in ("Image", "Audio"):
            # Undecoded: the model's own processor reads the bytes.
            table = table.cast_column(column, type(feature)(decode=False))
    for number, row in enumerate(table):
        values = (_named(row[column], table.features[column], by_number) for column in columns)
        try:
            yield make(*values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TaskError(f"data set 'hf': row {number} of {name}: {_message(error)}") from error


def _named(value: Any, feature: Any, by_number: bool) -> Any:
    """Return a value with class numbers replaced by class names."""
    inner: Any = getattr(feature, "feature", None)
    if by_number or value is None:
        return value
    if hasattr(feature, "int2str"):
        return feature.int2str(value)
    return [inner.int2str(number) for number in value] if hasattr(inner, "int2str") else value


def _file(value: Mapping[str, Any]) -> Path:
    """Return the path of an image or recording; content stored in the table is written to the cache."""
    path = Path(value["path"] or "")
    if value["path"] and path.is_file():
        return path.absolute()
    content = value["bytes"]
    if content is None:
        raise ValueError(f"there is no file {path}")
    cached = cache_folder() / "files" / f"{hashlib.sha256(content).hexdigest()}{path.suffix.lower()}"
    if not cached.is_file():
        cached.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(cached) as part:
            part.write_bytes(content)
    return cached


def _message(error: Exception) -> str:
    return f"key {error} is missing" if isinstance(error, KeyError) else str(error)


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
def read_hf(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return the examples of a split."""
    if path is None:
        raise TaskError(
            "data set 'hf' reads a file, a folder or a name of the hub, but no path was given: set 'path', for "
            "example to "
            "rows.parquet or stanfordnlp/sst2"
        )
    name = str(expanded(path))
    if split is None and not is_there(Path(name)):
        name, _, suffix = name.partition("@")
        split = suffix or None
    return examples_of_table(_table(_opened(Path(name), subset), name, split), name)


def _opened(path: Path, subset: str | None) -> Any:
    """Return the ``datasets.Dataset`` or ``DatasetDict`` at a path."""
    try:
        import datasets as library
    except ModuleNotFoundError as error:
        raise MissingDependencyError("datasets", "datasets") from error
    exists = is_folder(path) or is_file(path)
    if not exists and not _HUB_NAME.fullmatch(str(path)):
        raise TaskError(
            f"data set 'hf': there is no file or folder {path} (a relative path starts at {Path.cwd()}), and it is "
            "not a name of the hub, such as stanfordnlp/sst2"
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
        # The cause has the useful message; a table without rows raises an IndexError.
        lines = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        where = "" if exists else ", and there is no file or folder of this name"
        raise TaskError(f"data set 'hf': {path} cannot be read{where}: {lines[0]}") from error


def _table(opened: Any, name: str, split: str | None) -> Any:
    """Return one split of a ``Dataset`` or ``DatasetDict``."""
    if not isinstance(opened, dict):
        if split is not None:
            raise TaskError(f"data set 'hf': {name} has no splits, but {split!r} was given: remove it")
        return opened
    splits = ", ".join(map(str, opened))
    if split is None and len(opened) > 1:
        raise TaskError(f"data set 'hf': {name} has the splits {splits}: set 'split', or write {name}@SPLIT")
    if split is not None and split not in opened:
        raise TaskError(f"data set 'hf': {name} has no split {split!r}; it has {splits}")
    return next(iter(opened.values())) if split is None else opened[split]
