"""The tasks ``speech-to-text`` and ``text-to-text`` of encoder-decoder models.

Shapes: N samples.
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
from quantizer.tasks.datasets.examples import Example, Rewritten, Speech
from quantizer.tasks.inputs import Inputs, Sample
from quantizer.tasks.seq2seq.writer import WritingTask
from quantizer.tasks.task import Predictions, examples_of_kind, tasks


@tasks.add("speech-to-text")
class SpeechToText(WritingTask):
    """Recordings to generated texts, scored by the word error rate (WER).

    Words are compared without case and punctuation, which most transcripts lack.
    """

    name = "speech-to-text"
    reads = "audio"
    auto_class = "AutoModelForSpeechSeq2Seq"
    pipeline_class = "AutomaticSpeechRecognitionPipeline"
    metric_name = "wer"
    higher_is_better = False
    packages = ("scipy", "torchmetrics")

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        encoder_decoder: Any = model
        self._audio = AudioInputs(encoder_decoder.get_encoder(), processor.feature_extractor, seconds=self.seconds)
        return self._audio

    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        return [example.path for example in examples_of_kind(examples, Speech, self.name)]

    def targets(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        """Return the words of each sample [N], as one text."""
        texts = np.empty(len(examples), dtype=object)
        for at, example in enumerate(examples_of_kind(examples, Speech, self.name)):
            require_whole(example.path, self._audio.recordings.seconds)
            texts[at] = _plain(example.text)
        return texts

    def counts(self, predictions: Predictions, examples: Sequence[Example]) -> npt.NDArray[np.float64]:
        """Return the word errors of each sample, and the number of its target words [N x 2]."""
        return word_errors([_plain(text) for text in self.texts(predictions)], self.targets(examples))

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the word error rate: substituted, missing and extra words per target word."""
        return error_rate(sums)


def _plain(text: str) -> str:
    """Return words without case and punctuation; an apostrophe belongs to its word."""
    letters = "".join(letter if letter.isalnum() or letter == "'" else " " for letter in text.casefold())
    return " ".join(letters.split())


@tasks.add("text-to-text")
class TextToText(WritingTask):
    """Texts to generated texts, scored by ROUGE-L: the F1 of the longest common subsequence of words."""

    name = "text-to-text"
    auto_class = "AutoModelForSeq2SeqLM"
    metric_name = "rouge_l"
    packages = ("torchmetrics",)

    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        return [example.text for example in examples_of_kind(examples, Rewritten, self.name)]

    def targets(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        """Return the target texts [N]."""
        return np.array([example.target for example in examples_of_kind(examples, Rewritten, self.name)], dtype=object)

    def counts(self, predictions: Predictions, examples: Sequence[Example]) -> npt.NDArray[np.float64]:
        """Return the ROUGE-L of each sample, and 1 [N x 2]."""
        score = partial(
            import_module("torchmetrics.functional.text").rouge_score,
            # Its default accepts English letters only.
            normalizer=str.casefold,
            tokenizer=partial(re.findall, r"\w+"),
            rouge_keys="rougeL",
        )
        pairs = zip(self.texts(predictions), self.targets(examples), strict=True)
        return np.array([(float(score(*pair)["rougeL_fmeasure"]), 1.0) for pair in pairs], dtype=np.float64)

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the mean over samples."""
        return np.asarray(sums[..., 0] / sums[..., 1])
