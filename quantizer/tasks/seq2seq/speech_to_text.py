"""The task ``speech-to-text``: the words of recordings, by encoders with decoders, such as Whisper.

Shapes: N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.tasks.audio.audio_inputs import AudioInputs, require_whole
from quantizer.tasks.audio.word_errors import error_rate, word_errors
from quantizer.tasks.datasets.rows import Row, Speech
from quantizer.tasks.inputs import Inputs, Sample
from quantizer.tasks.kinds import rows_of_kind
from quantizer.tasks.seq2seq.writer import WritingTask
from quantizer.tasks.task import Predictions, tasks


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
