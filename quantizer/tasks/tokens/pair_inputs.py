"""The batches of pairs of texts, such as a question and its context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from quantizer.errors import TaskError
from quantizer.tasks.inputs import TextInputs


class PairInputs(TextInputs):
    """The batches of pairs of texts, of which the longer one is cut first; a subclass names its task."""

    wanted: ClassVar[str]
    """The task, what it is for, and its data set, in words."""

    def encoded(self, texts: Sequence[Any], **options: Any) -> Any:
        self.check(texts)
        first, second = zip(*texts, strict=True)
        return self.tokenizer(list(first), list(second), truncation="longest_first", **options)

    def check(self, texts: Sequence[Any]) -> None:
        """Raise ``TaskError`` if a sample is a text alone."""
        for text in texts:
            if isinstance(text, str):
                raise TaskError(f"{text[:60]!r} is a text alone, and {self.wanted}")
