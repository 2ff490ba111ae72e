"""The data set ``choices-jsonl``: questions with answers to choose from, one object of JSON a line.

    {"question": "What flies?", "choices": ["a cat", "a plane"], "label": 1}

A text that the question is about may stand beside it as ``context``. A label is the place of the right choice from 0,
or its text; it may also be called ``answer``. Other keys are ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantizer.errors import TaskError
from quantizer.tasks.datasets.columns import read_objects
from quantizer.tasks.datasets.rows import Choices, Row, class_number, datasets, refuse_options, require_file

_FORM = '{"question": "What flies?", "choices": ["a cat", "a plane"], "label": 1}'


@datasets.add("choices-jsonl")
def read_choices(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return all questions of a file.

    Raises:
        TaskError: the file does not exist, or a line has another form or no right choice.
    """
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
