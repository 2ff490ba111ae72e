"""The words for the errors of a ranking, by measure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ErrorWords:
    """The words for the error of a measure."""

    column: str
    """Title of its column."""
    phrase: str
    """The name of the error within a sentence, without a capital first letter."""

    @property
    def caption(self) -> str:
        """The line above a picture."""
        return f"{self.column[:1].upper()}{self.column[1:]}, one group quantized at a time"

    @property
    def heading(self) -> str:
        """The phrase with a capital first letter."""
        return self.phrase[:1].upper() + self.phrase[1:]


_WORDS = {
    "gradient": ErrorWords(
        column="estimated divergence",
        phrase="divergence of the output (Kullback-Leibler of logits, else relative error), estimated from gradients",
    ),
    "loss": ErrorWords(column="estimated effect on the loss", phrase="effect on the loss, estimated from gradients"),
    "output": ErrorWords(
        column="divergence of the output",
        phrase="divergence of the output (Kullback-Leibler of logits, else relative error)",
    ),
    "local": ErrorWords(column="relative error at its sites", phrase="relative error at the outputs of its sites"),
    "metric": ErrorWords(column="drop of the metric", phrase="drop of the metric"),
}
_UNKNOWN = ErrorWords(column="error", phrase="error")


def error_words(measure: str | None) -> ErrorWords:
    """Return the words for a measure's errors; ``error`` if the measure is unknown."""
    return _UNKNOWN if measure is None else _WORDS.get(measure, _UNKNOWN)
