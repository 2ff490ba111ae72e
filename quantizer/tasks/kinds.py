"""The check that rows are of the kind that a task needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from quantizer.errors import TaskError
from quantizer.tasks.datasets.rows import Row

Kind = TypeVar("Kind")
DATASETS = {
    "Audio": "'audio-folder', 'audio-csv', 'hf'",
    "Boxes": "'coco-json'",
    "Choices": "'choices-jsonl', 'hf'",
    "Depths": "'image-depths'",
    "Image": "'image-folder', 'image-csv', 'hf'",
    "Masked": "'image-masks'",
    "Pair": "'stsb-csv', 'hf'",
    "Plain": "'text-lines', 'hf'",
    "Question": "'squad-json', 'hf'",
    "Rewritten": "'text-pairs', 'hf'",
    "Speech": "'transcripts', 'hf'",
    "Text": "'sst2-text', 'text-csv', 'vader', 'hf'",
    "Words": "'conll', 'hf'",
}


def rows_of_kind(rows: Sequence[Row], kind: type[Kind], task: str) -> list[Kind]:
    """Return the rows as a list of one kind."""
    checked: list[Kind] = []
    for row in rows:
        if not isinstance(row, kind):
            raise TaskError(
                f"task {task!r} needs rows of kind {kind.__name__}, got {type(row).__name__}: use a data set of such "
                f"rows, like {DATASETS[kind.__name__]}"
            )
        checked.append(row)
    return checked
