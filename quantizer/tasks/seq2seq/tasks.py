"""The tasks ``speech-to-text`` and ``text-to-text``: words by encoders with decoders.

Shapes: N rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.tasks.audio import AudioInputs, error_rate, require_whole, word_errors
from quantizer.tasks.datasets.rows import Rewritten, Row, Speech
from quantizer.tasks.inputs import Inputs, Sample
from quantizer.tasks.seq2seq.writer import WritingTask
from quantizer.tasks.task import Predictions, rows_of_kind, tasks


@tasks.add("speech-to-text")
class SpeechToText(WritingTask):
    """Recordings to the texts that are written for them, scored by the word error rate (WER).

    Words are compared without case and punctuation, which models of this kind write and transcripts mostly lack.
    """

    name = "speech-to-text"
    reads = "audio"
    auto_class = "AutoModelForSpeechSeq2Seq"
    metric_name = "wer"
    higher_is_better = False
    packages = ("scipy", "torchmetrics")

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        whole: Any = model
        self._audio = AudioInputs(whole.get_encoder(), processor.feature_extractor, seconds=self.seconds)
        return self._audio

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        return [row.path for row in rows_of_kind(rows, Speech, self.name)]

    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Return the words of each row [N], as one text."""
        found = np.empty(len(rows), dtype=object)
        for at, row in enumerate(rows_of_kind(rows, Speech, self.name)):
            require_whole(row.path, self._audio.recordings.seconds)
            found[at] = _plain(row.text)
        return found

    def counts(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[np.float64]:
        """Return the wrong words of each row, and the words that are right for it [N x 2]."""
        return word_errors([_plain(text) for text in self.texts(predictions)], self.targets(rows))

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the word error rate: words that are wrong, missing or too many, by the words that are right."""
        return error_rate(sums)


def _plain(text: str) -> str:
    """Return words without case and punctuation; an apostrophe belongs to its word."""
    kept = "".join(letter if letter.isalnum() or letter == "'" else " " for letter in text.casefold())
    return " ".join(kept.split())


@tasks.add("text-to-text")
class TextToText(WritingTask):
    """Texts to the texts that are written for them, scored by ROUGE-L: the F1 of the longest common words in order."""

    name = "text-to-text"
    auto_class = "AutoModelForSeq2SeqLM"
    metric_name = "rouge_l"
    packages = ("torchmetrics",)

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        return [row.text for row in rows_of_kind(rows, Rewritten, self.name)]

    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Return the texts that are right [N]."""
        return np.array([row.target for row in rows_of_kind(rows, Rewritten, self.name)], dtype=object)

    def counts(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[np.float64]:
        """Return the ROUGE-L of each row, and 1 for the row [N x 2]."""
        score = partial(
            import_module("torchmetrics.functional.text").rouge_score,
            # By default it knows no letters but those of English.
            normalizer=str.casefold,
            tokenizer=partial(re.findall, r"\w+"),
            rouge_keys="rougeL",
        )
        pairs = zip(self.texts(predictions), self.targets(rows), strict=True)
        return np.array([(float(score(*pair)["rougeL_fmeasure"]), 1.0) for pair in pairs], dtype=np.float64)

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the mean over rows."""
        return np.asarray(sums[..., 0] / sums[..., 1])
