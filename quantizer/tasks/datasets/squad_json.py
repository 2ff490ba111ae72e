"""The data set ``squad-json``: questions about texts in the format of SQuAD, version 1.1 or 2.0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantizer.common.plain_values import json_values
from quantizer.errors import TaskError
from quantizer.tasks.datasets.rows import Question, Row, datasets, read_lines, refuse_options, require_file

_FORM = '{"data": [{"paragraphs": [{"context": ..., "qas": [{"question": ..., "answers": [...]}]}]}]}'


@datasets.add("squad-json")
def read_squad_json(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all questions of a file.

    Raises:
        TaskError: the file does not exist or has another form, or an answer is not in its context.
    """
    refuse_options("squad-json", split=split, subset=subset)
    file = require_file("squad-json", path)
    try:
        whole: Any = json_values("".join(read_lines("squad-json", file)))
        return [question for article in whole["data"] for question in _of_article(article, file)]
    except (KeyError, TypeError, ValueError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise TaskError(f"{file} has not the form of SQuAD ({said}): expected {_FORM}") from error


def _of_article(article: Any, file: Path) -> Iterator[Question]:
    for paragraph in article["paragraphs"]:
        context = str(paragraph["context"])
        for asked in paragraph["qas"]:
            answers = tuple((str(answer["text"]), int(answer["answer_start"])) for answer in asked["answers"])
            for text, start in answers:
                if start < 0 or context[start : start + len(text)] != text:
                    raise TaskError(
                        f"{file}: the answer {text[:60]!r} of the question {str(asked['question'])[:60]!r} is said to "
                        f"begin at character {start} of its context, where {context[max(start, 0) :][:60]!r} is"
                    )
            yield Question(str(asked["question"]), context, answers)
