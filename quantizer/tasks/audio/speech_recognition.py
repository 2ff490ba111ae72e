"""The task ``automatic-speech-recognition``: the words of recordings, by models with a CTC head.

Shapes: N rows, B recordings in a batch, T steps in time of the longest row, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.audio.audio_inputs import AudioInputs, require_whole
from quantizer.tasks.audio.word_errors import error_rate, word_errors
from quantizer.tasks.classification import compare_classifiers
from quantizer.tasks.counted import CountedTask
from quantizer.tasks.datasets.rows import Row, Speech
from quantizer.tasks.inputs import Batch, Inputs, Sample
from quantizer.tasks.kinds import rows_of_kind
from quantizer.tasks.outputs import first_output
from quantizer.tasks.task import Predictions, tasks
from quantizer.tasks.tokens.parts import is_token


@tasks.add("automatic-speech-recognition")
class SpeechRecognition(CountedTask):
    """Recordings to logits of their steps [N x T x V], to words, scored by the word error rate (WER).

    The token of a step is that of its largest logit; the tokenizer joins what is repeated and drops blanks.
    """

    name = "automatic-speech-recognition"
    reads = "audio"
    auto_class = "AutoModelForCTC"
    output_name = "logits"
    metric_name = "wer"
    higher_is_better = False
    packages = ("scipy", "torchmetrics")

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        self._tokenizer = processor.tokenizer
        self._audio = AudioInputs(model, processor.feature_extractor, seconds=self.seconds)
        return self._audio

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        return [row.path for row in rows_of_kind(rows, Speech, self.name)]

    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Return the words of each row [N], as one text."""
        letters = self._letters()
        longest = self._audio.recordings.seconds
        found = np.empty(len(rows), dtype=object)
        for at, row in enumerate(rows_of_kind(rows, Speech, self.name)):
            unknown = sorted({*filter(str.isalpha, row.text)} - letters)
            if unknown:
                shown = "".join(sorted(filter(str.isalpha, letters)))
                raise TaskError(
                    f"{row.path}: its words have the letter {unknown[0]!r}, which the model never writes; expected "
                    f"words in its own letters, {shown[:60]}"
                )
            require_whole(row.path, longest)
            found[at] = row.text
        return found

    def collect(self, result: object, batch: Batch) -> Sequence[torch.Tensor]:
        """Return the logits of each recording's own steps, B tensors [T x V]."""
        logits = first_output(result, self.output_name)
        if logits.dim() != 3:
            raise TaskError(f"the model's output has the shape {tuple(logits.shape)}, expected [batch, steps, tokens]")
        waves = next(iter(batch.values()))
        return [row[: _own_steps(wave, len(row))] for row, wave in zip(logits, waves, strict=True)]

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return the token of each step [N x T]; -1 after the last of a row."""
        return np.where(is_token(outputs), np.nan_to_num(outputs).argmax(axis=-1), -1)

    def counts(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[np.float64]:
        """Return the wrong words of each row, and the words that are right for it [N x 2]."""
        said = [self._tokenizer.decode(tokens[tokens >= 0].tolist()) for tokens in predictions.decisions]
        return word_errors(said, self.targets(rows))

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the word error rate: words that are wrong, missing or too many, by the words that are right."""
        return error_rate(sums)

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the figures of a classifier, over all steps."""
        own = is_token(float_predictions.outputs)
        return compare_classifiers(
            *(Predictions(one.outputs[own], one.decisions[own]) for one in (float_predictions, other))
        )

    def _letters(self) -> set[str]:
        """Return all characters that the tokenizer can write."""
        lowers = getattr(self._tokenizer, "do_lower_case", False)
        return {*"".join(token.lower() if lowers else token for token in self._tokenizer.get_vocab())}


def _own_steps(wave: torch.Tensor, steps: int) -> int:
    """Return how many of a recording's steps are not of what fills it, which is zero."""
    used = torch.nonzero(wave)
    return max(1, ceil(steps * (int(used[-1, 0]) + 1) / len(wave))) if len(used) else steps
