"""SQuAD files: read one, and score answers as the official script does.

A file of version 1.1 or 2.0 is JSON: ``data`` holds articles, each of ``paragraphs``, each with a ``context`` and its
``qas``, each with an ``id``, a ``question`` and ``answers``, each a ``text`` and where it starts (``answer_start``).
A question without answers cannot be answered from its context; ``""`` is right.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quantizer.errors import TaskError

__all__ = ["Answer", "Question", "exact_match", "f1", "normalize", "read_squad", "score"]

Kind = TypeVar("Kind")

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NAMES = {dict: "an object", list: "a list", str: "a text", int: "a whole number"}


@dataclass(frozen=True)
class Answer:
    """A piece of a context.

    Attributes:
        text: the piece.
        start: the character of the context that it starts at.
    """

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question with its context.

    Attributes:
        id: its name in the file.
        text: the question.
        context: where the answer is looked for.
        answers: all that are right; none: it cannot be answered.
    """

    id: str
    text: str
    context: str
    answers: tuple[Answer, ...]

    @property
    def right(self) -> tuple[str, ...]:
        """The texts to score against: ``""`` alone where nothing is left of the answers."""
        return tuple(answer.text for answer in self.answers if normalize(answer.text)) or ("",)


# -- reading -------------------------------------------------------------------------------------------------------


def read_squad(path: str | Path) -> list[Question]:
    """All questions of a file, in its order.

    Raises:
        TaskError: the file cannot be read or is not of this format: which key, and where.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise TaskError(f"{path}: is no JSON ({error}); expected a SQuAD file, version 1.1 or 2.0") from error
    try:
        questions = _questions(document)
    except _Unexpected as error:
        raise TaskError(f"{path}: {error}; expected a SQuAD file, version 1.1 or 2.0") from error
    if not questions:
        raise TaskError(f"{path}: holds no questions, expected at least one")
    twice = [name for name, count in Counter(question.id for question in questions).items() if count > 1]
    if twice:
        raise TaskError(f"{path}: {len(twice)} ids stand for several questions, such as {twice[0]!r}: make them unique")
    return questions


class _Unexpected(Exception):
    """What is not as the format has it, and where."""


def _questions(document: Any) -> list[Question]:
    found = []
    for article, where in _each(_of_kind(document, dict, "the file"), "data", "the file"):
        for paragraph, at in _each(article, "paragraphs", where):
            context = _field(paragraph, "context", str, at)
            for entry, here in _each(paragraph, "qas", at):
                found.append(
                    Question(
                        _field(entry, "id", str, here),
                        _field(entry, "question", str, here),
                        context,
                        tuple(_answer(given, context, its) for given, its in _each(entry, "answers", here)),
                    )
                )
    return found


def _answer(given: Mapping[str, Any], context: str, where: str) -> Answer:
    text, start = _field(given, "text", str, where), _field(given, "answer_start", int, where)
    there = context[start : start + len(text)]
    if start < 0 or there != text:
        raise _Unexpected(f"{where} is {text!r} at character {start}, where its context has {there!r}")
    return Answer(text, start)


def _each(holder: Mapping[str, Any], key: str, where: str) -> list[tuple[dict[str, Any], str]]:
    """The objects of a list, each with its place."""
    place = key if where == "the file" else f"{where}.{key}"
    entries = _field(holder, key, list, where)
    return [(_of_kind(entry, dict, f"{place}[{at}]"), f"{place}[{at}]") for at, entry in enumerate(entries)]


def _field(holder: Mapping[str, Any], key: str, kind: type[Kind], where: str) -> Kind:
    if key not in holder:
        keys = ", ".join(map(repr, holder)) or "none"
        raise _Unexpected(f"{where} has no key {key!r} (its keys: {keys})")
    return _of_kind(holder[key], kind, f"{where}.{key}" if where != "the file" else key)


def _of_kind(value: Any, kind: type[Kind], where: str) -> Kind:
    # To Python, true is a whole number too.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _Unexpected(f"{where} is {_NAMES.get(type(value), repr(value))}, not {_NAMES[kind]}")
    return value


# -- scoring -------------------------------------------------------------------------------------------------------


def normalize(answer: str) -> str:
    """In lower case, without punctuation and articles, with single blanks."""
    lower = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", lower).split())


def exact_match(given: str, right: Sequence[str]) -> float:
    """1 where an answer is one of those that are right, else 0."""
    return float(any(normalize(given) == normalize(one) for one in right))


def f1(given: str, right: Sequence[str]) -> float:
    """How far the words of an answer are those of one that is right, the best of them counting."""
    return max(_word_f1(normalize(given).split(), normalize(one).split()) for one in right)


def _word_f1(given: Sequence[str], right: Sequence[str]) -> float:
    if not given or not right:
        return float(given == right)
    common = (Counter(given) & Counter(right)).total()
    # The harmonic mean of common / given and common / right.
    return 2 * common / (len(given) + len(right))


def score(questions: Sequence[Question], answers: Mapping[str, str]) -> dict[str, float]:
    """Exact match and F1 in percent over all questions; ``answers`` by the question's id.

    Raises:
        TaskError: there are no questions, or one has no answer.
    """
    missing = [question.id for question in questions if question.id not in answers]
    if missing or not questions:
        raise TaskError(f"{len(missing)} of {len(questions)} questions have no answer: {', '.join(missing[:3])}")
    return {
        name: 100 * sum(measure(answers[one.id], one.right) for one in questions) / len(questions)
        for name, measure in (("exact", exact_match), ("f1", f1))
    }
