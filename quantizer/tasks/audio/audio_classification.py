"""The task ``audio-classification``: a fine-tuned classifier of recordings, by the class of the largest logit."""

from __future__ import annotations

from typing import Any

import torch

from quantizer.tasks.audio.audio_inputs import AudioInputs
from quantizer.tasks.classification import FileClassification
from quantizer.tasks.datasets.rows import Audio
from quantizer.tasks.inputs import Inputs
from quantizer.tasks.task import tasks


@tasks.add("audio-classification")
class AudioClassification(FileClassification):
    """Recordings to logits [N x C], to labels [N] by the largest logit, scored by accuracy.

    What is longer than ``seconds`` is cut at its end.
    """

    name = "audio-classification"
    reads = "audio"
    auto_class = "AutoModelForAudioClassification"
    packages = ("scipy",)
    kind = Audio

    def file_inputs(self, model: torch.nn.Module, processor: Any) -> Inputs:
        return AudioInputs(model, processor, seconds=self.seconds)
